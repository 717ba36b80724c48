// The kernels of a decode of very few tokens for MXFP8 weights.
#include "decode_few_kernel.cuh"
#include "decode_few_mxfp8.h"
#include "decode_few_mxfp8_gemm.cuh"

namespace moeq::sm90::few {

cudaError_t run_mxfp8(Plan& plan) {
  static KnownDevices known[kKinds];
  return launch(plan, kernel_of<Mxfp8Format>(plan.kind), known[static_cast<int>(plan.kind)]);
}

}  // namespace moeq::sm90::few
