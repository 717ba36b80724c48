// Packed weights -> e4m3 fragments. A block of 16 or 32 codes shares a table of the eight magnitudes that they can
// have.
#pragma once
#include <type_traits>

#include "../w4a8/w4a8_shared.cuh"

namespace moeq::sm90::w4a8 {

// e4m3 bytes of code magnitudes 0 to 3 and 4 to 7, times a block's scale.
struct Table {
  uint32_t low, high;
};

// The formats of policy `packed`: bytes of a tile's scales, and which ones one thread of a warpgroup has.
struct PackedNvfp4 {
  static constexpr bool kInt4 = false;
  static constexpr int kScaleBytes = w4a8::kScaleBytes;
  static __device__ __forceinline__ int scales_of(int thread) { return thread * 4; }
  static __device__ __forceinline__ float scale_value(uint32_t byte);
  static __device__ __forceinline__ float row_power(uint32_t byte);
};

// Two neighbouring threads share blocks of 32.
struct PackedMxfp4 {
  static constexpr bool kInt4 = false;
  static constexpr int kScaleBytes = kMxScaleBytes;
  static __device__ __forceinline__ int scales_of(int thread) { return thread / 2 * 4; }
  static __device__ __forceinline__ float scale_value(uint32_t byte);
  static __device__ __forceinline__ float row_power(uint32_t byte);
};

// The value of a scale byte (w4a8_layout.h); scales that meet no code but zero come out as something finite.
__device__ __forceinline__ float PackedNvfp4::scale_value(uint32_t byte) {
  if (byte >= kZeroScale) return 0.0f;
  const int exponent = byte < kSlowScale ? static_cast<int>(byte >> 3) - 5 : static_cast<int>(byte >> 3 & 15) - 12;
  return __uint_as_float(exponent + 127 << 23 | (byte & 7) << 20);
}

__device__ __forceinline__ float PackedMxfp4::scale_value(uint32_t byte) {
  if (byte < kSlowScale) return __uint_as_float((byte >> 3) + 122 << 23);
  return __uint_as_float(max(249 - static_cast<int>(byte), 0) << 23);
}

// 2^x of a row's exponent byte.
__device__ __forceinline__ float PackedNvfp4::row_power(uint32_t byte) {
  return __uint_as_float(byte - kExponentBias + 127 << 23);
}

// 2^-127 and less are subnormal.
__device__ __forceinline__ float PackedMxfp4::row_power(uint32_t byte) {
  constexpr uint32_t kSubnormal = kMxExponentBias - 127, kLowest = 149 - kMxExponentBias;
  return __uint_as_float(byte > kSubnormal ? byte - kSubnormal << 23 : 1u << (byte + kLowest));
}

// Any scale: round the eight products.
template <class Codes>
__device__ __forceinline__ Table rounded_table(uint32_t byte) {
  const float s = Codes::scale_value(byte);
  Table table;
  asm("{ .reg .b16 a, b;\n"
      "cvt.rn.satfinite.e4m3x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 b, %4, %3;\n"
      "mov.b32 %0, {a, b}; }"
      : "=r"(table.low)
      : "f"(0.0f), "f"(0.5f * s), "f"(s), "f"(1.5f * s));
  asm("{ .reg .b16 a, b;\n"
      "cvt.rn.satfinite.e4m3x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 b, %4, %3;\n"
      "mov.b32 %0, {a, b}; }"
      : "=r"(table.high)
      : "f"(2.0f * s), "f"(3.0f * s), "f"(4.0f * s), "f"(6.0f * s));
  return table;
}

// The tables of four scales none of which is slow. An e4m3 code is an exponent and a mantissa, so doubling adds 8, and
// 1.5 * (1 + m / 8), rounded, is m + 4 codes further, for m from 1 to 5 one more.
template <class Codes>
__device__ __forceinline__ void make_tables(uint32_t scales, Table (&tables)[4]) {
  constexpr bool powers = std::is_same_v<Codes, PackedMxfp4>;
  const uint32_t more = powers ? 0 : (((scales >> 2 ^ scales >> 1) | (scales & ~(scales >> 2)))) & 0x01010101u;
  const uint32_t one = scales + 0x10101010u;               // the code of 1 times the scale, byte by byte
  const uint32_t one_and_half = one + more + 0x04040404u;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t both = i | (4 + i) << 4;
    tables[i].high = __byte_perm(one, one_and_half, both | both << 8) + 0x10100808u;   // 2, 3, 4, 6
    tables[i].low = __byte_perm(tables[i].high, 0, 0x1004) - 0x08081000u;              // 0, 0.5, 1, 1.5
  }
}

// Bytes of a table, chosen by the low four digits of `which`, which are below 8: __byte_perm would mask them again.
__device__ __forceinline__ uint32_t look_up(const Table& table, uint32_t which) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(table.low), "r"(table.high), "r"(which));
  return bytes;
}

// Eight codes of a row -> its two registers of a fragment.
__device__ __forceinline__ void decode8(uint32_t word, const Table& table, uint32_t& first, uint32_t& second) {
  const uint32_t magnitudes = word & 0x77777777u;
  first = look_up(table, magnitudes) | (word & 0x80808080u);
  second = look_up(table, magnitudes >> 16) | (word << 4 & 0x80808080u);
}

// The fragments of a tile's four K-steps: register 2 * u + h of step s.
template <class Codes>
__device__ __forceinline__ void decode_tile(const uint8_t* codes, const uint8_t* scales, int thread,
                                            uint32_t (&a)[4][4]) {
  const uint32_t scale_word = *reinterpret_cast<const uint32_t*>(scales + Codes::scales_of(thread));
  uint4 words[2];
  words[0] = *reinterpret_cast<const uint4*>(codes + thread * 16);
  words[1] = *reinterpret_cast<const uint4*>(codes + kPackedBytes / 2 + thread * 16);
  Table tables[4];   // of half 0: rows g and g + 8, of half 1
  make_tables<Codes>(scale_word, tables);
  if (scale_word & 0x80808080u) {
#pragma unroll
    for (int i = 0; i < 4; i++) tables[i] = rounded_table<Codes>(scale_word >> 8 * i & 255);
  }
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    decode8(words[half].x, tables[2 * half], a[2 * half][0], a[2 * half][2]);
    decode8(words[half].y, tables[2 * half + 1], a[2 * half][1], a[2 * half][3]);
    decode8(words[half].z, tables[2 * half], a[2 * half + 1][0], a[2 * half + 1][2]);
    decode8(words[half].w, tables[2 * half + 1], a[2 * half + 1][1], a[2 * half + 1][3]);
  }
}

}  // namespace moeq::sm90::w4a8
