// The persistent kernel of both GEMMs for bfloat16 weights: each end of GEMM1.
#include "bf16_gemm.cuh"

namespace moeq::sm90 {
template Bf16Kernel bf16_kernel_of<Finish::kSwiglu>();
template Bf16Kernel bf16_kernel_of<Finish::kGated>();
template Bf16Kernel bf16_kernel_of<Finish::kPlain>();
}  // namespace moeq::sm90
