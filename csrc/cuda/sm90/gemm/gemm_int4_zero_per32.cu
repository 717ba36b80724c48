// The persistent kernels of both GEMMs for INT4 (zero points or float16 scales in groups of 32) weights: each end of
// GEMM1.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4ZeroFormat<true, 32>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4ZeroFormat<true, 32>, Finish::kGated>();
template GemmVariants gemm_variants<Int4ZeroFormat<true, 32>, Finish::kPlain>();
}  // namespace moeq::sm90
