// Rounding to e4m3fn (subnormal step 2^-9, maximum 448) with plain fp32 arithmetic, on any architecture.
#pragma once

#include "rounding.cuh"

namespace moeq {

constexpr float kE4m3Max = 448.0f;
constexpr uint32_t kE4m3Nan = 0x7fu;

struct E4m3 {
  uint32_t code;
  float value;
};

// Nearest e4m3fn number, ties to even, of a number in [0, 448], or NaN.
//
// Adding 2^(e + 20) to a number of binade 2^e leaves exactly three bits below the leading one: one hardware rounding
// to the format's own step, which the low bits of the sum then count. Numbers below 2^-6, the smallest normal one,
// share its step. A carry into the next binade comes out right because codes of neighbours are neighbours.
MOEQ_HOST_DEVICE E4m3 e4m3_round(float number) {
  constexpr float kMinNormal = 0x1p-6f;
  constexpr float kShift = 0x1p20f;
  const float binade = float_of(bits_of(fmaxf(number, kMinNormal)) & 0x7f800000u);
  const float sum = fused_multiply_add(binade, kShift, number);
  const uint32_t bits = bits_of(sum);
  // The sum's exponent field is e + 147; eight codes to a binade, the first of binade -6 being 8 (8 steps = code 8).
  const uint32_t code = (bits & 0xffu) + (bits >> 20) - ((147u - 6u) << 3);
  return {number == number ? code : kE4m3Nan, fused_multiply_add(binade, -kShift, sum)};
}

}  // namespace moeq
