// Decode of very few tokens with INT4 weights (decode_few_kernel.cuh).
#pragma once
#include "decode_few.h"

namespace moeq::sm90::few {

const void* int4_kernel_of(Format format, Kind kind);

}  // namespace moeq::sm90::few
