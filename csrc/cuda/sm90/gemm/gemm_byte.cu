// The persistent kernels of both GEMMs for weights of 8 bits: each end of GEMM1. There is no narrow shape: it would
// have the accumulators of the wide one.
#include "gemm_byte_mainloop.cuh"
#include "gemm_byte_producer.cuh"
#include "gemm_byte_variant.h"

namespace moeq::sm90 {

template <Finish finish>
GemmVariants byte_variants() {
  const GemmVariant wide = variant_of<ByteConfig<kByteWide>, finish>();
  return {{variant_of<ByteConfig<kByteSlim>, finish>(), wide, wide}};
}

template GemmVariants byte_variants<Finish::kSwiglu>();
template GemmVariants byte_variants<Finish::kGated>();
template GemmVariants byte_variants<Finish::kPlain>();

}  // namespace moeq::sm90
