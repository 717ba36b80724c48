// A launch that may begin before the previous kernel of the stream has ended, be it anyone's. The kernel itself waits
// for it (wait_for_previous_kernel in gemm_async.cuh): every thread, before it touches global memory at all, weights
// included, and before it ends. docs/design.md, section 11, has the rule;
// tests/programs/sass_order.py holds machine code to it.
#pragma once
#include <cuda_runtime.h>

namespace moeq::sm90 {

template <class Args>
cudaError_t launch_after(void (*kernel)(Args), const Args& args, dim3 grid, int threads, int shared_bytes,
                         cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace moeq::sm90
