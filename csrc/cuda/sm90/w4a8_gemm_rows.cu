#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
GemmKernel rows_kernel(Finish finish) { return kernel_of<Rows>(finish); }
}  // namespace moeq::sm90::w4a8
