// The persistent kernel of both GEMMs for NVFP4 weights and silu and swigluoai.
#include "gemm_kernel.cuh"

namespace moeq::sm90 {
GemmKernel nvfp4_swiglu_kernel() { return gemm_kernel<Nvfp4Tile, Finish::kSwiglu>; }
}  // namespace moeq::sm90
