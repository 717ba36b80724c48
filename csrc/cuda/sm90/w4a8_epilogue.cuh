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
  float exponent[2];   // of the row, a power of two
  float bias[2];

  template <class Policy, Finish finish>
  static __device__ __forceinline__ RowPair of_work(const GemmArgs& args, const Work& work, int warpgroup) {
    RowPair pair;
    pair.find<Policy, finish>(args, work, warpgroup);
    return pair;
  }

  template <class Policy, Finish finish>
  __device__ __forceinline__ void find(const GemmArgs& args, const Work& work, int warpgroup) {
    const Problem& p = args.problem;
    tile = work.row_block * kBlockTiles + warpgroup;
    warp = threadIdx.x % 128 / 32;
    g = threadIdx.x % 32 / 4;
    const bool gated = finish != Finish::kOutput && p.gated;
    const int64_t scales_stride = args.k_tiles * Policy::kTileScales + kTileRows;
    const uint8_t* exponents = args.scales + (int64_t{work.expert} * args.row_tiles + min(tile, args.row_tiles - 1)) *
                                                 scales_stride + args.k_tiles * Policy::kTileScales;
    const float* all = finish == Finish::kOutput ? p.w2_bias : p.w13_bias;
    const int halves = gated ? 2 : 1, rows = finish == Finish::kOutput ? p.hidden : p.inter;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      alpha[h] = finish == Finish::kOutput ? p.g2_alphas[work.expert]
                                           : p.g1_alphas[work.expert * p.alphas13 + (gated ? h * (p.alphas13 - 1) : 0)];
      exponent[h] = __uint_as_float(exponents[16 * warp + 8 * h + g] - kExponentBias + 127 << 23);
      const int row = gated ? column_gated() : column() + h;
      const int64_t of_half = int64_t{work.expert} * halves + (gated ? h : 0);
      bias[h] = all != nullptr && row < rows ? all[of_half * rows + row] : 0.0f;
    }
  }

  // The intermediate that a gate row and an up row make.
  __device__ __forceinline__ int column_gated() const { return tile * 32 + warp * 8 + g; }
  // The first of two neighbours elsewhere.
  __device__ __forceinline__ int column() const { return tile * 64 + warp * 16 + 2 * g; }

  __device__ __forceinline__ float of(float sum, int h, float factor) const {
    return __fmaf_rn(sum, __fmul_rn(alpha[h], factor) * exponent[h], bias[h]);
  }
};

// Two tokens of a thread: sums of row h and token b at 2 * h + b.
template <Finish finish>
__device__ __forceinline__ void store_pair(const GemmArgs& args, const RowPair& rows, const float* sums, int64_t row,
                                           float2 factor, bool second) {
  const Problem& p = args.problem;
#pragma unroll
  for (int b = 0; b < 2; b++) {
    if (b == 1 && !second) break;
    const float f = b ? factor.y : factor.x;
    const float low = rows.of(sums[b], 0, f), high = rows.of(sums[2 + b], 1, f);
    if constexpr (finish == Finish::kSwiglu) {
      args.h[(row + b) * p.inter + rows.column_gated()] = swiglu(p, low, high);
    } else if (p.gated) {
      float* h = args.h + (row + b) * 2 * p.inter + rows.column_gated();
      h[0] = low;
      h[p.inter] = high;
    } else {
      *reinterpret_cast<float2*>(args.h + (row + b) * p.inter + rows.column()) = make_float2(low, high);
    }
  }
}

__device__ __forceinline__ void store_output(const GemmArgs& args, const RowPair& rows, const float* sums, int2 slots,
                                             float2 factor, bool second) {
  const int64_t hidden = args.problem.hidden;
#pragma unroll
  for (int b = 0; b < 2; b++) {
    if (b == 1 && !second) break;
    const float f = b ? factor.y : factor.x;
    const float low = rows.of(sums[b], 0, f), high = rows.of(sums[2 + b], 1, f);
    const int64_t at = (b ? slots.y : slots.x) * hidden + rows.column();
    if (args.y_wide) {
      *reinterpret_cast<float2*>(static_cast<float*>(args.y) + at) = make_float2(low, high);
    } else {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(args.y) + at) = __floats2bfloat162_rn(low, high);
    }
  }
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
      const float2 factor = *reinterpret_cast<const float2*>(&shared.factor[slot][token]);
      const bool second = token + 1 < work.rows;
      if constexpr (finish == Finish::kOutput) {
        const int2 slots = *reinterpret_cast<const int2*>(&shared.slots[slot][token]);
        store_output(args, rows, &sums.v[part][4 * j], slots, factor, second);
      } else {
        store_pair<finish>(args, rows, &sums.v[part][4 * j], int64_t{work.first_row} + token, factor, second);
      }
    }
  }
}

}  // namespace moeq::sm90::w4a8
