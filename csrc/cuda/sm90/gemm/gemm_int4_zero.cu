// The persistent kernels of both GEMMs for INT4 (zero points) weights: each end of GEMM1.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4ZeroFormat, Finish::kSwiglu>();
template GemmVariants gemm_variants<Int4ZeroFormat, Finish::kGated>();
template GemmVariants gemm_variants<Int4ZeroFormat, Finish::kPlain>();
}  // namespace moeq::sm90
