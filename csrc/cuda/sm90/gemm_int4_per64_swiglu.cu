// The persistent kernels of both GEMMs for INT4 (groups of 64 or more) weights and silu and swigluoai.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4Format<64>, Finish::kSwiglu>();
}  // namespace moeq::sm90
