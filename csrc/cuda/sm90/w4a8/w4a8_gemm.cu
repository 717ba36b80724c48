// The kernels of one GEMM on fp8 activations, for each kind of weights.
#include "w4a8_gemm.cuh"

namespace moeq::sm90::w4a8 {
namespace {

template <template <int> class Policy>
GemmKernel kernel_of(Finish finish, bool wide) {
  return wide ? kernel_of<Policy<kMaxWidth>>(finish) : kernel_of<Policy<kMaxSingle>>(finish);
}

}  // namespace

GemmKernel kernel_of(Weights weights, Finish finish, bool wide) {
  switch (weights) {
    case Weights::kPacked:
      return kernel_of<Packed>(finish, wide);
    case Weights::kRows:
      return kernel_of<Rows>(finish, wide);
    default:
      return kernel_of<Blocks>(finish, wide);
  }
}

}  // namespace moeq::sm90::w4a8
