// The persistent kernels of both GEMMs for INT4 (zero points or float16 scales) weights: each end of GEMM1.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4ZeroFormat<true>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4ZeroFormat<true>, Finish::kGated>();
template GemmVariants gemm_variants<Int4ZeroFormat<true>, Finish::kPlain>();
}  // namespace moeq::sm90
