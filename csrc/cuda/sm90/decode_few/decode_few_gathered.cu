// The kernels of a decode of few tokens whose rows are gathered, and their exchange.
#include "../launch/launches.h"
#include "decode_few.h"
#include "decode_few_kernel.cuh"

namespace moeq::sm90::few {
namespace {

// Of launches that take the whole device.
__device__ uint4 whole_device_exchange[2 * kGatheredPairs];
__device__ uint32_t whole_device_epochs[kMaxBlocks];

}  // namespace

cudaError_t find_gathered_exchange(Args& args) {
  static KnownExchange known;
  return find_exchange(whole_device_exchange, whole_device_epochs, known, args);
}

cudaError_t run_gathered(Plan& plan) {
  static KnownDevices known[kFormats];
  const Format format = plan.args.p.format;
  const void* of_format = format == Format::kNvfp4   ? kernel<Nvfp4Format, Kind::kGathered>()
                          : format == Format::kMxfp4 ? kernel<Mxfp4Format, Kind::kGathered>()
                                                     : int4_kernel_of(format, Kind::kGathered);
  return launch(plan, of_format, known[static_cast<int>(format)]);
}

}  // namespace moeq::sm90::few
