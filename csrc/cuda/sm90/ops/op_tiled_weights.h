// Weights of ops in tiles, and scales of e4m3 and int8 weights, from tensors.
#pragma once
#include "op_layer.h"
#include "../layout/layout.h"
#include "../layout/w4a8_layout.h"
#include "../problem/tiled_problem.h"

namespace moeq::sm90 {

// Float32 scales of `rows` rows in `halves` halves: [experts, rows, 1, ...], [experts, halves] or [experts, 1]; blocks:
// [experts, tiles of rows, tiles of K], of 128 x 128.
inline WeightScales weight_scales_of(const char* op, const char* name, const Tensor& tensor, bool blocks, int experts,
                                     int64_t rows, int halves, int64_t k, const Tensor& beside) {
  const int64_t of_half = rows / halves;
  WeightScales scales{nullptr, 0, 0, 0, static_cast<int>(of_half), blocks};
  if (blocks) {
    const int64_t row_blocks = w4a8::tiles(static_cast<int>(of_half), 128);
    const int64_t columns = w4a8::tiles(static_cast<int>(k), 128);
    scales.expert = halves * row_blocks * columns;
    scales.half = static_cast<int>(row_blocks * columns);
    scales.row = static_cast<int>(columns);
  } else if (tensor.dim() >= 3) {
    scales.expert = rows;
    scales.half = static_cast<int>(of_half);
    scales.row = 1;
  } else {
    scales.expert = size_of(op, tensor, 1);
    scales.half = scales.expert == 2 ? 1 : 0;
  }
  scales.data = data_of<float>(op, name, tensor, ScalarType::Float, experts * scales.expert, beside);
  return scales;
}

// The dtype of codes, the size of a tile of them, that of a scale and that of a tile's scales tell the formats apart.
inline Format format_of(const char* op, const Tensor& codes, const Tensor& scale) {
  if (codes.scalar_type() == ScalarType::Char) return Format::kInt8;
  if (codes.size(3) == w4a8::kFp8Bytes) {
    return scale.scalar_type() == ScalarType::Float ? Format::kFp8 : Format::kMxfp8;
  }
  const int64_t each = scale.element_size(), all = each * scale.size(scale.dim() - 1);
  for (int format = 0; format < kFormats; ++format) {
    if (each == kEachScaleBytes[format] && all == kTileScaleBytes[format]) return static_cast<Format>(format);
  }
  STD_TORCH_CHECK(false, "moeq_C::", op, ": scales must be those of a known format, got ", all, " bytes a tile");
  return Format::kNvfp4;  // not reached
}

inline const uint8_t* tile_scales_of(const char* op, const char* name, const Tensor& scale, int64_t bytes,
                                     const Tensor& beside) {
  return aligned_data_of<uint8_t>(op, name, scale, scale.scalar_type(), bytes / scale.element_size(), beside);
}

// Codes in tiles of so many bytes, rows and K; tiles of w13 and w2.
struct Tiled {
  int64_t bytes, tiles13, tiles2;
};

inline Tiled bind_codes(const char* op, Problem& p, const LayerCall& call, int64_t bytes, int k_of_tile) {
  p.experts = size_of(op, call.w13, 0);
  p.inter = size_of(op, call.w2, 2) * k_of_tile;
  const int64_t row_tiles2 = ceil_div(p.hidden, kTileRows);
  const Tiled tiled = {bytes, int64_t{p.experts} * row_tiles13(p.inter, p.gated) * ceil_div(p.hidden, k_of_tile),
                       p.experts * row_tiles2 * ceil_div(p.inter, k_of_tile)};
  const ScalarType dtype = p.format == Format::kInt8 ? ScalarType::Char : ScalarType::Byte;
  p.w13 = tiles_of(op, "w13", call.w13, tiled.tiles13 * bytes, call.out, dtype);
  p.w2 = tiles_of(op, "w2", call.w2, tiled.tiles2 * bytes, call.out, dtype);
  return tiled;
}

inline void bind_tiled_scales(const char* op, Problem& p, const LayerCall& call, const Tiled& tiled,
                              int64_t scale_bytes) {
  p.w13_scale = tile_scales_of(op, "w13_scale", *call.w13_scale, tiled.tiles13 * scale_bytes, call.out);
  p.w2_scale = tile_scales_of(op, "w2_scale", *call.w2_scale, tiled.tiles2 * scale_bytes, call.out);
}

// Float32 scales of e4m3 and int8 weights: blocks of 128 x 128 where both dimensions are theirs.
inline void bind_float_scales(const char* op, Problem& p, const LayerCall& call) {
  const Tensor &of13 = *call.w13_scale, &of2 = *call.w2_scale;
  const int halves = p.gated ? 2 : 1;
  const auto is_blocks = [](const Tensor& scale, int64_t rows) { return scale.dim() == 3 && scale.size(1) != rows; };
  const bool blocks13 = is_blocks(of13, int64_t{halves} * p.inter), blocks2 = is_blocks(of2, p.hidden);
  STD_TORCH_CHECK(blocks13 == blocks2, "moeq_C::", op, ": w13_scale and w2_scale must be of one kind");
  p.scales13 = weight_scales_of(op, "w13_scale", of13, blocks13, p.experts, int64_t{halves} * p.inter, halves, p.hidden,
                                call.out);
  p.scales2 = weight_scales_of(op, "w2_scale", of2, blocks2, p.experts, p.hidden, 1, p.inter, call.out);
}

inline void bind_bytes(const char* op, Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(p.hidden % kByteHiddenMultiple == 0, "moeq_C::", op, ": the hidden size must be a multiple of ",
                  kByteHiddenMultiple);
  const Tiled tiled = bind_codes(op, p, call, w4a8::kFp8Bytes, w4a8::kTileK);
  if (p.format == Format::kFp8 || p.format == Format::kInt8) {
    bind_float_scales(op, p, call);
  } else {
    bind_tiled_scales(op, p, call, tiled, 2 * tile_scale_bytes(p.format));
  }
}

inline void bind_tiled_weights(const char* op, Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(call.w13.dim() == 4 && call.w2.dim() == 4, "moeq_C::", op, ": w13 and w2 must be tiled");
  STD_TORCH_CHECK(call.w13_scale.has_value() && call.w2_scale.has_value(), "moeq_C::", op,
                  ": w13_scale and w2_scale must be given");
  p.format = format_of(op, call.w13, *call.w13_scale);
  STD_TORCH_CHECK(p.format == format_of(op, call.w2, *call.w2_scale), "moeq_C::", op,
                  ": w13 and w2 must have one format");
  STD_TORCH_CHECK((p.format == Format::kNvfp4) == (call.g1_alphas.has_value() && call.g2_alphas.has_value()),
                  "moeq_C::", op, ": alphas must come with nvfp4 weights alone");
  if (has_bytes(p.format)) return bind_bytes(op, p, call);
  STD_TORCH_CHECK(p.hidden % kHiddenMultiple == 0, "moeq_C::", op, ": the hidden size must be a multiple of ",
                  kHiddenMultiple);
  bind_tiled_scales(op, p, call, bind_codes(op, p, call, kTileCodeBytes, kTileK), tile_scale_bytes(p.format));
}

// Of the weights that are bound: what the kernels of their format round activations to. Others would leave it out.
inline void check_rounding(const RoundedProblem& p, const Layer& layer) {
  const LayerCall& call = layer.call;
  const bool given = call.hidden_states_scale.has_value();
  const bool rounds = layer.quantize_hidden || layer.quantize_intermediate || given;
  const bool known = p.format == Format::kNvfp4   ? p.act_format != ActFormat::kMxfp8
                     : p.format == Format::kMxfp4 ? p.act_format != ActFormat::kNvfp4
                     : p.format == Format::kMxfp8 ? p.act_format == ActFormat::kMxfp8
                     : p.format == Format::kInt8  ? false
                                                  : p.act_format == ActFormat::kFp8;
  STD_TORCH_CHECK(!rounds || known, "moeq_C::", layer.op,
                  ": quantize_hidden and quantize_intermediate must be False, and hidden_states_scale absent, unless "
                  "act_format is nvfp4 or fp8 beside nvfp4 weights, fp8 or mxfp8 beside mxfp4 weights, mxfp8 beside "
                  "mxfp8 ones, or fp8 beside int4 and fp8 ones");
  STD_TORCH_CHECK(!given || layer.quantize_intermediate, "moeq_C::", layer.op,
                  ": quantize_intermediate must be True where hidden_states_scale is given, got False");
  const bool has_scales = call.a1_gscale.has_value() || call.a2_gscale.has_value();
  STD_TORCH_CHECK(!rounds || p.act_format != ActFormat::kMxfp8 || !has_scales, "moeq_C::", layer.op,
                  ": a1_gscale and a2_gscale must be absent where act_format is mxfp8");
  if (p.format != Format::kFp8 || !rounds) return;
  STD_TORCH_CHECK(layer.quantize_intermediate && (layer.quantize_hidden || given), "moeq_C::", layer.op,
                  ": beside fp8 weights hidden states and intermediate must be quantized together, or not at all");
  STD_TORCH_CHECK(!p.scales13.blocks || !has_scales, "moeq_C::", layer.op,
                  ": a1_gscale and a2_gscale must be absent beside weights with scales of blocks");
}

// Of hidden states that are values of codes; see RoundedProblem.
inline const float* factors_of(const char* op, const RoundedProblem& p, const Layer& layer) {
  const bool groups = p.format == Format::kFp8 && p.scales13.blocks;
  const int64_t count = int64_t{p.tokens} * (groups ? ceil_div(p.hidden, 128) : 1);
  return floats_of(op, "hidden_states_scale", layer.call.hidden_states_scale, count, layer.call.out);
}

}  // namespace moeq::sm90
