// A token's values, and where a prefill puts them: the rows of all its slots.
#pragma once
#include "prefill_kernels.cuh"
#include "prefill_quantize.cuh"

namespace moeq::sm90 {

// Where a token's row is: in this GPU's memory, or in another one's.
__device__ __forceinline__ const __nv_bfloat16* row_of(const OperandArgs& args, int token) {
  const int64_t hidden = args.problem.hidden;
  if (args.remote.ranks == 0) return static_cast<const __nv_bfloat16*>(args.problem.x) + token * hidden;
  const RemoteRow at = remote_row(args.remote, token);
  return reinterpret_cast<const __nv_bfloat16*>(args.remote.x[at.rank]) + at.row * hidden;
}

// 16 values of a token's row, weighted as asked for.
__device__ __forceinline__ void widen_token(const OperandArgs& args, int token, const uint4 (&raw)[2],
                                            float (&values)[16]) {
  const Problem& p = args.problem;
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

// 16 values of K, weighted as asked for; zeros beyond the end.
__device__ __forceinline__ void load_token(const OperandArgs& args, int token, int column, float (&values)[16]) {
  if (column >= args.problem.hidden) {
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = 0.0f;
    return;
  }
  const uint4* from = reinterpret_cast<const uint4*>(row_of(args, token) + column);
  // Another GPU's past the L1, which does not see what is written there.
  const uint4 raw[2] = {args.remote.ranks == 0 ? from[0] : __ldcg(from),
                        args.remote.ranks == 0 ? from[1] : __ldcg(from + 1)};
  widen_token(args, token, raw, values);
}

// Whether someone wants the token's values: one that nobody does needs not cross a link.
__device__ __forceinline__ bool is_wanted(const OperandArgs& args, int token) {
  const int top_k = args.problem.top_k;
  const SlotRank* slots = args.schedule.rank + int64_t{token} * top_k;
  bool wanted = false;
#pragma unroll 8
  for (int j = 0; j < top_k; j++) wanted |= slots[j].expert >= 0;
  return wanted;
}

// Half of a unit, 16 bytes; a unit is 16 values of K of a token, `in_row` of them a row. Zeros where nobody wants it.
__device__ __forceinline__ uint4 load_half(const OperandArgs& args, int64_t unit, int half, int in_row) {
  const int64_t token = unit / in_row;
  const int column = static_cast<int>(unit - token * in_row) * 16 + half * 8;
  if (token >= args.problem.tokens || column >= args.problem.hidden || !is_wanted(args, static_cast<int>(token))) {
    return make_uint4(0, 0, 0, 0);
  }
  return __ldcg(reinterpret_cast<const uint4*>(row_of(args, static_cast<int>(token)) + column));
}

// load_token for the unit of each thread of a warp, of rows in other GPUs' memory. Neighbouring threads load
// neighbouring 16 bytes: a thread that loaded 32 would have them cross the link twice, as no cache keeps them.
__device__ __forceinline__ void load_remote_units(const OperandArgs& args, int64_t unit, int in_row, int token,
                                                  float (&values)[16]) {
  const int lane = threadIdx.x % 32;
  const uint4 loaded[2] = {load_half(args, unit - lane + lane / 2, lane % 2, in_row),
                           load_half(args, unit - lane + 16 + lane / 2, lane % 2, in_row)};
  uint4 raw[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int from = 2 * (lane % 16) + half;
    const uint32_t* words[2] = {reinterpret_cast<const uint32_t*>(&loaded[0]),
                                reinterpret_cast<const uint32_t*>(&loaded[1])};
    uint32_t* to = reinterpret_cast<uint32_t*>(&raw[half]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t low = __shfl_sync(0xffffffffu, words[0][i], from);
      const uint32_t high = __shfl_sync(0xffffffffu, words[1][i], from);
      to[i] = lane < 16 ? low : high;
    }
  }
  widen_token(args, token, raw, values);
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
