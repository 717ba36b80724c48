// What becomes of the sums: scales, bias, activation, and rows of the result, in full sectors of 32 bytes.
#pragma once
#include <cuda_bf16.h>

#include "../numerics/activations.cuh"
#include "w4a8_mainloop.cuh"

namespace moeq::sm90::w4a8 {

// GEMM1 with silu or swigluoai in place, GEMM1 as it is, GEMM2.
enum class Finish { kSwiglu, kLinear, kOutput };

// The scale of a row: row `in_tile` of a tile, row `row` of its half.
template <class Policy>
__device__ __forceinline__ float scale_of_row(const GemmArgs& args, int expert, int half, int tile, int in_tile,
                                              int row) {
  if constexpr (Policy::kGroups || Policy::kInt4) return 1.0f;
  if constexpr (Policy::kTileScales > 0 && !Policy::kInt4) {
    const int64_t row_tile = int64_t{expert} * args.row_tiles + min(tile, args.row_tiles - 1);
    const int scales = args.k_tiles * Policy::kTileScales;
    const uint32_t exponent = args.scales[row_tile * (scales + kTileRows) + scales + in_tile];
    return Policy::Codes::row_power(exponent);
  }
  const WeightScales& s = args.weight_scales;
  return s.data[expert * s.expert + half * s.half + min(row, s.rows - 1) * s.row];
}

// One warp: what the rows of each block are multiplied by, loaded while the block is multiplied.
template <class Policy, Finish finish>
__device__ __forceinline__ void load_rows(const GemmArgs& args, GemmShared<Policy>& shared) {
  constexpr bool second = finish == Finish::kOutput;
  const Problem& p = args.problem;
  const float* alphas = second ? p.g2_alphas : p.g1_alphas;
  const float* biases = second ? p.w2_bias : p.w13_bias;
  const int halves = args.gated ? 2 : 1, rows = second ? p.hidden : p.inter, columns = second ? 1 : p.alphas13;
  Ring<kWorkSlots> ring;
  while (true) {
    barrier_wait(shared_address(&shared.work_full[ring.slot]), ring.parity);
    const int expert = shared.work[ring.slot].expert, row_block = shared.work[ring.slot].row_block;
    if (expert < 0) break;
    WeightRows<Policy::kBlockTiles>& to = shared.rows[ring.slot];
#pragma unroll
    for (int at = threadIdx.x % 32; at < Policy::kBlockTiles * kTileRows; at += 32) {
      const int in_tile = at % kTileRows, tile = row_block * Policy::kBlockTiles + at / kTileRows;
      const int warp = in_tile / 16, h = in_tile / 8 % 2, g = in_tile % 8, half = args.gated ? h : 0;
      const int row =
          args.gated ? tile * 32 + warp * 8 + g : tile * 64 + warp * 16 + (Policy::kInt4 ? 8 * h + g : 2 * g + h);
      const float alpha = alphas == nullptr ? 1.0f : alphas[expert * columns + half * (columns - 1)];
      to.scale[at] = __fmul_rn(alpha, scale_of_row<Policy>(args, expert, half, tile, in_tile, row));
      to.bias[at] = biases != nullptr && row < rows ? biases[(int64_t{expert} * halves + half) * rows + row] : 0.0f;
    }
    barrier_arrive(shared_address(&shared.rows_full[ring.slot]));
    ring.advance();
  }
}

// Where a thread's two rows of a tile are, and what their sums are multiplied by.
struct RowPair {
  int tile, warp, g;
  float scale[2], bias[2];

  template <int tiles>
  __device__ __forceinline__ RowPair(const WeightRows<tiles>& rows, const Work& work, int warpgroup)
      : tile(work.row_block * tiles + warpgroup), warp(threadIdx.x % 128 / 32), g(threadIdx.x % 32 / 4) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int at = warpgroup * kTileRows + 16 * warp + 8 * h + g;
      scale[h] = rows.scale[at];
      bias[h] = rows.bias[at];
    }
  }

  // The intermediate that a gate row and an up row make.
  __device__ __forceinline__ int column_gated() const { return tile * 32 + warp * 8 + g; }
  // The first of two neighbours elsewhere. apart: after `exchange`.
  template <bool apart>
  __device__ __forceinline__ int column() const {
    return tile * 64 + warp * 16 + (apart ? g + g % 2 * 7 : 2 * g);
  }

  __device__ __forceinline__ float of(float sum, int h, float factor) const {
    return __fmaf_rn(sum, __fmul_rn(scale[h], factor), bias[h]);
  }
};

