// The decode kernels for weights of every format.
#include "decode_kernel.cuh"

namespace moeq::sm90::decode {

const void* kernel_of(Format format, int groups) {
  switch (format) {
    case Format::kMxfp4:
      return kernel_for<Mxfp4Format>(groups);
    case Format::kInt4Per32:
      return kernel_for<Int4Format<32>>(groups);
    case Format::kInt4Per64:
      return kernel_for<Int4Format<64>>(groups);
    case Format::kInt4Zero:
    case Format::kInt4ZeroBf16:
      return kernel_for<Int4SumsFormat>(groups);
    case Format::kInt4ZeroPer32:
      return kernel_for<Int4ZeroFormat<true, 32>>(groups);
    case Format::kInt4Float:
      return kernel_for<Int4FloatSumsFormat>(groups);
    default:
      return kernel_for<Nvfp4Format>(groups);
  }
}

}  // namespace moeq::sm90::decode
