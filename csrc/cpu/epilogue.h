// What happens to an accumulator: scales, biases, the activation function, the weighted sum.
#pragma once

#include "activation.h"
#include "isa.h"
#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

// fl(acc * fl(alpha * row_scale)), plus the bias.
MOEQ_INLINE Vec scaled(Vec acc, float factor, const float* bias) {
  const Vec v = acc * splat(factor);
  return bias == nullptr ? v : v + load(bias);
}

inline void glu(const GluCall& call) {
  for (int i = 0; i < call.count; ++i) {
    const float row_scale = *call.row_scales[i];
    const Vec up = scaled(load(call.up + i * 16), call.up_alpha * row_scale, call.up_bias);
    Vec gate = up;
    if (call.gate != nullptr) {
      gate = scaled(load(call.gate + i * 16), call.gate_alpha * row_scale, call.gate_bias);
    }
    store(call.rows[i], activate(call.activation, gate, up, call.alpha, call.beta, call.limit));
  }
}

inline void scale(const ScaleCall& call) {
  for (int i = 0; i < call.count; ++i) {
    store(call.rows[i], scaled(load(call.acc + i * 16), call.alpha * *call.row_scales[i], call.bias));
  }
}

MOEQ_INLINE void store_rounded(void* out, int64_t i, int64_t count, Vec v, DType dtype) {
  v = round_to(v, dtype);
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<float*>(out) + i, &v, (size_t)count * sizeof(float));
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(out) + i;
  if (dtype == DType::kBFloat16) {
    const HVec bits = high_halves(v);
    std::memcpy(halves, &bits, (size_t)count * sizeof(uint16_t));
    return;
  }
  for (int64_t lane = 0; lane < count; ++lane) halves[lane] = float_to_half_bits(v[lane]);
}

inline void combine(const CombineCall& call) {
  for (int64_t i = 0; i < call.size; i += 16) {
    Vec sum{};
    for (int64_t j = 0; j < call.top_k; ++j) {
      if (call.positions[j] < 0) continue;
      const float weight = call.weights == nullptr ? 1.0f : call.weights[j];
      sum = sum + splat(weight) * load(call.y + call.positions[j] * call.y_stride + i);
    }
    const int64_t left = call.size - i;
    store_rounded(call.out, i, left < 16 ? left : 16, sum, call.dtype);
  }
}

}  // namespace moeq::cpu::MOEQ_ISA
