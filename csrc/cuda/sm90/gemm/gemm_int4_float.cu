// The persistent kernels of both GEMMs for INT4 (float32 scales) weights: each end of GEMM1.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4FloatFormat, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4FloatFormat, Finish::kGated>();
template GemmVariants gemm_variants<Int4FloatFormat, Finish::kPlain>();
}  // namespace moeq::sm90
