// The kernels of a decode of very few tokens for INT4 weights, beside 16-bit activations and e4m3 ones.
#include "decode_few.h"
#include "decode_few_kernel.cuh"

namespace moeq::sm90::few {

template <class Format>
const void* gathered_or(Kind kind) {
  return kind == Kind::kGathered ? kernel<Format, Kind::kGathered>() : kernel_of<Format>(kind);
}

const void* int4_kernel_of(Format format, Kind kind) {
  switch (format) {
    case Format::kInt4Per32:
      return gathered_or<Int4Format<32>>(kind);
    case Format::kInt4Per64:
      return gathered_or<Int4Format<64>>(kind);
    case Format::kInt4ZeroPer32:
      return gathered_or<Int4ZeroFormat<true, 32>>(kind);
    case Format::kInt4Float:
      return gathered_or<Int4FloatSumsFormat>(kind);
    default:
      return gathered_or<Int4SumsFormat>(kind);
  }
}

const void* int4_e4m3_kernel_of(Format format, Kind kind) {
  switch (format) {
    case Format::kInt4Per32:
      return gathered_or<BesideE4m3<Int4Format<32>>>(kind);
    case Format::kInt4Per64:
      return gathered_or<BesideE4m3<Int4Format<64>>>(kind);
    case Format::kInt4ZeroPer32:
      return gathered_or<BesideE4m3<Int4ZeroFormat<true, 32>>>(kind);
    case Format::kInt4Float:
      return gathered_or<BesideE4m3<Int4FloatSumsFormat>>(kind);
    default:
      return gathered_or<BesideE4m3<Int4SumsFormat>>(kind);
  }
}

}  // namespace moeq::sm90::few
