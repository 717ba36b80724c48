// The persistent kernel of both GEMMs for bfloat16 weights and the other gated activations.
#include "bf16_gemm.cuh"

namespace moeq::sm90 {
template Bf16Kernel bf16_kernel_of<Finish::kGated>();
}  // namespace moeq::sm90
