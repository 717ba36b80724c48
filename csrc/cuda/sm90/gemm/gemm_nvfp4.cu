// The persistent kernels of both GEMMs for NVFP4 weights: each end of GEMM1.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Nvfp4Format, Finish::kSwiglu>();
template GemmVariants gemm_variants<Nvfp4Format, Finish::kGated>();
template GemmVariants gemm_variants<Nvfp4Format, Finish::kPlain>();
}  // namespace moeq::sm90
