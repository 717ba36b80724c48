#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
GemmKernel blocks_kernel(Finish finish, bool wide) {
  return wide ? kernel_of<Blocks<kMaxWidth>>(finish) : kernel_of<Blocks<kMaxSingle>>(finish);
}
}  // namespace moeq::sm90::w4a8
