// The persistent kernels of both GEMMs for INT4 (zero points) weights and silu and swigluoai.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
template GemmVariants gemm_variants<Int4ZeroFormat, Finish::kSwiglu>();
}  // namespace moeq::sm90
