// The persistent kernels of both GEMMs for NVFP4 and MXFP4 weights.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Nvfp4Format, Finish::kSwiglu>();
template GemmVariants gemm_variants<Nvfp4Format, Finish::kGated>();
template GemmVariants gemm_variants<Nvfp4Format, Finish::kPlain>();

template GemmVariants gemm_variants<Nvfp4HalfFormat, Finish::kSwiglu>();
template GemmVariants gemm_variants<Nvfp4HalfFormat, Finish::kGated>();
template GemmVariants gemm_variants<Nvfp4HalfFormat, Finish::kPlain>();

template GemmVariants gemm_variants<Mxfp4Format, Finish::kSwiglu>();
template GemmVariants gemm_variants<Mxfp4Format, Finish::kGated>();
template GemmVariants gemm_variants<Mxfp4Format, Finish::kPlain>();
}  // namespace moeq::sm90
