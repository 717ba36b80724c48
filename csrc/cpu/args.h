// What one call of the experts computes, as plain pointers and sizes. Nothing here knows torch.
//
// Sizes: T tokens, k slots per token, H hidden size, I intermediate size of one expert, E local experts.
// Weights are in the "cpu_panels_v1" layout (see README.md in this folder).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../generated/activations.h"
#include "../generated/cpu.h"

namespace moeq::cpu {

enum class DType : int { kBFloat16, kFloat16, kFloat32 };

// One packed weight of all experts. `alphas` multiply an accumulator: [E, alpha_columns], may be null (1).
struct Weight {
  const uint8_t* codes = nullptr;
  const uint8_t* scale = nullptr;
  const uint8_t* zero_point = nullptr;
  const float* alphas = nullptr;
  const float* bias = nullptr;     // [E, halves * bias_rows], gate rows before up rows
  int64_t bias_rows = 0;           // of one half
  int64_t alpha_columns = 1;
  int64_t halves = 1;
  int64_t panels = 0;            // per expert; gate and up panels alternate in w13
  int64_t units = 0;             // ceil(K / 16)
  int64_t group_units = 0;       // units that share one block scale
  int64_t panel_bytes = 0;       // codes of one panel
  int64_t panel_scale_bytes = 0; // block scales of one panel, or of the panels that share them
  int64_t panel_zero_bytes = 0;
  int64_t expert_scale_bytes = 0;
  int64_t scale_panels = 1;      // panels of a half that share one row of block scales
  DType scale_dtype = DType::kFloat32;
};

// How a row becomes a GEMM operand. `gscale` multiplies a value before it is quantized.
struct ActQuant {
  ActFormat format = ActFormat::kNone;
  DType dtype = DType::kFloat32;  // kNone: the value is rounded to this
  int64_t group = 0;              // elements that share a scale apart from the operand, 0 for a whole row
  const float* gscale = nullptr;  // null: dynamic
  int64_t gscale_count = 0;       // 1, or E
};

struct ExpertsArgs {
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;
  const uint8_t* hidden = nullptr;
  const uint8_t* hidden_scale = nullptr;  // not null: hidden holds codes
  int64_t hidden_row_bytes = 0;
  int64_t hidden_scale_row_bytes = 0;
  DType hidden_dtype = DType::kFloat32;
  const int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  int64_t hidden_size = 0;
  int64_t num_experts = 0;
  int64_t expert_offset = 0;
  bool weight_on_input = false;
  Scheme scheme = Scheme::kNone;
  DType weight_dtype = DType::kFloat32;  // kNone scheme only
  Activation activation = Activation::kSilu;
  float alpha = 1.0f;
  float beta = 0.0f;
  float limit = 0.0f;
  ActQuant a1;
  ActQuant a2;
  Weight w13;
  Weight w2;
};

}  // namespace moeq::cpu
