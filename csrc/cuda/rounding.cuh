// Arithmetic in which every operation is one IEEE-754 rounding to nearest even, on the device and on the host.
//
// The host versions exist so that a test can run the kernels' number code on a machine without a GPU;
// a host build must use -ffp-contract=off, or the compiler fuses a product into a sum and skips its rounding.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MOEQ_HOST_DEVICE __host__ __device__ __forceinline__
#define MOEQ_UNROLL _Pragma("unroll")
#else
#define MOEQ_HOST_DEVICE inline
#define MOEQ_UNROLL
#endif

namespace moeq {

MOEQ_HOST_DEVICE uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

MOEQ_HOST_DEVICE float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

// The intrinsics pin the rounding whatever flags the file is compiled with: nvcc never contracts them,
// and they keep subnormals unless -ftz=true is asked for.
MOEQ_HOST_DEVICE float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

MOEQ_HOST_DEVICE float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

MOEQ_HOST_DEVICE float reciprocal(float a) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

MOEQ_HOST_DEVICE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// The larger of two magnitudes; NaN wins, so that a NaN element is not lost in the maximum of its block.
// On magnitudes the order of floats is the order of their bits, with NaN above infinity.
MOEQ_HOST_DEVICE float max_magnitude(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
  return result;
#else
  const uint32_t a_bits = bits_of(a) & 0x7fffffffu;
  const uint32_t b_bits = bits_of(b) & 0x7fffffffu;
  return float_of(a_bits > b_bits ? a_bits : b_bits);
#endif
}

// The smaller of two numbers; NaN wins.
MOEQ_HOST_DEVICE float min_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || a != a ? a : b;
#endif
}

// x as it is, but NaN where `by` is NaN or infinite.
MOEQ_HOST_DEVICE float nan_unless_finite(float x, float by) { return fused_multiply_add(by, 0.0f, x); }

}  // namespace moeq
