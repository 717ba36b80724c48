#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
GemmKernel packed_kernel(Finish finish, bool wide) {
  return wide ? kernel_of<Packed<kMaxWidth>>(finish) : kernel_of<Packed<kMaxSingle>>(finish);
}
}  // namespace moeq::sm90::w4a8
