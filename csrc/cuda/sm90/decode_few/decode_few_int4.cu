// The kernels of a decode of very few tokens for INT4 weights.
#include "decode_few.h"
#include "decode_few_kernel.cuh"

namespace moeq::sm90::few {

const void* int4_kernel_of(Format format, Kind kind) {
  switch (format) {
    case Format::kInt4Per32:
      return kernel_of<Int4Format<32>>(kind);
    case Format::kInt4Per64:
      return kernel_of<Int4Format<64>>(kind);
    case Format::kInt4ZeroPer32:
      return kernel_of<Int4ZeroFormat<true, 32>>(kind);
    case Format::kInt4Float:
      return kernel_of<Int4FloatSumsFormat>(kind);
    default:
      return kernel_of<Int4SumsFormat>(kind);
  }
}

const void* gathered_int4_kernel_of(Format format) {
  switch (format) {
    case Format::kInt4Per32:
      return kernel<Int4Format<32>, Kind::kGathered>();
    case Format::kInt4Per64:
      return kernel<Int4Format<64>, Kind::kGathered>();
    case Format::kInt4ZeroPer32:
      return kernel<Int4ZeroFormat<true, 32>, Kind::kGathered>();
    case Format::kInt4Float:
      return kernel<Int4FloatSumsFormat, Kind::kGathered>();
    default:
      return kernel<Int4SumsFormat, Kind::kGathered>();
  }
}

}  // namespace moeq::sm90::few
