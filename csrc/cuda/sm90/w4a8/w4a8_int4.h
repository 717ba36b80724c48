// The kernels of INT4 weights, which are sources of their own.
#pragma once
#include "w4a8_epilogue.cuh"
#include "w4a8_shared.cuh"
#include "../gemm/gemm_args.cuh"

namespace moeq::sm90::w4a8 {

// zeros: weights have zero points, or float16 scales. widest: of widest_of_int4.
Variant<GemmArgs> int4_variant(bool zeros, Finish finish, int widest);

}  // namespace moeq::sm90::w4a8
