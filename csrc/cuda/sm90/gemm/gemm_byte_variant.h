// The persistent kernels of both GEMMs for weights of 8 bits.
#pragma once
#include "gemm_variant.h"

namespace moeq::sm90 {

template <Finish finish>
GemmVariants byte_variants();

}  // namespace moeq::sm90
