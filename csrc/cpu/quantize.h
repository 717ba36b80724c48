// Activation rows become GEMM operands. A quantized element times its block scale is exact in bf16 for every format, so
// the operand holds that product; where it holds integers, the code (of e2m1, twice its value), and scales are apart.
#pragma once

#include "isa.h"
#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr float kLargestFloat = 0x1.fffffep127f;

// Stores sixteen operand elements; bf16 operands are exact, so their low halves are zero, and int8 ones integers.
MOEQ_INLINE void store_operand(const RowCall& call, int64_t k, Vec v) {
  if (call.type == OperandType::kBFloat16) {
    store_bf16_bits(static_cast<uint16_t*>(call.operand) + k, high_halves(v));
  } else if (call.type == OperandType::kInt8) {
    store_int8(static_cast<int8_t*>(call.operand) + k, v);
  } else {
    store(static_cast<float*>(call.operand) + k, v);
  }
}

MOEQ_INLINE Vec load_padded(const RowCall& call, int64_t k) {
  if (k + 16 <= call.size) return load(call.values + k);
  Vec v{};
  for (int64_t i = k; i < call.size; ++i) v[i - k] = call.values[i];
  return v;
}

// The largest magnitude of elements [begin, end); NaN where one of them is NaN or infinite.
MOEQ_INLINE float amax_of(const RowCall& call, int64_t begin, int64_t end) {
  Amax amax;
  for (int64_t k = begin; k < end; k += 16) amax.see(load_padded(call, k));
  return amax.value();
}

// sign(y) * round(min(|y|, max)) in the element format.
MOEQ_INLINE Vec round_element(Vec y, float max, int mantissa, int min_exponent) {
  return with_sign(round_small_float(at_most(abs(y), splat(max)), mantissa, min_exponent), y);
}

MOEQ_INLINE Vec round_e2m1(Vec y) { return round_element(y, 6.0f, 1, 0); }
MOEQ_INLINE Vec round_e4m3(Vec y) { return round_element(y, 448.0f, 3, -6); }

// Values of MX blocks below the smallest normal float count as zero, as matrix instructions may take them.
MOEQ_INLINE Vec without_subnormals(Vec v) { return abs(v) < splat(0x1p-126f) ? Vec{} : v; }

// Sixteen elements of a block and its scale.
MOEQ_INLINE void store_block(const RowCall& call, int64_t k, Vec elements, float scale) {
  const Vec values = without_subnormals(elements * splat(scale));
  if (call.type != OperandType::kInt8) return store_operand(call, k, values);
  store_operand(call, k, (values != values) | (values == Vec{}) ? Vec{} : elements + elements);
  Amax seen;  // no integer tells that a value is none, or too large
  seen.see(values);
  const float own = scale + seen.value() * 0.0f;
  float& known = call.group_scales[k / call.quant->group];
  known = k % call.quant->group == 0 ? own : known + (own - own);
}

// One block of NVFP4: `inverse` is fl(1 / gscale). The two products and the two reciprocals are
// each rounded, in this order; that is what makes the codes reproducible. A NaN passes through every step.
MOEQ_INLINE void store_nvfp4_block(const RowCall& call, int64_t k, Vec x, float gscale, float inverse) {
  constexpr float kSixth = 1.0f / 6.0f;  // 0x3E2AAAAB
  Amax amax;
  amax.see(x);
  float s = gscale * (amax.value() * kSixth);
  s = s > 448.0f ? 448.0f : s;
  const float scale = lane_round_small_float(s, 3, -6);
  float reciprocal = scale == 0.0f ? 0.0f : 1.0f / (scale * inverse);
  reciprocal = reciprocal > kLargestFloat ? kLargestFloat : reciprocal;
  store_block(call, k, round_e2m1(x * splat(reciprocal)), scale);
}

MOEQ_INLINE float dynamic_gscale(float amax) {
  if (amax == 0.0f) return 1.0f;
  const float gscale = 2688.0f / amax;
  return gscale > 0x1p118f ? 0x1p118f : gscale;
}

MOEQ_INLINE void quantize_nvfp4(const RowCall& call) {
  const bool dynamic = call.quant->gscale == nullptr;
  const float gscale = dynamic ? dynamic_gscale(amax_of(call, 0, call.padded_size)) : call.gscale;
  const float inverse = 1.0f / gscale;
  *call.row_scale = dynamic ? inverse : 1.0f;
  for (int64_t k = 0; k < call.padded_size; k += 16) {
    store_nvfp4_block(call, k, load_padded(call, k), gscale, inverse);
  }
}

