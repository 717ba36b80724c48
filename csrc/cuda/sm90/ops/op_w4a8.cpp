// moeq_C::experts_sm90_w4a8: one layer of NVFP4, MXFP4, INT4 or e4m3 weights on fp8 activations.
#include "op_layer.h"
#include "../layout/w4a8_layout.h"
#include "../problem/tiled_problem.h"
#include "op_tiled_weights.h"

namespace moeq::sm90 {
namespace {

constexpr const char* kOp = "experts_sm90_w4a8";

int64_t strip_bytes(int64_t k_tiles, int scale_bytes) { return k_tiles * scale_bytes + w4a8::kTileRows; }

// Of policy `packed`: the size of a row tile's scales tells the formats apart.
Format packed_format(const Tensor& scale, int64_t k_tiles) {
  const bool mx = scale.dim() == 3 && scale.size(2) == strip_bytes(k_tiles, w4a8::kMxScaleBytes);
  return mx ? Format::kMxfp4 : Format::kNvfp4;
}

const uint8_t* strip_of(const W4a8Problem& p, const char* name, const Tensor& tensor, int64_t row_tiles,
                        int64_t k_tiles, const Tensor& beside) {
  const int scale_bytes = has_mx_scales(p) ? w4a8::kMxScaleBytes : w4a8::kScaleBytes;
  return tiles_of(kOp, name, tensor, row_tiles * strip_bytes(k_tiles, scale_bytes), beside);
}

// INT4 scales come as [experts, row tiles, groups, tiles of K with the same ones, bytes of a tile].
bool are_int4(const Tensor& scale) { return scale.dim() == 5; }

// Sums are scaled every 128 values of K, so that pairs of tiles must have the same scales.
bool covers_pairs(const Tensor& scale) { return scale.size(2) == 1 || scale.size(3) % 2 == 0; }

void check_sizes(const Problem& p) {
  STD_TORCH_CHECK(p.experts <= kMaxExperts, "moeq_C::", kOp, ": at most ", kMaxExperts, " experts");
  STD_TORCH_CHECK(p.hidden <= w4a8::kMaxK && p.inter <= w4a8::kMaxK, "moeq_C::", kOp, ": sizes up to ", w4a8::kMaxK);
}

void bind_int4(W4a8Problem& p, const LayerCall& call) {
  bind_tiled_weights(kOp, p, call);
  STD_TORCH_CHECK(has_int4(p) && covers_pairs(*call.w13_scale) && covers_pairs(*call.w2_scale), "moeq_C::", kOp,
                  ": scales of int4 weights must be bfloat16 or float16 ones of 128 values of K or more");
  check_sizes(p);
}

// Weights and what follows from their shapes; see w4a8_layout.h.
void bind_weights(W4a8Problem& p, const LayerCall& call) {
  STD_TORCH_CHECK(call.w13.dim() == 4 && call.w2.dim() == 4, "moeq_C::", kOp, ": w13 and w2 must be tiled");
  STD_TORCH_CHECK(call.w13_scale.has_value() && call.w2_scale.has_value(), "moeq_C::", kOp,
                  ": w13_scale and w2_scale must be given");
  STD_TORCH_CHECK(p.hidden % 8 == 0, "moeq_C::", kOp, ": the hidden size must be a multiple of 8");
  if (p.weights == Weights::kPacked && are_int4(*call.w13_scale)) return bind_int4(p, call);
  p.experts = size_of(kOp, call.w13, 0);
  p.inter = size_of(kOp, call.w2, 2) * w4a8::kTileK;
  check_sizes(p);
  const bool packed = p.weights == Weights::kPacked;
  const int64_t tile = packed ? w4a8::kPackedBytes : w4a8::kFp8Bytes;
  const int64_t k13 = w4a8::tiles(p.hidden, w4a8::kTileK), k2 = w4a8::tiles(p.inter, w4a8::kTileK);
  const int halves = p.gated ? 2 : 1;
  const int64_t tiles13 = int64_t{p.experts} * w4a8::tiles(halves * p.inter, w4a8::kTileRows);
  const int64_t tiles2 = int64_t{p.experts} * w4a8::tiles(p.hidden, w4a8::kTileRows);
  p.w13 = tiles_of(kOp, "w13", call.w13, tiles13 * k13 * tile, call.out);
  p.w2 = tiles_of(kOp, "w2", call.w2, tiles2 * k2 * tile, call.out);
  if (packed) {
    p.format = packed_format(*call.w13_scale, k13);
    p.w13_scale = strip_of(p, "w13_scale", *call.w13_scale, tiles13, k13, call.out);
    p.w2_scale = strip_of(p, "w2_scale", *call.w2_scale, tiles2, k2, call.out);
    return;
  }
  const bool blocks = p.weights == Weights::kBlocks;
  p.scales13 = weight_scales_of(kOp, "w13_scale", *call.w13_scale, blocks, p.experts, int64_t{halves} * p.inter, halves,
                                p.hidden, call.out);
  p.scales2 = weight_scales_of(kOp, "w2_scale", *call.w2_scale, blocks, p.experts, p.hidden, 1, p.inter, call.out);
}

// Fills out [tokens, hidden]. With hidden_states_scale (float32 [tokens, 1], blocks: [tokens, hidden / 128]) the hidden
// states are e4m3 codes, else bfloat16. Up to decode_tokens tokens are for the decode kernel, where it takes the layer.
void experts_sm90_w4a8(const ExpertsSm90W4a8Call& call) {
  W4a8Problem p{};
  p.weights = named<Weights>(kOp, "weights", call.weights);
  p.decode_tokens = static_cast<int>(call.decode_tokens);
  Layer layer(kOp, call);
  layer.quantize_hidden = layer.quantize_intermediate = true;
  if (call.hidden_states_scale.has_value()) layer.hidden_type = ScalarType::Float8_e4m3fn;
  const auto bind = [&](W4a8Problem& problem) {
    bind_weights(problem, call);
    const int64_t columns = problem.weights == Weights::kBlocks ? w4a8::tiles(problem.hidden, w4a8::kTileK) : 1;
    problem.x_scale =
        floats_of(kOp, "hidden_states_scale", call.hidden_states_scale, problem.tokens * columns, call.out);
  };
  run_layer(p, layer, {"fp8", w4a8_workspace, w4a8_run}, bind);
}

}  // namespace
}  // namespace moeq::sm90

STABLE_TORCH_LIBRARY_IMPL(moeq_C, CUDA, m) {
  m.impl("experts_sm90_w4a8", MOEQ_BOX(moeq::ExpertsSm90W4a8Call, moeq::sm90::experts_sm90_w4a8));
}
