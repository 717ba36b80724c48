// The launch of a kernel whose blocks wait for each other: one on each multiprocessor, all of them at once. It begins
// when all kernels in front are over, whatever they trigger (docs/design.md, section 11).
#pragma once
#include "known_devices.h"

namespace moeq::sm90 {

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
