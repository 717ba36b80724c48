// The persistent kernels of both GEMMs for INT4 weights without zero points, and with float32 scales.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4Format<32>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4Format<32>, Finish::kGated>();
template GemmVariants gemm_variants<Int4Format<32>, Finish::kPlain>();

template GemmVariants gemm_variants<Int4Format<64>, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4Format<64>, Finish::kGated>();
template GemmVariants gemm_variants<Int4Format<64>, Finish::kPlain>();

template GemmVariants gemm_variants<Int4FloatFormat, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4FloatFormat, Finish::kGated>();
template GemmVariants gemm_variants<Int4FloatFormat, Finish::kPlain>();
}  // namespace moeq::sm90
