// The persistent kernels of both GEMMs for INT4 (zero points) weights and activations without a gate.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4ZeroFormat, Finish::kPlain>();
}  // namespace moeq::sm90
