#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
LayerKernels rows_kernels(Finish finish) { return kernels_of<Rows>(finish); }
}  // namespace moeq::sm90::w4a8
