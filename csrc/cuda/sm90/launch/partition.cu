#include "../problem/problem.h"

#include <atomic>

#include "launches.h"

namespace moeq::sm90 {
namespace {

using StreamContexts = CUresult (*)(CUstream, CUcontext*, CUgreenCtx*);   // cuStreamGetCtx as of CUDA 12.5

// What never changes of a device.
struct Device {
  int multiprocessors;
  bool shared;   // with other processes, by MPS
};

cudaError_t ask_device(int number, Device& device) {
  int shared = 0;
  if (cudaDeviceGetAttribute(&shared, cudaDevAttrMpsEnabled, number) != cudaSuccess) {
    cudaGetLastError();   // a driver that does not know the question: it may be
    shared = 1;
  }
  device.shared = shared != 0;
  return cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, number);
}

// Asked for once a device; repeated by a race at worst.
cudaError_t current_device(Device& device) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];   // twice the multiprocessors, and one if it is shared
  int number = 0;
  cudaError_t error = cudaGetDevice(&number);
  if (error != cudaSuccess) return error;
  const int word = number < kDevices ? known[number].load(std::memory_order_relaxed) : 0;
  device = {word / 2, word % 2 != 0};
  if (word != 0) return cudaSuccess;
  error = ask_device(number, device);
  if (error == cudaSuccess && number < kDevices) {
    known[number].store(2 * device.multiprocessors + device.shared, std::memory_order_relaxed);
  }
  return error;
}

// Of a green context, if there is one, else of the other; 0: not known.
int multiprocessors_of(CUcontext context, CUgreenCtx green) {
  static const auto of_green = driver_function<decltype(&cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource", 12040);
  static const auto of_context = driver_function<decltype(&cuCtxGetDevResource)>("cuCtxGetDevResource", 12040);
  if (of_green == nullptr || of_context == nullptr) return 0;
  CUdevResource resource{};
  const CUresult result = green != nullptr ? of_green(green, &resource, CU_DEV_RESOURCE_TYPE_SM)
                                           : of_context(context, &resource, CU_DEV_RESOURCE_TYPE_SM);
  return result == CUDA_SUCCESS ? static_cast<int>(resource.sm.smCount) : 0;
}

}  // namespace

cudaError_t partition_of(cudaStream_t stream, Partition& partition) {
  static const auto contexts_of = driver_function<StreamContexts>("cuStreamGetCtx", 12050);
  Device device{};
  const cudaError_t error = current_device(device);
  partition = {device.multiprocessors, !device.shared};
  if (error != cudaSuccess || contexts_of == nullptr) return error;
  CUcontext context = nullptr;
  CUgreenCtx green = nullptr;
  const bool known = contexts_of(stream, &context, &green) == CUDA_SUCCESS;
  if (known && green == nullptr && !device.shared) return cudaSuccess;
  partition.whole_device = false;
  const int count = known ? multiprocessors_of(context, green) : 0;
  if (count > 0 && count < device.multiprocessors) partition.multiprocessors = count;
  return cudaSuccess;
}

}  // namespace moeq::sm90
