// The launch of a kernel whose blocks wait for each other: one on each multiprocessor, all of them at once. It begins when
// all kernels in front are over, whatever they trigger (docs/design.md, section 11).
#pragma once
#include <atomic>
#include <cuda_runtime.h>

namespace moeq::sm90 {

constexpr int kKnownDevices = 64;
using KnownDevices = std::atomic<bool>[kKnownDevices];   // a kernel's own: where it may have its shared memory

// Once for each device and kernel; repeated by a race at worst.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes, KnownDevices& known) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || (device < kKnownDevices && known[device])) {
    return error;
  }
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (device < kKnownDevices) {
    known[device] = error == cudaSuccess;
  }
  return error;
}

template <class Args>
cudaError_t launch_together(const void* kernel, const Args& args, int grid, int threads, int shared_bytes,
                            cudaStream_t stream) {
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<Args*>(&args)};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace moeq::sm90
