#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
GemmKernel folded_kernel(Finish finish) { return kernel_of<Folded>(finish); }
}  // namespace moeq::sm90::w4a8
