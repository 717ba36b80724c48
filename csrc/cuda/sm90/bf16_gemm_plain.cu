// The persistent kernel of both GEMMs for bfloat16 weights and activations without a gate.
#include "bf16_gemm.cuh"

namespace moeq::sm90 {
template Bf16Kernel bf16_kernel_of<Finish::kPlain>();
}  // namespace moeq::sm90
