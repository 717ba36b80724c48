// The decode kernel for NVFP4 weights.
#include "decode_kernel.cuh"

namespace moeq::sm90::decode {
const void* nvfp4_kernel(int groups) { return kernel_for<Nvfp4Format>(groups); }
}  // namespace moeq::sm90::decode
