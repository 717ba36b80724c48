// What becomes of the sums: scales, bias, activation, and rows of the result, in full sectors of 32 bytes.
#pragma once
#include <cuda_bf16.h>

#include "gemm_activation.cuh"
#include "w4a8_mainloop.cuh"

namespace moeq::sm90::w4a8 {

// GEMM1 with silu or swigluoai in place, GEMM1 as it is, GEMM2.
enum class Finish { kSwiglu, kLinear, kOutput };

// Where a thread's two rows of a tile are, and what their sums are multiplied by.
struct RowPair {
  int tile, warp, g;
  float alpha[2];      // of the expert
  float scale[2];      // of the row
  float bias[2];

  template <class Policy, Finish finish>
  static __device__ __forceinline__ RowPair of_work(const GemmArgs& args, const Work& work, int warpgroup) {
    RowPair pair;
    pair.find<Policy, finish>(args, work, warpgroup);
    return pair;
  }

  template <class Policy, Finish finish>
  __device__ __forceinline__ void find(const GemmArgs& args, const Work& work, int warpgroup) {
    constexpr bool second = finish == Finish::kOutput;
    const Problem& p = args.problem;
    tile = work.row_block * kBlockTiles + warpgroup;
    warp = threadIdx.x % 128 / 32;
    g = threadIdx.x % 32 / 4;
    const float* alphas = second ? p.g2_alphas : p.g1_alphas;
    const float* all = second ? p.w2_bias : p.w13_bias;
    const int halves = args.gated ? 2 : 1, rows = second ? p.hidden : p.inter, columns = second ? 1 : p.alphas13;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int half = args.gated ? h : 0, row = args.gated ? column_gated() : column() + h;
      alpha[h] = alphas == nullptr ? 1.0f : alphas[work.expert * columns + half * (columns - 1)];
      scale[h] = scale_of_row<Policy>(args, work.expert, half, h, row);
      bias[h] = all != nullptr && row < rows ? all[(int64_t{work.expert} * halves + half) * rows + row] : 0.0f;
    }
  }

  template <class Policy>
  __device__ __forceinline__ float scale_of_row(const GemmArgs& args, int expert, int half, int h, int row) const {
    if constexpr (Policy::kGroups) return 1.0f;
    if constexpr (Policy::kTileScales > 0) {
      const int64_t row_tile = int64_t{expert} * args.row_tiles + min(tile, args.row_tiles - 1);
      const int scales = args.k_tiles * Policy::kTileScales;
      const uint32_t exponent = args.scales[row_tile * (scales + kTileRows) + scales + 16 * warp + 8 * h + g];
      return __uint_as_float(exponent - kExponentBias + 127 << 23);
    }
    const WeightScales& s = args.weight_scales;
    return s.data[expert * s.expert + half * s.half + min(row, s.rows - 1) * s.row];
  }

  // The intermediate that a gate row and an up row make.
  __device__ __forceinline__ int column_gated() const { return tile * 32 + warp * 8 + g; }
  // The first of two neighbours elsewhere.
  __device__ __forceinline__ int column() const { return tile * 64 + warp * 16 + 2 * g; }

  __device__ __forceinline__ float of(float sum, int h, float factor) const {
    return __fmaf_rn(sum, __fmul_rn(alpha[h], factor) * scale[h], bias[h]);
  }
};

// GEMM1: a thread's sums of one token, those of its second row 2 further.
template <Finish finish>
__device__ __forceinline__ void store_intermediate(const GemmArgs& args, const RowPair& rows, const float* sums,
                                                   int64_t row, float factor) {
  const Problem& p = args.problem;
  const float low = rows.of(sums[0], 0, factor), high = rows.of(sums[2], 1, factor);
  if constexpr (finish == Finish::kSwiglu) {
    args.h[row * p.inter + rows.column_gated()] = swiglu(p, low, high);
  } else if (args.gated) {
    float* h = args.h + row * 2 * p.inter + rows.column_gated();
    h[0] = low;
    h[p.inter] = high;
  } else {
    *reinterpret_cast<float2*>(args.h + row * p.inter + rows.column()) = make_float2(low, high);
  }
}

__device__ __forceinline__ void store_output(const GemmArgs& args, const RowPair& rows, const float* sums, int slot,
                                             float factor) {
  const float low = rows.of(sums[0], 0, factor), high = rows.of(sums[2], 1, factor);
  const int64_t at = int64_t{slot} * args.problem.hidden + rows.column();
  if (args.y_wide) {
    *reinterpret_cast<float2*>(static_cast<float*>(args.y) + at) = make_float2(low, high);
  } else {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(args.y) + at) = __floats2bfloat162_rn(low, high);
  }
}

template <class Policy>
__device__ __forceinline__ float2 factors_of(const GemmShared<Policy>& shared, int slot, int token) {
  if constexpr (Policy::kGroups) return make_float2(1.0f, 1.0f);
  return *reinterpret_cast<const float2*>(&shared.factor[slot][token]);
}

template <class Policy, Finish finish, int parts>
__device__ __forceinline__ void store(const GemmArgs& args, const GemmShared<Policy>& shared, const Work& work,
                                      const Sums<parts>& sums, int span, int warpgroup, int slot) {
  const RowPair rows = RowPair::of_work<Policy, finish>(args, work, warpgroup);
  if (rows.tile >= args.row_tiles) return;
  if (finish == Finish::kOutput && rows.column() >= args.problem.hidden) return;
#pragma unroll
  for (int part = 0; part < parts; part++) {
#pragma unroll
    for (int j = 0; j < Sums<parts>::kRegisters / 4; j++) {
      if (8 * j >= span) break;
      const int token = part * span + 8 * j + threadIdx.x % 4 * 2;
      if (token >= work.rows) continue;
      const float2 factor = factors_of(shared, slot, token);
      const float* pair = &sums.v[part][4 * j];
      const bool both = token + 1 < work.rows;
      if constexpr (finish == Finish::kOutput) {
        const int2 slots = *reinterpret_cast<const int2*>(&shared.slots[slot][token]);
        store_output(args, rows, pair, slots.x, factor.x);
        if (both) store_output(args, rows, pair + 1, slots.y, factor.y);
      } else {
        const int64_t row = int64_t{work.first_row} + token;
        store_intermediate<finish>(args, rows, pair, row, factor.x);
        if (both) store_intermediate<finish>(args, rows, pair + 1, row + 1, factor.y);
      }
    }
  }
}

}  // namespace moeq::sm90::w4a8
