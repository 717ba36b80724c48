// Decode of very few tokens with MXFP8 weights beside 16-bit activations (decode_few_kernel.cuh).
#pragma once
#include "decode_few.h"

namespace moeq::sm90::few {

cudaError_t run_mxfp8(Plan& plan);

}  // namespace moeq::sm90::few
