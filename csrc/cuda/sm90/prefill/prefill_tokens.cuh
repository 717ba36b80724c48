// Rows that a prefill makes: a token's values, rounding, and where they go: the rows of all its slots.
#pragma once
#include "prefill_plan.h"
#include "../device/scans.cuh"
#include "../numerics/act_rounding.cuh"

namespace moeq::sm90 {

constexpr int kRowThreads = 256;

// For a row of so many values: no thread without some, where it is short.
inline int threads_for(int columns) {
  const int threads = (columns / 16 + 31) / 32 * 32;
  return threads < kRowThreads ? threads : kRowThreads;
}

// A thread has 16 values of K (8 pairs), its quad 64. Pair 2 * j + u of the quad's four threads makes piece 2 * j + u
// of the row in the layout's order; of the eight pieces a thread gets the numbers threadIdx.x % 4 and that + 4.
// half_type: as float16, which holds values of e4m3 codes.
__device__ __forceinline__ void exchange(const float (&values)[16], uint4 (&pieces)[2], bool half_type = false) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t mine[4], out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float first = values[half * 8 + 2 * i], second = values[half * 8 + 2 * i + 1];
      const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
      const __half2 half_pair = __floats2half2_rn(first, second);
      mine[i] = half_type ? reinterpret_cast<const uint32_t&>(half_pair) : reinterpret_cast<const uint32_t&>(pair);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int other = c ^ r;
      const uint32_t word = other < 2 ? (other == 0 ? mine[0] : mine[1]) : (other == 2 ? mine[2] : mine[3]);
      const uint32_t got = __shfl_xor_sync(0xffffffffu, word, r);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i == other) out[i] = got;
      }
    }
    pieces[half] = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// Into a row of 64 values, its 16-byte pieces swizzled by the row as wgmma wants them.
__device__ __forceinline__ void store_pieces(__nv_bfloat16* k_tile, int64_t row, const uint4 (&pieces)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int piece = (half * 4 + threadIdx.x % 4) ^ (row % 8);
    *reinterpret_cast<uint4*>(k_tile + row * 64 + piece * 8) = pieces[half];
  }
}

__device__ __forceinline__ float amax_of(const float (&values)[16]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; i++) amax = max_magnitude(amax, values[i]);
  return amax;
}

// As bits. By the whole block, once.
__device__ __forceinline__ uint32_t amax_of_row(float amax) {
  __shared__ float of_warps[32];
  return bits_of(amax_of_threads(amax, of_warps));
}

// A row of blocks of 16 that a thread block rounds. Of each thread the first one stays in registers, which is all of a
// row of up to 16 * blockDim.x values.
struct RowBlocks {
  int count;
  float first[16];

  template <class Load>
  __device__ __forceinline__ RowBlocks(int blocks, Load load) : count(blocks), first{} {
    if (static_cast<int>(threadIdx.x) < blocks) load(static_cast<int>(threadIdx.x), first);
  }

  // The row's largest magnitude, as bits.
  template <class Load>
  __device__ __forceinline__ uint32_t amax(Load load) const {
    float amax = amax_of(first);
    for (int block = threadIdx.x + blockDim.x; block < count; block += blockDim.x) {
      float values[16];
      load(block, values);
      amax = max_magnitude(amax, amax_of(values));
    }
    return amax_of_row(amax);
  }

  // each(block, values), by whole warps: beyond the row's end values are zeros.
  template <class Load, class Each>
  __device__ __forceinline__ void for_each(Load load, Each each) {
    each(static_cast<int>(threadIdx.x), first);
    for (int start = blockDim.x; start < count; start += blockDim.x) {
      const int block = start + threadIdx.x;
      float values[16] = {};
      if (block < count) load(block, values);
      each(block, values);
    }
  }
};

// Whole warps come: two neighbouring threads have a block of mxfp8.
__device__ __forceinline__ void round_block(float (&values)[16], ActFormat format, const Rounding& of_row) {
  if (format == ActFormat::kMxfp8) {
    round_to_e4m3(values, mx_rounding(amax_of_lanes<1, 2>(amax_of(values))));
  } else {
    round_to_e4m3(values, of_row);
  }
}

// A group of 128, of eight neighbouring threads; returns what values of codes lack.
__device__ __forceinline__ float round_group(float (&values)[16]) {
  const Rounding rounding = dynamic_rounding(bits_of(amax_of_lanes<1, 8>(amax_of(values))));
  round_to_e4m3(values, rounding);
  return rounding.factor;
}

