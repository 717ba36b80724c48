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
  if constexpr (Policy::kGroups) return 1.0f;
  if constexpr (Policy::kTileScales > 0) {
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
    RowFactors<Policy::kBlockTiles>& to = shared.rows[ring.slot];
#pragma unroll
    for (int at = threadIdx.x % 32; at < Policy::kBlockTiles * kTileRows; at += 32) {
      const int in_tile = at % kTileRows, tile = row_block * Policy::kBlockTiles + at / kTileRows;
      const int warp = in_tile / 16, h = in_tile / 8 % 2, g = in_tile % 8, half = args.gated ? h : 0;
      const int row = args.gated ? tile * 32 + warp * 8 + g : tile * 64 + warp * 16 + 2 * g + h;
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
  __device__ __forceinline__ RowPair(const RowFactors<tiles>& rows, const Work& work, int warpgroup)
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
  // The first of two neighbours elsewhere.
  __device__ __forceinline__ int column() const { return tile * 64 + warp * 16 + 2 * g; }

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

template <Finish finish>
__device__ __forceinline__ ResultRows result_rows(const GemmArgs& args, const RowPair& rows, const Work& work) {
  const Problem& p = args.problem;
  if constexpr (finish == Finish::kOutput) {
    const uint32_t bytes = args.y_wide ? 4 : 2;
    return {static_cast<uint8_t*>(args.y) + rows.column() * bytes, p.hidden * bytes};
  } else {
    const uint32_t stride = 4 * (finish == Finish::kLinear && args.gated ? 2 * p.inter : p.inter);
    const int column = finish == Finish::kSwiglu || args.gated ? rows.column_gated() : rows.column();
    return {reinterpret_cast<uint8_t*>(args.h) + int64_t{work.first_row} * stride + column * 4, stride};
  }
}

// A thread's sums of one token, those of its second row 2 further. fast: the activation is plain, or y in bfloat16.
template <Finish finish, bool fast>
__device__ __forceinline__ void store_token(const GemmArgs& args, const RowPair& rows, const float* sums, uint8_t* to,
                                            float factor, bool there) {
  const Problem& p = args.problem;
  const float low = rows.of(sums[0], 0, factor), high = rows.of(sums[2], 1, factor);
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
  const ResultRows results = result_rows<finish>(args, rows, work);
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
      store_token<finish, fast>(args, rows, pair, results.of(row.x), factor.x, there > 8 * j);
      store_token<finish, fast>(args, rows, pair + 1, results.of(row.y), factor.y, there > 8 * j + 1);
    }
  }
}

template <class Policy, Finish finish, class P>
__device__ __forceinline__ void store(const GemmArgs& args, const GemmShared<Policy>& shared, const Work& work,
                                      const Sums<P>& sums, int span, int warpgroup, int slot, uint32_t parity) {
  barrier_wait(shared_address(&shared.rows_full[slot]), parity);
  const RowPair rows(shared.rows[slot], work, warpgroup);
  if (rows.tile >= args.row_tiles) return;
  if (finish == Finish::kOutput && rows.column() >= args.problem.hidden) return;
  const bool fast = finish == Finish::kOutput ? !args.y_wide : is_plain(args.problem);
  if (finish != Finish::kLinear && fast) {
    store_tokens<Policy, finish, true>(args, shared, work, rows, sums, span, slot);
  } else {
    store_tokens<Policy, finish, false>(args, shared, work, rows, sums, span, slot);
  }
}

}  // namespace moeq::sm90::w4a8
