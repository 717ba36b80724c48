// The persistent kernels of both GEMMs for NVFP4 weights and the other gated activations.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Nvfp4Format, Finish::kGated>();
}  // namespace moeq::sm90
