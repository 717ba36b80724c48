// int8 weights -> bfloat16, by placing bytes. Exact.
#pragma once
#include "weights_e4m3.cuh"

namespace moeq::sm90 {

// With its uppermost bit turned a byte is its code plus 128, and as a bfloat16's pattern that is worth as many 2^-133
// (formats.cuh). So 2^127 times it, less 2, is 2^-6 of the code.
constexpr float kInt8AccumulatorScale = 0x1p6f;

// As decode_e4m3_in_order.
MOEQ_HOST_DEVICE E4m3Halves decode_int8_in_order(uint32_t codes) {
  constexpr uint32_t kRaise = 0x7F007F00u, kMinusTwo = 0xC000C000u;
  const uint32_t turned = codes ^ 0x80808080u;
  return {fma_bf16x2(pick_bytes(turned, 0, 0x4140), kRaise, kMinusTwo),
          fma_bf16x2(pick_bytes(turned, 0, 0x4342), kRaise, kMinusTwo)};
}

}  // namespace moeq::sm90
