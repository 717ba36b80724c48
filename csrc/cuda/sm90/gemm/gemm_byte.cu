// The persistent kernels of both GEMMs for e4m3 weights, MXFP8 among them, beside 16-bit activations and mxfp8: each
// end of GEMM1.
#include "gemm_byte.cuh"

namespace moeq::sm90 {

template GemmVariants gemm_variants<ByteFormat, Finish::kSwiglu>();
template GemmVariants gemm_variants<ByteFormat, Finish::kGated>();
template GemmVariants gemm_variants<ByteFormat, Finish::kPlain>();

template GemmVariants gemm_variants<ByteBlockFormat, Finish::kSwiglu>();
template GemmVariants gemm_variants<ByteBlockFormat, Finish::kGated>();
template GemmVariants gemm_variants<ByteBlockFormat, Finish::kPlain>();

}  // namespace moeq::sm90
