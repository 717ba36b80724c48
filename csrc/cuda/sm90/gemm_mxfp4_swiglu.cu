// The persistent kernels of both GEMMs for MXFP4 weights and silu and swigluoai.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Mxfp4Format, Finish::kSwiglu>();
}  // namespace moeq::sm90
