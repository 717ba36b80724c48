// Encoding of e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives) with plain fp32 arithmetic, on any architecture.
#pragma once

#include "rounding.cuh"

namespace moeq {

constexpr float kE2m1Max = 6.0f;
constexpr float kE2m1SafeBelow = 7.0f;   // magnitudes below it need no saturation to come out as code 7 at most

constexpr float kUnitStep = 0x1p23f;     // from here on neighbouring floats are 1 apart

// Code of a magnitude as the number 2^23 + code, ties to the even code; magnitudes below 7, or any if kSaturate.
//
// Code against value is concave and piecewise linear: 2v up to 2, v + 2 up to 4, v / 2 + 4 beyond; so the code is the
// least of the three roundings. Fused, each is one rounding. Additions and minima spread over two pipes of a
// multiprocessor, where picking the step from the exponent would crowd the integer one.
template <bool kSaturate>
MOEQ_HOST_DEVICE float e2m1_code(float magnitude) {
  const float by_half = fused_multiply_add(magnitude, 2.0f, kUnitStep);
  const float by_one = magnitude + (kUnitStep + 2.0f);
  const float by_two = fused_multiply_add(magnitude, 0.5f, kUnitStep + 4.0f);
  const float code = fminf(fminf(by_half, by_one), by_two);
  return kSaturate ? fminf(code, kUnitStep + 7.0f) : code;
}

// The sign bits of eight numbers at the highest bit of each nibble, the first number in the lowest nibble. IEEE signs:
// a negative number that rounds to zero, and -0.0, give code 8.
MOEQ_HOST_DEVICE uint32_t sign_nibbles(const float* values) {
#if defined(__CUDA_ARCH__)
  // Bytes 3, which hold the signs, of the even and of the odd numbers: three permutations for four numbers.
  constexpr unsigned kTops = 0x0073, kJoin = 0x5410;
  const auto tops = [&](int first) {
    return __byte_perm(__byte_perm(bits_of(values[first]), bits_of(values[first + 2]), kTops),
                       __byte_perm(bits_of(values[first + 4]), bits_of(values[first + 6]), kTops), kJoin);
  };
  return ((tops(0) >> 4) & 0x08080808u) | (tops(1) & 0x80808080u);
#else
  uint32_t signs = 0;
  for (int i = 0; i < 8; ++i) {
    signs |= (bits_of(values[i]) >> 31) << (4 * i + 3);
  }
  return signs;
#endif
}

// Codes of eight magnitudes in a word, the first in the lowest nibble: byte[k / 2] = code[k] | code[k + 1] << 4.
template <bool kSaturate>
MOEQ_HOST_DEVICE uint32_t e2m1_pack8(const float* magnitudes) {
  constexpr uint32_t kUnitBits = 0x4b000000u;   // of 2^23
  uint32_t word = 0;
  uint32_t excess = 0;
  // The constant upper parts of the numbers add up to a constant, which is taken away once.
  MOEQ_UNROLL
  for (int i = 7; i >= 0; --i) {
    word = word * 16u + bits_of(e2m1_code<kSaturate>(magnitudes[i]));
    excess = excess * 16u + kUnitBits;
  }
  return word - excess;
}

}  // namespace moeq
