// The ends of GEMM1 of activations without a gate and of GEMM2, which has one row of the result for each slot.
#pragma once
#include "gemm_staging.cuh"
#include "../device/scans.cuh"
#include "../numerics/act_rounding.cuh"
#include "../numerics/activations.cuh"

namespace moeq::sm90 {

// A block of 16 intermediates of a token lies in the eight lanes of a warp that share lane % 4.
template <class C>
__device__ __forceinline__ void quantize_plain(const Work& work, TileSums<C>& acc, float gscale) {
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const float amax = amax_of_lanes<4, 32>(max_magnitude(acc[group * 4 + b], acc[group * 4 + 2 + b]));
      const BlockFactors block = block_factors(amax, gscale);
      acc[group * 4 + b] = quantized_value(acc[group * 4 + b], block);
      acc[group * 4 + 2 + b] = quantized_value(acc[group * 4 + 2 + b], block);
    }
  }
}

template <class C, Activation activation>
__device__ __forceinline__ void activate_plain(const Problem& p, const Work& work, TileSums<C>& acc, const Staging& s,
                                               const RowScales& scales, const bool (&real)[2]) {
  transform<C>(work, acc, s, [&](float sum, int half, int token) {
    const float x = scales.of(sum, half, factor_of<true>(s, token));
    return real[half] ? activate(activation, p, 0.0f, x) : 0.0f;
  });
}

template <class C>
__device__ __forceinline__ void activate_plain(const Problem& p, const Work& work, TileSums<C>& acc, const Staging& s,
                                               const RowScales& scales, const bool (&real)[2]) {
  switch (p.activation) {
    case Activation::kSiluNoMul:
      return activate_plain<C, Activation::kSiluNoMul>(p, work, acc, s, scales, real);
    case Activation::kGeluNoMul:
      return activate_plain<C, Activation::kGeluNoMul>(p, work, acc, s, scales, real);
    case Activation::kRelu2NoMul:
      return activate_plain<C, Activation::kRelu2NoMul>(p, work, acc, s, scales, real);
    default:
      return activate_plain<C, Activation::kIdentityNoMul>(p, work, acc, s, scales, real);
  }
}

// What is activated as float16, rounded in groups of 128 where these have scales.
template <class C>
__device__ __forceinline__ void store_plain_halves(const GemmArgs& args, GemmShared<C>& shared, const Work& work,
                                                   Accumulators<C>& acc, const Staging& s) {
  if (args.h_scale != nullptr) round_groups<C, false>(args, shared.beside.rounding, work, acc, s);
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    s.synchronize();   // nobody reads the staging any more
    stage_tile<C, Factors::kFloat16>(work, acc[m], s);
    s.synchronize();
    store_intermediate<C, kTileK>(args, work, s, (first_tile<C>(work, s) + m) * kTileK);
  }
}

// GEMM1 where there is no gate. Where groups of 128 may be rounded, both tiles are activated before.
template <class C>
__device__ __forceinline__ void finish_plain(const GemmArgs& args, GemmShared<C>& shared, const Work& work,
                                             Accumulators<C>& acc, const Staging& s) {
  const Problem& p = args.problem;
  copy_wait();
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    s.synchronize();   // nobody reads the staging any more; what was asked for ahead is there
    const int tile = first_tile<C>(work, s) + m;
    RowScales scales;
    bool real[2];
    for (int half = 0; half < 2; half++) {
      const int i = tile * kTileRows + row_in_tile<typename C::Format>(s, half);
      real[half] = i < p.inter;
      scales.alpha[half] = s.alpha[0];
      scales.bias[half] = bias_of(p, work, s, m, half);
    }
    if (kMaySplit<typename C::Format> && p.splits) add_parts<C>(work, acc[m]);
    activate_plain<C>(p, work, acc[m], s, scales, real);
    if (kMaySplit<typename C::Format> && p.splits) make_parts<C, false>(work, acc[m]);
    if (kRounds<typename C::Format> && args.h_wide != nullptr) {
      store_wide<C>(work, acc[m], s, args.inter_padded - tile * kTileRows, 1, [&](int row) {
        return args.h_wide + int64_t{work.first_row + row} * args.inter_padded + tile * kTileRows;
      });
      continue;
    }
    if constexpr (!kIsW8a8<typename C::Format>) {
      if (Sizes<C>::kQuantizes && p.a2 != ActScale::kNone) {
        quantize_plain<C>(work, acc[m], gscale_of_intermediate(p, work.expert));
      }
      stage_tile<C, kFactorsOf<C>>(work, acc[m], s);
      s.synchronize();
      store_intermediate<C, kTileK>(args, work, s, tile * kTileK);
    }
  }
  if constexpr (kIsW8a8<typename C::Format>) {
    if (args.h_wide == nullptr) store_plain_halves<C>(args, shared, work, acc, s);
  }
}

// The end of GEMM2: one row of the result for each slot.

// A thread's 16 bytes of the staged 64 results of its rows.
template <class C>
__device__ __forceinline__ void store_output(const GemmArgs& args, const Work& work, const Staging& s, int first_row,
                                             const int* slots) {
  const int hidden = args.problem.hidden, at = first_row + s.thread % 8 * 8;
  if (at >= hidden) return;
  __nv_bfloat16* y = static_cast<__nv_bfloat16*>(args.y) + at;
#pragma unroll
  for (int i = 0; i < (C::kMaxWidth + kRowsAPass - 1) / kRowsAPass; i++) {
    const int row = s.thread / 8 + i * kRowsAPass;
    if (row >= work.rows) break;
    const uint4 v = load_shared16(s.address + row * 128 + (s.thread % 8 ^ row % 8) * 16);
    *reinterpret_cast<uint4*>(y + static_cast<int64_t>(slots[row]) * hidden) = v;
  }
}

// Of a thread's rows in its warpgroup's tile m.
__device__ __forceinline__ RowScales scales_of_second(const Problem& p, const Work& work, const Staging& s, int m) {
  RowScales scales;
  for (int half = 0; half < 2; half++) {
    scales.alpha[half] = s.alpha[0];
    scales.bias[half] = bias_of(p, work, s, m, half);
  }
  return scales;
}

template <class C>
__device__ __forceinline__ void finish_second(const GemmArgs& args, GemmShared<C>&, const Work& work,
                                              Accumulators<C>& acc, const Staging& s, const int* slots) {
  const Problem& p = args.problem;
  copy_wait();
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    s.synchronize();   // nobody reads the staging any more; what was asked for ahead is there
    const int first = (first_tile<C>(work, s) + m) * kTileRows;
    const RowScales scales = scales_of_second(p, work, s, m);
    if (kMaySplit<typename C::Format> && p.splits) add_parts<C>(work, acc[m]);
    if (args.h_factor == nullptr) {
      transform<C>(work, acc[m], s, [&](float sum, int half, int) { return scales.of(sum, half, 1.0f); });
    } else {
      transform<C>(work, acc[m], s,
                   [&](float sum, int half, int token) { return scales.of(sum, half, factor_of<true>(s, token)); });
    }
    if (args.y_wide) {
      store_wide<C>(work, acc[m], s, p.hidden - first, rows_of_slot(p), [&](int row) {
        return static_cast<float*>(args.y) + static_cast<int64_t>(slots[row]) * p.hidden + first;
      });
      continue;
    }
    stage_tile<C>(work, acc[m], s);
    s.synchronize();
    store_output<C>(args, work, s, first, slots);
  }
}

}  // namespace moeq::sm90
