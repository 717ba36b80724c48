// The persistent kernel of both GEMMs for NVFP4 weights and the other gated activations.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
GemmKernel nvfp4_gated_kernel() { return gemm_kernel<Nvfp4Tile, Finish::kGated>; }
}  // namespace moeq::sm90
