// The functions that every instruction set provides, and the table that holds them.
#pragma once

#include "args.h"

namespace moeq::cpu {

constexpr int kMaxTile = 8;  // rows that one dot call takes at most

// acc[row][0..15] = sum over K of weight(panel row, k) * operand(row, k), block scales applied.
struct DotCall {
  const uint8_t* codes;       // one panel
  const uint8_t* scale;       // block scales of the panel, as stored
  const uint8_t* zero_point;
  int64_t units;
  int64_t group_units;
  int count;                      // rows, 1..kMaxTile
  const void* rows[kMaxTile];     // operands, bf16 or f32 as the table entry says
  const float* row_scales[kMaxTile];  // one per block of K, where they are apart from the operand
  const int32_t* row_sums[kMaxTile];  // of the codes of each group of weights, int8 operands only
  float* out;                     // [count, 16]
};
using DotFn = void (*)(const DotCall&);

constexpr int kTileCallRows = 128;  // rows that one tile call takes at most
constexpr int kTileCallPanels = 16;  // panels of one with few rows

// The same by matrix tiles: some panels of an expert, decoded once for all of its rows.
struct TileCall {
  const DotCall* panels;  // of each: codes, scale, zero_point, units, group_units and out [count, 16]
  int num_panels;         // at most what the Dot wants, of gate and up each where both are there; kTileCallPanels
  const uint8_t* rows;    // bf16 or int8 operands, `row_bytes` apart, with zeros for at least 32 bytes behind K
  int64_t row_bytes;
  int count;                  // rows, 1..kTileCallRows
  const float* group_scales;  // [count, groups], fp8 blocks only
  int64_t groups;
  const int32_t* row_sums;  // [count, sum_groups], int8 operands only
  int64_t sum_groups;
  float* results;  // of the first row, `result_stride` apart: what the caller will write there when it has the sums
  int64_t result_stride;
  int result_panels;  // of 16 values
  // Where the weights lie that the thread reads behind these panels, for one row; null where nobody knows.
  const uint8_t* later_codes;
  const uint8_t* later_scale;
};
using TileFn = void (*)(const TileCall&);

struct RowCall;

// What the elements of an operand row are.
enum class OperandType : int { kFloat32, kBFloat16, kInt8 };
constexpr int64_t bytes_of(OperandType type) {
  return type == OperandType::kFloat32 ? 4 : type == OperandType::kBFloat16 ? 2 : 1;
}

// How one layer multiplies: rows by `fn`, and blocks of rows by `tile` where that is not null.
struct Dot {
  DotFn fn = nullptr;
  OperandType operand = OperandType::kFloat32;
  TileFn tile = nullptr;
  void (*finish)(const RowCall&) = nullptr;  // what each operand row goes through, where not null
  int64_t tile_rows = 1;                     // rows of an expert from which on `tile` serves them
  int rows = 0;                              // that suit a call of `fn`; 0: as many as the table says
  int few_rows = 0;                          // up to which a call of `tile` takes kTileCallPanels panels
  int (*panels)(int64_t rows) = nullptr;     // that suit a call of `tile` for an expert of more; null: 2
};

// What decides which dot product runs.
struct DotKey {
  Scheme scheme;
  DType weight_dtype;
  DType scale_dtype;
  bool has_scale;
  bool zero_points;
  ActFormat act_format;
  DType act_dtype;
};

// A row becomes an operand. `row_scale` receives the factor that the accumulator is owed.
struct RowCall {
  const float* values;   // [size]
  int64_t size;
  int64_t padded_size;   // multiple of 16; the rest of the operand is zeroed
  const ActQuant* quant;
  float gscale;          // ignored where quant->gscale is null
  OperandType type;
  void* operand;
  float* group_scales;   // [ceil(size / quant->group)], where the format has groups
  int32_t* sums;         // [groups of `sum_units` units], int8 operands only
  int64_t sum_units;
  float* row_scale;
};

// Accumulators of one gate panel and one up panel become 16 intermediate values a row.
struct GluCall {
  const float* gate;  // [count, 16]; the only input where the activation is not gated
  const float* up;
  int count;
  float gate_alpha;
  float up_alpha;
  const float* row_scales[kMaxTile];
  const float* gate_bias;     // [16], or null
  const float* up_bias;
  Activation activation;
  float alpha;
  float beta;
  float limit;
  float* rows[kMaxTile];      // outputs, 16 each
};

// y = alpha * row_scale * acc (+ bias), 16 values a row.
struct ScaleCall {
  const float* acc;
  int count;
  float alpha;
  const float* row_scales[kMaxTile];
  const float* bias;
  float* rows[kMaxTile];
};

// out[0..size) = sum over j < top_k, ascending, of weight j * row `positions[j]` of y; slots at a negative
// position are foreign and contribute nothing. One rounding to `dtype`.
struct CombineCall {
  const float* y;
  int64_t y_stride;
  const int32_t* positions;
  const float* weights;  // null: 1
  int64_t top_k;
  int64_t size;
  DType dtype;
  void* out;
};

struct IsaTable {
  const char* name;
  int tile;  // rows per dot call that suit the register file
  Dot (*find_dot)(const DotKey& key);
  // float(x) * weight rounded to dtype, or the plain values where weight is null
  void (*load_row)(const uint8_t* row, DType dtype, int64_t size, const float* weight, float* values);
  // `call.values` is not read: codes and scales are those of one row
  void (*load_packed_row)(const RowCall& call, const uint8_t* codes, const uint8_t* scales);
  void (*quantize_row)(const RowCall&);
  void (*glu)(const GluCall&);
  void (*scale)(const ScaleCall&);
  void (*combine)(const CombineCall&);
};

const IsaTable& portable_table();
const IsaTable& avx2_table();
const IsaTable& avx512_table();
const IsaTable& avx512bf16_table();
const IsaTable& amx_table();
const IsaTable& amx_emulated_table();

}  // namespace moeq::cpu
