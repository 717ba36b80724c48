// What partition.cu makes of the driver's answers, which the test gives: no GPU is asked.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

// Of the machine that is played. green: multiprocessors of the stream's green context, 0 where it has none.
struct Machine {
  int sms, mps, green, context;   // context: multiprocessors of the stream's own context
  int knows_contexts;             // whether the driver has cuStreamGetCtx, as of CUDA 12.5
  int fails;                      // whether that says nothing
};

namespace {

Machine machine;
int devices;   // each question is about a device that was never asked about

cudaError_t next_device(int* device) {
  *device = devices;
  return cudaSuccess;
}

cudaError_t attribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount ? machine.sms : machine.mps;
  return cudaSuccess;
}

CUresult contexts_of(CUstream, CUcontext* context, CUgreenCtx* green) {
  *context = reinterpret_cast<CUcontext>(&machine);
  *green = machine.green > 0 ? reinterpret_cast<CUgreenCtx>(&machine) : nullptr;
  return machine.fails ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult of_green(CUgreenCtx, CUdevResource* resource, CUdevResourceType) {
  resource->sm.smCount = machine.green;
  return CUDA_SUCCESS;
}

CUresult of_context(CUcontext, CUdevResource* resource, CUdevResourceType) {
  resource->sm.smCount = machine.context;
  return CUDA_SUCCESS;
}

cudaError_t entry_point(const char* name, void** function, unsigned int, unsigned long long,
                        cudaDriverEntryPointQueryResult* found) {
  *function = std::strcmp(name, "cuStreamGetCtx") == 0             ? reinterpret_cast<void*>(contexts_of)
              : std::strcmp(name, "cuGreenCtxGetDevResource") == 0 ? reinterpret_cast<void*>(of_green)
              : std::strcmp(name, "cuCtxGetDevResource") == 0      ? reinterpret_cast<void*>(of_context)
                                                                   : nullptr;
  *found = *function != nullptr && machine.knows_contexts ? cudaDriverEntryPointSuccess
                                                          : cudaDriverEntryPointVersionNotSufficent;
  return cudaSuccess;
}

}  // namespace

#define cudaGetDevice next_device
#define cudaDeviceGetAttribute attribute
#define cudaGetDriverEntryPointByVersion entry_point
#include "../../csrc/cuda/sm90/launch/partition.cu"

// Multiprocessors, negative unless they are the whole device; 0: an error.
extern "C" int partition(const Machine* given) {
  machine = *given;
  ++devices;
  moeq::sm90::Partition found{};
  if (moeq::sm90::partition_of(nullptr, found) != cudaSuccess) return 0;
  const moeq::sm90::Partition first = found;
  if (moeq::sm90::partition_of(nullptr, found) != cudaSuccess) return 0;   // by what is known of the device by now
  const bool same = found.multiprocessors == first.multiprocessors && found.whole_device == first.whole_device;
  return !same ? 0 : found.whole_device ? found.multiprocessors : -found.multiprocessors;
}
