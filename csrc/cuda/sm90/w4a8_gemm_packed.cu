#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
GemmKernel packed_kernel(Finish finish) { return kernel_of<Packed>(finish); }
}  // namespace moeq::sm90::w4a8
