// The kernels of INT4 weights.
#include "w4a8_kernel.cuh"

namespace moeq::sm90::w4a8 {

Variant<GemmArgs> int4_variant(bool zeros, Finish finish, int widest) {
  switch (widest) {
    case kMaxNarrow:
      return zeros ? variant_of<Int4ZeroNarrow>(finish) : variant_of<Int4Narrow>(finish);
    case kMaxPaired:
      return zeros ? variant_of<Int4ZeroPaired>(finish) : variant_of<Int4Paired>(finish);
    default:
      return zeros ? variant_of<Int4Zero>(finish, widest == kMaxWidth) : variant_of<Int4>(finish, widest == kMaxWidth);
  }
}

}  // namespace moeq::sm90::w4a8
