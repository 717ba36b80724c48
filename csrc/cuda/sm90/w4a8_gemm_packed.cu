#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
LayerKernels packed_kernels(Finish finish) { return kernels_of<Packed>(finish); }
}  // namespace moeq::sm90::w4a8
