// A token's values, and where a prefill puts them: the rows of all its slots.
#pragma once
#include "prefill_kernels.cuh"
#include "prefill_quantize.cuh"

namespace moeq::sm90 {

// 16 values of K, weighted as asked for; zeros beyond the end.
__device__ __forceinline__ void load_token(const OperandArgs& args, int token, int column, float (&values)[16]) {
  const Problem& p = args.problem;
  if (column >= p.hidden) {
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = 0.0f;
    return;
  }
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.x) +
                                                     static_cast<int64_t>(token) * p.hidden + column);
  const uint4 raw[2] = {from[0], from[1]};
  const uint32_t* words = reinterpret_cast<const uint32_t*>(raw);
  const float weight = p.weight_on_input ? p.topk_weights[token] : 1.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
  if (p.weight_on_input) {
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = __bfloat162float(__float2bfloat16_rn(values[i] * weight));
  }
}

// Block `block` of 16 values of a token into the rows of its slots, by a quad; threads that are not `real` exchange
// values, no more. `before(slot, expert)` may change the pieces; expert -1: foreign.
template <class Before>
__device__ __forceinline__ void store_in_slots(const OperandArgs& args, int token, int block, bool real,
                                               const uint4 (&pieces)[2], Before before) {
  const int top_k = args.problem.top_k;
  __nv_bfloat16* k_tile = args.operand + int64_t{block / 4} * args.rows * 64;
#pragma unroll 4
  for (int j = 0; j < top_k; j++) {
    const int64_t slot = int64_t{token} * top_k + j;
    const auto [expert, rank] = args.schedule.rank[slot];
    const int row = expert >= 0 ? args.schedule.first_row[expert] + rank : -1;
    if (real && block == 0 && row >= 0) args.schedule.slot_of_row[row] = slot;
    before(slot, expert);
    if (real && row >= 0) store_pieces(k_tile, row, pieces);
  }
}

}  // namespace moeq::sm90
