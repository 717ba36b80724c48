#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
GemmKernel blocks_kernel(Finish finish) { return kernel_of<Blocks>(finish); }
}  // namespace moeq::sm90::w4a8
