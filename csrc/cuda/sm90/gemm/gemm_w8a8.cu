// The persistent kernels of both GEMMs for e4m3 weights beside e4m3 activations, or float16 ones: each end of GEMM1.
#include "gemm_byte.cuh"

namespace moeq::sm90 {

template GemmVariants gemm_variants<W8a8Format, Finish::kSwiglu>();
template GemmVariants gemm_variants<W8a8Format, Finish::kGated>();
template GemmVariants gemm_variants<W8a8Format, Finish::kPlain>();

}  // namespace moeq::sm90
