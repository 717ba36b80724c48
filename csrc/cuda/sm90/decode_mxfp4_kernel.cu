// The decode kernel for MXFP4 weights.
#include "decode_kernel.cuh"

namespace moeq::sm90::decode {
const void* mxfp4_kernel(int groups) { return kernel_for<Mxfp4Format>(groups); }
}  // namespace moeq::sm90::decode
