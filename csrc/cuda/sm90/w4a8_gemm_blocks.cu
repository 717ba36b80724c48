#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
LayerKernels blocks_kernels(Finish finish) { return kernels_of<Blocks>(finish); }
}  // namespace moeq::sm90::w4a8
