// Functions of the driver, found through the runtime, so that nothing has to be linked with it.
#pragma once
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

}  // namespace moeq::sm90
