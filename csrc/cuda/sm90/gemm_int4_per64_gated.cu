// The persistent kernels of both GEMMs for INT4 (groups of 64 or more) weights and the other gated activations.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4Format<64>, Finish::kGated>();
}  // namespace moeq::sm90
