// How kernels are launched: once all before are over and all blocks at once, before the previous kernel has ended, in
// clusters; and what is asked of CUDA, or told it, once for each device, and repeated by a race at worst.
#pragma once
#include <atomic>
#include <cstdint>
#include <cuda.h>
#include <cuda_runtime.h>

namespace moeq::sm90 {

constexpr int kKnownDevices = 64;
using KnownDevices = std::atomic<bool>[kKnownDevices];   // a kernel's own: where it may have its shared memory
using KnownAddresses = std::atomic<void*>[kKnownDevices];   // a variable's own

// tell() unless the current device has been told.
template <class Tell>
cudaError_t tell_once(KnownDevices& known, Tell tell) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || (device < kKnownDevices && known[device])) return error;
  error = tell();
  if (device < kKnownDevices) known[device] = error == cudaSuccess;
  return error;
}

inline cudaError_t allow_shared_memory(const void* kernel, int bytes, KnownDevices& known) {
  return tell_once(known,
                   [=] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); });
}

// Lets a kernel have clusters of more blocks than kPortableCluster.
inline cudaError_t allow_large_clusters(const void* kernel, KnownDevices& known) {
  return tell_once(known,
                   [=] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1); });
}

// Where a variable of the device lies on the current one.
template <class T>
cudaError_t find_variable(T& variable, KnownAddresses& known, void*& address) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  address = error == cudaSuccess && device < kKnownDevices ? known[device].load() : nullptr;
  if (error != cudaSuccess || address != nullptr) {
    return error;
  }
  error = cudaGetSymbolAddress(&address, variable);
  if (error == cudaSuccess && device < kKnownDevices) {
    known[device] = address;
  }
  return error;
}

inline cudaLaunchConfig_t launch_config(dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                                        cudaLaunchAttribute* attributes, int count) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return config;
}

inline cudaLaunchAttribute may_begin_early() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// A launch that may begin before the previous kernel of the stream has ended, be it anyone's. The kernel itself waits
// for it (wait_for_previous_kernel in async.cuh): every thread, before it touches global memory, weights included, and
// before it ends. Behind its call's first launch it may read the call's inputs earlier (load_settled there).
// docs/design.md, section 11, has the rule; tests/programs/sass_order.py holds machine code to it.
template <class Args>
cudaError_t launch_after(void (*kernel)(Args), const Args& args, dim3 grid, int threads, int shared_bytes,
                         cudaStream_t stream) {
  cudaLaunchAttribute attribute = may_begin_early();
  const cudaLaunchConfig_t config = launch_config(grid, threads, shared_bytes, stream, &attribute, 1);
  return cudaLaunchKernelEx(&config, kernel, args);
}

// The launch of a kernel whose blocks wait for each other: one on each multiprocessor, all of them at once. early: when
// the kernel in front has triggered, as launch_after; else when all in front are over (docs/design.md, section 11).
template <class Args>
cudaError_t launch_together(const void* kernel, const Args& args, int grid, int threads, int shared_bytes,
                            cudaStream_t stream, bool early) {
  cudaLaunchAttribute attributes[2] = {{}, may_begin_early()};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  const cudaLaunchConfig_t config = launch_config(dim3(grid), threads, shared_bytes, stream, attributes, early ? 2 : 1);
  void* arguments[] = {const_cast<Args*>(&args)};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

constexpr int kPortableCluster = 8;  // blocks that a cluster may have on every device

// Clusters, which may begin before the previous kernel has ended.
template <class Args>
cudaError_t launch_clusters_after(void (*kernel)(Args), const Args& args, int clusters, int blocks, int threads,
                                  cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {may_begin_early(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  const cudaLaunchConfig_t config = launch_config(dim3(clusters * blocks), threads, 0, stream, attributes, 2);
  return cudaLaunchKernelEx(&config, kernel, args);
}

// Functions of the driver, found through the runtime, so that nothing has to be linked with it; and tensor maps, which
// one of them makes.

// As CUDA `version` has it (12040 is 12.4); null where the driver is older.
template <class Function>
Function driver_function(const char* name, unsigned int version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function>(function);
}

// Tensor maps, which tell the copy engine how an array lies in memory. The driver makes them.

// Innermost first. Strides are in bytes, multiples of 16; that of the innermost dimension, 2, is left out.
struct TensorMapShape {
  uint64_t sizes[5];
  uint64_t strides[4];
  uint32_t box[5];
};

// bfloat16, 64 innermost values of a box (128 bytes) swizzled; what lies outside of `sizes` is read as zero.
inline cudaError_t encode_bf16_map(CUtensorMap& map, const void* data, const TensorMapShape& shape) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(data), shape.sizes, shape.strides, shape.box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace moeq::sm90
