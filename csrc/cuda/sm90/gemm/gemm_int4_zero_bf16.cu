// The persistent kernels of both GEMMs for INT4 (zero points, bfloat16 scales) weights: each end of GEMM1.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4ZeroFormat<false>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4ZeroFormat<false>, Finish::kGated>();
template GemmVariants gemm_variants<Int4ZeroFormat<false>, Finish::kPlain>();
}  // namespace moeq::sm90
