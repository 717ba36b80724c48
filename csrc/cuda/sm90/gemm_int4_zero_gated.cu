// The persistent kernels of both GEMMs for INT4 (zero points) weights and the other gated activations.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4ZeroFormat, Finish::kGated>();
}  // namespace moeq::sm90
