// The persistent kernels of both GEMMs for INT4 (groups of 64) weights: each end of GEMM1.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4Format<64>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4Format<64>, Finish::kGated>();
template GemmVariants gemm_variants<Int4Format<64>, Finish::kPlain>();
}  // namespace moeq::sm90
