// The decode of very few tokens with 4-bit weights (decode_few_kernel.cuh), and its launch with any.
#include "../launch/in_front.h"
#include "../launch/launches.h"
#include "decode_few.h"
#include "decode_few_kernel.cuh"

namespace moeq::sm90::few {

// Of launches that take the whole device.
__device__ uint4 whole_device_exchange[2 * kExchangePairs];
__device__ uint32_t whole_device_epochs[kMaxBlocks];

const void* kernel_of(Format format, Kind kind) {
  switch (format) {
    case Format::kMxfp4:
      return kernel_of<Mxfp4Format>(kind);
    case Format::kNvfp4:
      return kind == Kind::kQuantized         ? kernel<Nvfp4Format, Kind::kQuantized>()
             : kind == Kind::kQuantizedShared ? kernel<Nvfp4Format, Kind::kQuantizedShared>()
                                              : kernel_of<Nvfp4Format>(kind);
    default:
      return int4_kernel_of(format, kind);
  }
}

cudaError_t give_exchange(const Plan& plan, Args& args) {
  if (!args.p.partition.whole_device) {
    return cudaMemsetAsync(args.exchange, 0, exchange_bytes(plan), args.p.stream);
  }
  if (plan.kind == Kind::kGathered) {
    return find_gathered_exchange(args);
  }
  static KnownExchange known;
  return find_exchange(whole_device_exchange, whole_device_epochs, known, args);
}

cudaError_t launch(Plan& plan, const void* kernel, KnownDevices& known) {
  const Problem& p = plan.args.p;
  cudaError_t error = allow_shared_memory(kernel, plan.shared_bytes, known);
  if (error == cudaSuccess) {
    error = give_exchange(plan, plan.args);
  }
  if (error != cudaSuccess) {
    return error;
  }
  const bool early = stands_behind_trigger(p.stream);
  error = launch_together(kernel, plan.args, plan.grid, kBlockThreads, plan.shared_bytes, p.stream, early);
  if (error == cudaSuccess) note_trigger(p.stream);
  return error;
}

cudaError_t run(Plan& plan) {
  if (plan.codes == Codes::kMxfp8) {
    return run_mxfp8(plan);
  }
  if (plan.codes != Codes::kFourBits) {
    return run_fp8(plan);
  }
  if (plan.kind == Kind::kGathered) {
    return run_gathered(plan);
  }
  static KnownDevices known[kFormats][kKinds];
  const Format format = plan.args.p.format;
  return launch(plan, kernel_of(format, plan.kind), known[static_cast<int>(format)][static_cast<int>(plan.kind)]);
}

}  // namespace moeq::sm90::few
