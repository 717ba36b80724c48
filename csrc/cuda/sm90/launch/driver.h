// Functions of the driver, found through the runtime, so that nothing has to be linked with it; and tensor maps, which
// one of them makes.
#pragma once
#include <cstdint>
#include <cuda.h>
#include <cuda_runtime.h>

namespace moeq::sm90 {

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
