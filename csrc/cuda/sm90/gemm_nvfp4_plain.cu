// The persistent kernel of both GEMMs for NVFP4 weights and activations without a gate.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
GemmKernel nvfp4_plain_kernel() { return gemm_kernel<Nvfp4Tile, Finish::kPlain>; }
}  // namespace moeq::sm90