// silu(gate) * up, which is what swiglu makes of limit infinity, alpha 1 and beta 0.
__device__ __forceinline__ bool is_plain(const Problem& p) {
  return p.alpha == 1.0f && p.beta == 0.0f && p.limit == __int_as_float(0x7f800000);
}

// Stores under a condition, so that the compiler does not branch around each of them.
__device__ __forceinline__ void store_if(bool there, void* to, float value) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.f32 [%1], %2; }" ::"r"(int{there}), "l"(to),
               "f"(value)
               : "memory");
}
__device__ __forceinline__ void store_if(bool there, void* to, float first, float second) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3}; }" ::"r"(int{there}), "l"(to),
               "f"(first), "f"(second)
               : "memory");
}
__device__ __forceinline__ void store_if(bool there, void* to, __nv_bfloat162 both) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.b32 [%1], %2; }" ::"r"(int{there}), "l"(to),
               "r"(*reinterpret_cast<const uint32_t*>(&both))
               : "memory");
}

// Where a thread's two rows begin in the result, and how far apart the tokens' rows of it are, in bytes.
struct ResultRows {
  uint8_t* at;
  uint32_t stride;
  // Of one multiplication.
  __device__ __forceinline__ uint8_t* of(int row) const { return at + uint64_t{static_cast<uint32_t>(row)} * stride; }
};

// Of rows 8 apart (INT4): a thread's two rows become neighbours. Even g's are g and g + 1, odd ones' 8 further.
__device__ __forceinline__ void exchange(float& low, float& high) {
  const bool odd = threadIdx.x / 4 % 2;
  const float got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
  low = odd ? got : low;
  high = odd ? high : got;
}

template <Finish finish, bool apart>
__device__ __forceinline__ ResultRows result_rows(const GemmArgs& args, const RowPair& rows, const Work& work) {
  const Problem& p = args.problem;
  if constexpr (finish == Finish::kOutput) {
    const uint32_t bytes = args.y_wide ? 4 : 2;
    return {static_cast<uint8_t*>(args.y) + rows.column<apart>() * bytes, p.hidden * bytes};
  } else {
    const uint32_t stride = 4 * (finish == Finish::kLinear && args.gated ? 2 * p.inter : p.inter);
    const int column = finish == Finish::kSwiglu || args.gated ? rows.column_gated() : rows.column<apart>();
    return {reinterpret_cast<uint8_t*>(args.h) + int64_t{work.first_row} * stride + column * 4, stride};
  }
}

// A thread's sums of one token, those of its second row 2 further. fast: the activation is plain, or y in bfloat16.
template <Finish finish, bool fast, bool apart>
__device__ __forceinline__ void store_token(const GemmArgs& args, const RowPair& rows, const float* sums, uint8_t* to,
                                            float factor, bool there) {
  const Problem& p = args.problem;
  float low = rows.of(sums[0], 0, factor), high = rows.of(sums[2], 1, factor);
  if constexpr (apart && finish != Finish::kSwiglu) {
    if (finish == Finish::kOutput || !args.gated) exchange(low, high);
  }
  if constexpr (finish == Finish::kSwiglu) {
    store_if(there, to, fast ? __fmul_rn(silu(low), high) : swiglu(p, low, high));
  } else if constexpr (finish == Finish::kOutput && fast) {
    store_if(there, to, __floats2bfloat162_rn(low, high));
  } else if (finish == Finish::kLinear && args.gated) {
    store_if(there, to, low);
    store_if(there, to + int64_t{p.inter} * 4, high);
  } else {
    store_if(there, to, low, high);
  }
}

template <class Policy>
__device__ __forceinline__ float2 factors_of(const GemmShared<Policy>& shared, int slot, int token) {
  if constexpr (Policy::kGroups) return make_float2(1.0f, 1.0f);
  return *reinterpret_cast<const float2*>(&shared.factor[slot][token]);
}

