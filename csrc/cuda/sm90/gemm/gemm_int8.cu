// The persistent kernels of both GEMMs for int8 weights with scales of rows beside 16-bit activations: each end of
// GEMM1.
#include "gemm_byte.cuh"

namespace moeq::sm90 {

template GemmVariants gemm_variants<ByteInt8Format, Finish::kSwiglu>();
template GemmVariants gemm_variants<ByteInt8Format, Finish::kGated>();
template GemmVariants gemm_variants<ByteInt8Format, Finish::kPlain>();

}  // namespace moeq::sm90
