#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
GemmKernel rows_kernel(Finish finish, bool wide) {
  return wide ? kernel_of<Rows<kMaxWidth>>(finish) : kernel_of<Rows<kMaxSingle>>(finish);
}
}  // namespace moeq::sm90::w4a8