// Sums of tokens that do not exist are worked on, and not stored.
template <class Policy, Finish finish, bool fast, class P>
__device__ __forceinline__ void store_tokens(const GemmArgs& args, const GemmShared<Policy>& shared, const Work& work,
                                             const RowPair& rows, const Sums<P>& sums, int span, int slot) {
  constexpr int kGroup = 4;   // of 8 tokens
  const ResultRows results = result_rows<finish, Policy::kInt4>(args, rows, work);
#pragma unroll
  for (int part = 0; part < P::kMany; part++) {
    const int first = part * span + threadIdx.x % 4 * 2, there = min(work.rows, (part + 1) * span) - first;
#pragma unroll
    for (int j = 0; j < Sums<P>::kRegisters / 4; j++) {
      if (j % kGroup == 0 && 8 * j >= span) break;
      const int token = first + 8 * j;
      const float2 factor = factors_of(shared, slot, token);
      const float* pair = &sums.v[part][4 * j];
      int2 row = make_int2(token, token + 1);
      if constexpr (finish == Finish::kOutput) row = *reinterpret_cast<const int2*>(&shared.slots[slot][token]);
      store_token<finish, fast, Policy::kInt4>(args, rows, pair, results.of(row.x), factor.x, there > 8 * j);
      store_token<finish, fast, Policy::kInt4>(args, rows, pair + 1, results.of(row.y), factor.y, there > 8 * j + 1);
    }
  }
}

// GEMM2 of INT4, whose rows of a thread are 8 apart: a warp turns 16 tokens by its 16 rows over in shared memory, and a
// token's rows leave in one sector.
template <class Policy, class P>
__device__ __forceinline__ void store_turned(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work,
                                             const RowPair& rows, const Sums<P>& sums, int span, int slot) {
  constexpr int kEights = Sums<P>::kRegisters / 4;
  const int lane = threadIdx.x % 32;
  uint4* const buffer = shared.results[threadIdx.x / 32];  // [16 tokens][2 rows' eights], no bank twice
  const int put = (lane % 8 + lane / 16 * 8) * 2 + (lane / 8 % 2 ^ lane % 8 / 4), get = lane ^ lane / 8 % 2;
  const uint32_t to = shared_address(buffer + put);
  const int column = rows.tile * kTileRows + rows.warp * 16 + lane % 2 * 8;
  const ResultRows results{static_cast<uint8_t*>(args.y) + column * 2, args.problem.hidden * 2u};
#pragma unroll
  for (int part = 0; part < P::kMany; part++) {
    const int first = part * span, there = min(work.rows, first + span);
#pragma unroll
    for (int j = 0; j < kEights; j += 2) {
      if (j % 4 == 0 && first + 8 * j >= there) break;
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int eight = j + i / 2, h = i % 2;
        if (eight >= kEights) continue;
        const float2 factor = factors_of(shared, slot, first + 8 * eight + lane % 4 * 2);
        const float* pair = &sums.v[part][4 * eight + 2 * h];
        const __nv_bfloat162 both = __floats2bfloat162_rn(rows.of(pair[0], h, factor.x), rows.of(pair[1], h, factor.y));
        words[i] = *reinterpret_cast<const uint32_t*>(&both);
      }
      store_transposed(to, words[0], words[1], words[2], words[3]);
      __syncwarp();
      const int token = first + 8 * j + lane / 2;
      const uint4 of_token = buffer[get];
      if (token < there) *reinterpret_cast<uint4*>(results.of(shared.slots[slot][token])) = of_token;
      __syncwarp();
    }
  }
}

template <class Policy, Finish finish, class P>
__device__ __forceinline__ void store(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work,
                                      const Sums<P>& sums, int span, int warpgroup, int slot, uint32_t parity) {
  barrier_wait(shared_address(&shared.rows_full[slot]), parity);
  const RowPair rows(shared.rows[slot], work, warpgroup);
  if (rows.tile >= args.row_tiles) return;
  if (finish == Finish::kOutput && rows.column<Policy::kInt4>() >= args.problem.hidden) return;
  const bool fast = finish == Finish::kOutput ? !args.y_wide : is_plain(args.problem);
  if constexpr (Policy::kInt4 && finish == Finish::kOutput) {
    if (fast) return store_turned(args, shared, work, rows, sums, span, slot);
  }
  if (finish != Finish::kLinear && fast) {
    store_tokens<Policy, finish, true>(args, shared, work, rows, sums, span, slot);
  } else {
    store_tokens<Policy, finish, false>(args, shared, work, rows, sums, span, slot);
  }
}

}  // namespace moeq::sm90::w4a8
