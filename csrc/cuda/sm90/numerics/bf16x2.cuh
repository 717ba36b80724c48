// Two bfloat16, or float16, in a register, each result rounded once to nearest even, subnormals kept; and the
// instructions that place bytes and bits for them. The host versions exist so that a test can run the decoders without
// a GPU.
#pragma once
#include <cmath>

#include "../../rounding.cuh"

namespace moeq::sm90 {

#if !defined(__CUDA_ARCH__)
namespace host {

inline double value_of(uint32_t bits) { return float_of(bits << 16); }

inline uint32_t bf16_of(double value) {
  if (value == 0.0) return std::signbit(value) ? 0x8000u : 0u;
  const int exponent = std::ilogb(value);
  const int last = (exponent < -126 ? -126 : exponent) - 7;   // exponent of the last bit
  return bits_of(static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(value, -last)), last))) >> 16;
}

inline double value_of_half(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31), fraction = static_cast<int>(bits & 1023);
  const double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000u ? -size : size;
}

// Of a value within the range of float16.
inline uint32_t half_of(double value) {
  const uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
  const double size = std::fabs(value);
  if (size == 0.0) return sign;
  const int exponent = std::ilogb(size) < -14 ? -14 : std::ilogb(size);
  // A carry into the next binade comes out right because patterns of neighbours are neighbours.
  const auto fraction = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return sign | (static_cast<uint32_t>(exponent + 14) * 1024u + fraction);
}

template <class Operation>
uint32_t for_halves(uint32_t a, uint32_t b, uint32_t c, Operation operation) {
  const uint32_t low = bf16_of(operation(value_of(a & 0xFFFF), value_of(b & 0xFFFF), value_of(c & 0xFFFF)));
  return bf16_of(operation(value_of(a >> 16), value_of(b >> 16), value_of(c >> 16))) << 16 | low;
}

}  // namespace host
#endif

MOEQ_HOST_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  return host::for_halves(a, b, 0, [](double x, double y, double) { return x * y; });
#endif
}

MOEQ_HOST_DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  const auto product = [=](int shift) {
    return host::half_of(host::value_of_half(a >> shift & 0xFFFF) * host::value_of_half(b >> shift & 0xFFFF));
  };
  return product(16) << 16 | product(0);
#endif
}

// The larger of each two halves, as unsigned integers.
MOEQ_HOST_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  const auto larger = [=](uint32_t mask) { return (a & mask) > (b & mask) ? a & mask : b & mask; };
  return larger(0xFFFF0000u) | larger(0xFFFFu);
#endif
}

MOEQ_HOST_DEVICE uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  return host::for_halves(a, b, 0, [](double x, double y, double) { return x - y; });
#endif
}

// a * b + c, rounded once.
MOEQ_HOST_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
#else
  return host::for_halves(a, b, c, [](double x, double y, double z) { return x * y + z; });
#endif
}

// The nearest bfloat16 of two floats.
MOEQ_HOST_DEVICE uint32_t pack_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return host::bf16_of(high) << 16 | host::bf16_of(low);
#endif
}

// Byte i of the result is byte (selector >> 4 * i & 7) of a (0 to 3) and b (4 to 7).
MOEQ_HOST_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t from = selector >> 4 * i & 7;
    r |= ((from < 4 ? a : b) >> from % 4 * 8 & 0xFF) << 8 * i;
  }
  return r;
#endif
}

// Of a word as two halves: one of them twice. Instructions for two bfloat16 read an operand so: as a move of halves,
// unlike one of bytes, it costs nothing.
MOEQ_HOST_DEVICE uint32_t low_half_twice(uint32_t word) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("{ .reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "mov.b32 %0, {low, low}; }"
      : "=r"(r)
      : "r"(word));
  return r;
#else
  return pick_bytes(word, 0, 0x1010);
#endif
}

MOEQ_HOST_DEVICE uint32_t high_half_twice(uint32_t word) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("{ .reg .b16 low, high;\n"
      "mov.b32 {low, high}, %1;\n"
      "mov.b32 %0, {high, high}; }"
      : "=r"(r)
      : "r"(word));
  return r;
#else
  return pick_bytes(word, 0, 0x3232);
#endif
}

// The low halves of two words, and the high ones.
MOEQ_HOST_DEVICE uint32_t low_halves(uint32_t a, uint32_t b) { return pick_bytes(a, b, 0x5410); }
MOEQ_HOST_DEVICE uint32_t high_halves(uint32_t a, uint32_t b) { return pick_bytes(a, b, 0x7632); }

MOEQ_HOST_DEVICE uint32_t rotate_right(uint32_t word, int bits) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(word, word, bits);
#else
  return word >> bits | word << (32 - bits);
#endif
}

}  // namespace moeq::sm90
