// What is asked of CUDA, or told it, once for each device, and repeated by a race at worst.
#pragma once
#include <atomic>
#include <cuda_runtime.h>

namespace moeq::sm90 {

constexpr int kKnownDevices = 64;
using KnownDevices = std::atomic<bool>[kKnownDevices];   // a kernel's own: where it may have its shared memory
using KnownAddresses = std::atomic<void*>[kKnownDevices];   // a variable's own

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

}  // namespace moeq::sm90
