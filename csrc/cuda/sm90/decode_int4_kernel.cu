// The decode kernel for INT4 weights.
#include "decode_kernel.cuh"

namespace moeq::sm90::decode {
const void* int4_per_32_kernel(int groups) { return kernel_for<Int4Format<32>>(groups); }
const void* int4_per_64_kernel(int groups) { return kernel_for<Int4Format<64>>(groups); }
const void* int4_zero_kernel(int groups) { return kernel_for<Int4ZeroFormat>(groups); }
}  // namespace moeq::sm90::decode