// Where a token's row is: in this GPU's memory, or in another one's.
__device__ __forceinline__ const __nv_bfloat16* row_of(const OperandArgs& args, int token) {
  const int64_t hidden = args.problem.hidden;
  if (args.remote.ranks == 0) return static_cast<const __nv_bfloat16*>(args.problem.x) + token * hidden;
  const RemoteRow at = remote_row(args.remote, token);
  return reinterpret_cast<const __nv_bfloat16*>(args.remote.x[at.rank]) + at.row * hidden;
}

// 16 values of a token's row, weighted as asked for, before the wait or behind it. half: they are float16.
template <bool half = false>
__device__ __forceinline__ void widen_token(const OperandArgs& args, int token, const uint4 (&raw)[2],
                                            float (&values)[16]) {
  const Problem& p = args.problem;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(raw);
  const float weight = p.weight_on_input ? load_settled(p.topk_weights + token) : 1.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 two = widen_two(words[i], half);
    values[2 * i] = two.x;
    values[2 * i + 1] = two.y;
  }
  if (p.weight_on_input) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float weighted = values[i] * weight;
      values[i] = half ? round_to_half(weighted) : __bfloat162float(__float2bfloat16_rn(weighted));
    }
  }
}

// 16 values of K, weighted as asked for; zeros beyond the end. Past the L1, which sees neither what another GPU writes
// nor, before the wait, what kernels in front have written.
template <bool half>
__device__ __forceinline__ void load_token(const OperandArgs& args, int token, int column, float (&values)[16]) {
  if (column >= args.problem.hidden) {
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = 0.0f;
    return;
  }
  const uint4* from = reinterpret_cast<const uint4*>(row_of(args, token) + column);
  const uint4 raw[2] = {load_settled(from), load_settled(from + 1)};
  widen_token<half>(args, token, raw, values);
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

// Where some of a token's slots, the first one and those behind it, have their rows: two ways to the L2 for all.
template <bool half>
struct SlotRows {
  static constexpr int kMany = 4;
  int expert[kMany], row[kMany];   // -1: foreign, or beyond the token's

  __device__ __forceinline__ SlotRows(const OperandArgs& args, int token, int first) {
    const int top_k = args.problem.top_k, each = half ? rows_of_slot(args.problem) : 1;
    const SlotRank* ranks = args.schedule.rank + int64_t{token} * top_k;
    int rank[kMany];
#pragma unroll
    for (int i = 0; i < kMany; i++) {
      const SlotRank at = first + i < top_k ? ranks[first + i] : SlotRank{-1, 0};
      expert[i] = at.expert;
      rank[i] = at.rank;
    }
#pragma unroll
    for (int i = 0; i < kMany; i++) {
      row[i] = expert[i] >= 0 ? args.schedule.first_row[expert[i]] + rank[i] * each : -1;
    }
  }
};

// Block `block` of 16 values of a token into the rows of its slots, by a quad; threads that are not `real` exchange
// values, no more. `rows`: of the first slots. `before(expert, row)` may change the pieces; both -1: foreign. `rest`:
// of the slots' second rows, where they have some: of float16 alone.
template <bool half, class Before>
__device__ __forceinline__ void store_in_slots(const OperandArgs& args, int token, int block, bool real,
                                               SlotRows<half> rows, const uint4 (&pieces)[2], const uint4 (&rest)[2],
                                               Before before) {
  constexpr int kMany = SlotRows<half>::kMany;
  const int top_k = args.problem.top_k, each = half ? rows_of_slot(args.problem) : 1;
  __nv_bfloat16* k_tile = args.operand + int64_t{block / 4} * args.rows * 64;
  for (int first = 0; first < top_k; first += kMany) {
    if (first > 0) rows = SlotRows<half>(args, token, first);
#pragma unroll
    for (int i = 0; i < kMany; i++) {
      if (first + i >= top_k) break;
      const int row = rows.row[i];
      if (real && block == 0 && row >= 0) {
        const int slot = token * top_k + first + i;
        args.schedule.slot_of_row[row] = slot;
        if (each == 2) args.schedule.slot_of_row[row + 1] = slot;
      }
      before(rows.expert[i], row);
      if (real && row >= 0) {
        store_pieces(k_tile, row, pieces);
        if (each == 2) store_pieces(k_tile, row + 1, rest);
      }
    }
  }
}

}  // namespace moeq::sm90
