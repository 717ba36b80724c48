// NVFP4 weights of the tiled layout -> fragments of bfloat16, by placing bits. Exact: e2m1 times e4m3 needs six bits.
#pragma once
#include <cstdint>

namespace moeq::sm90 {

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// The two scale bytes of a thread's tile (byte h: row g + 8 * h) -> {s, s} in bfloat16.
__device__ __forceinline__ uint32_t scale_pair(uint32_t bytes, int h) {
  return __byte_perm(bytes, 0, h ? 0x4141 : 0x4040) * 16u + 0x60006000u;
}

// The eight codes of one thread in one K-step, with the scales of its two rows -> the four registers of its fragment.
__device__ __forceinline__ void decode_step(uint32_t w, uint32_t scale_low_row, uint32_t scale_high_row,
                                            uint32_t (&a)[4]) {
  constexpr uint32_t kCode = 0x81C081C0u;
  a[0] = mul_bf16x2((w << 6) & kCode, scale_low_row);
  a[1] = mul_bf16x2((w << 2) & kCode, scale_high_row);
  a[2] = mul_bf16x2(__funnelshift_r(w, w, 4) & kCode, scale_low_row);
  a[3] = mul_bf16x2((w ^ (w >> 8)) & kCode, scale_high_row);
}

}  // namespace moeq::sm90
