// The persistent kernel of both GEMMs for bfloat16 weights and silu and swigluoai.
#include "bf16_gemm.cuh"

namespace moeq::sm90 {
template Bf16Kernel bf16_kernel_of<Finish::kSwiglu>();
}  // namespace moeq::sm90
