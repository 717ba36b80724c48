// The persistent kernels of both GEMMs for INT4 weights with zero points or float16 scales.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4ZeroFormat<true>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4ZeroFormat<true>, Finish::kGated>();
template GemmVariants gemm_variants<Int4ZeroFormat<true>, Finish::kPlain>();

template GemmVariants gemm_variants<Int4ZeroFormat<false>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4ZeroFormat<false>, Finish::kGated>();
template GemmVariants gemm_variants<Int4ZeroFormat<false>, Finish::kPlain>();

template GemmVariants gemm_variants<Int4ZeroFormat<true, 32>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4ZeroFormat<true, 32>, Finish::kGated>();
template GemmVariants gemm_variants<Int4ZeroFormat<true, 32>, Finish::kPlain>();
}  // namespace moeq::sm90
