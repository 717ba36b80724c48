// The persistent kernels of both GEMMs for NVFP4 weights and activations without a gate.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Nvfp4Format, Finish::kPlain>();
}  // namespace moeq::sm90