// fp8 and int8: one scale for `count` elements, at most `max` units of it; elements past the row are zero.
struct Uniform {
  float max;
  bool integer;

  MOEQ_INLINE Vec round(Vec y) const {
    if (!integer) return round_e4m3(y);
    // Adding 1.5 * 2^23 rounds to an integer, ties to even.
    const Vec magic = splat(12582912.0f);
    const Vec bounded = at_least(at_most(y, splat(max)), splat(-max));
    return y != y ? Vec{} : (bounded + magic) - magic;  // there is no NaN among integers: the scale is
  }
};

MOEQ_INLINE float dynamic_scale(float amax, float max) {
  const float scale = amax / max;
  return scale == 0.0f ? 1.0f : scale;
}

MOEQ_INLINE void quantize_uniform(const RowCall& call, Uniform format) {
  *call.row_scale = 1.0f;
  const bool is_static = call.quant->gscale != nullptr;
  const int64_t step = call.quant->group > 0 ? call.quant->group : call.padded_size;
  for (int64_t begin = 0; begin < call.padded_size; begin += step) {
    const int64_t end = begin + step < call.padded_size ? begin + step : call.padded_size;
    const float amax = amax_of(call, begin, end);
    const float scale = is_static ? 1.0f + amax * 0.0f : dynamic_scale(amax, format.max);
    for (int64_t k = begin; k < end; k += 16) {
      const Vec x = load_padded(call, k);
      store_operand(call, k, format.round(is_static ? x * splat(call.gscale) : x / splat(scale)));
    }
    if (call.quant->group > 0) {
      call.group_scales[begin / step] = scale;
    } else {
      *call.row_scale = scale;
    }
  }
}

// An element of the OCP MX formats.
struct MxElement {
  float max;
  int mantissa;
  int min_exponent;
};

MOEQ_INLINE float power_of_two(int exponent) {  // -127..127
  const uint32_t bits = exponent < -126 ? 0x00400000u : (uint32_t)(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The smallest power of two that keeps amax inside of the format: ceil(log2(fl(amax / max))).
MOEQ_INLINE int mx_exponent(float amax, float max) {
  if (amax == 0.0f) return -127;
  const float ratio = amax / max;
  uint32_t bits;
  std::memcpy(&bits, &ratio, sizeof(bits));
  if (bits <= 0x00400000u) return -127;  // subnormals up to 2^-127
  const int exponent = (int)(bits >> 23 & 0xff) - 127 + ((bits & 0x7fffff) != 0 ? 1 : 0);
  return exponent > 127 ? 127 : exponent;
}

MOEQ_INLINE void quantize_mx(const RowCall& call, MxElement element) {
  *call.row_scale = 1.0f;
  for (int64_t k = 0; k < call.padded_size; k += 32) {
    const Vec x[2] = {load_padded(call, k), load_padded(call, k + 16)};
    Amax seen;
    seen.see(x[0]);
    seen.see(x[1]);
    const float amax = seen.value();
    const int exponent = mx_exponent(amax, element.max);
    const float scale = power_of_two(exponent) + amax * 0.0f;  // NaN where amax is
    for (int i = 0; i < 2; ++i) {
      const Vec y = x[i] * splat(power_of_two(-exponent));
      store_block(call, k + 16 * i, round_element(y, element.max, element.mantissa, element.min_exponent), scale);
    }
  }
}

// Only rounded, to the dtype of the activations.
MOEQ_INLINE void round_row(const RowCall& call) {
  *call.row_scale = 1.0f;
  for (int64_t k = 0; k < call.padded_size; k += 16) {
    store_operand(call, k, round_to(load_padded(call, k), call.quant->dtype));
  }
}

inline void quantize_row(const RowCall& call) {
  switch (call.quant->format) {
    case ActFormat::kNone:
      return round_row(call);
    case ActFormat::kNvfp4:
      return quantize_nvfp4(call);
    case ActFormat::kMxfp4:
      return quantize_mx(call, {6.0f, 1, 0});
    case ActFormat::kMxfp8:
      return quantize_mx(call, {448.0f, 3, -6});
    case ActFormat::kMxfp6E3m2:
      return quantize_mx(call, {28.0f, 2, -2});
    case ActFormat::kMxfp6E2m3:
      return quantize_mx(call, {7.5f, 3, 0});
    case ActFormat::kFp8:
      return quantize_uniform(call, {448.0f, false});
    case ActFormat::kInt8:
      return quantize_uniform(call, {127.0f, true});
  }
}

}  // namespace moeq::cpu::MOEQ_ISA
