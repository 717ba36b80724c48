// Division of many numbers by one divisor known at launch: a product and a shift in place of a division's 20 steps.
#pragma once

#include "rounding.cuh"

namespace moeq {

// Quotients are exact for dividends below 2^31. With 2^s the power of two not below d, the multiplier is
// floor(2^32 * (2^s - d) / d) + 1, a 33-bit reciprocal whose leading one is the addition of the dividend.
// Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994, section 4.
struct DivideBy {
  uint32_t multiplier;
  uint32_t shift;

  static DivideBy of(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < divisor) {
      ++shift;
    }
    const uint64_t excess = (uint64_t{1} << shift) - divisor;
    return {static_cast<uint32_t>((excess << 32) / divisor + 1), shift};
  }

  MOEQ_HOST_DEVICE uint32_t operator()(uint32_t dividend) const {
#if defined(__CUDA_ARCH__)
    const uint32_t high = __umulhi(dividend, multiplier);
#else
    const uint32_t high = static_cast<uint32_t>((uint64_t{dividend} * multiplier) >> 32);
#endif
    return (high + dividend) >> shift;
  }
};

}  // namespace moeq
