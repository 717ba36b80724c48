// The ends of GEMM1 of activations without a gate and of GEMM2, which has one row of the result for each slot.
#pragma once
#include "gemm_staging.cuh"
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
      float amax = max_magnitude(acc[group * 4 + b], acc[group * 4 + 2 + b]);
      for (int step = 4; step < 32; step *= 2) amax = max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, step));
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

// What is activated, rounded in groups of 128.
template <class C>
__device__ __forceinline__ void store_plain_groups(const GemmArgs& args, GemmShared<C>& shared, const Work& work,
                                                   Accumulators<C>& acc, const Staging& s) {
  round_groups<C, false>(args, shared.beside.rounding, work, acc, s);
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    s.synchronize();   // nobody reads the staging any more
    stage_tile<C, Factors::kFloat16>(work, acc[m], s);
    s.synchronize();
    store_intermediate<C, kTileK>(args, work, s, (first_tile<C>(work, s) + m) * kTileK);
  }
}

// GEMM1 where there is no gate. Where groups of 128 are rounded, both tiles have to be activated before.
template <class C>
__device__ __forceinline__ void finish_plain(const GemmArgs& args, GemmShared<C>& shared, const Work& work,
                                             Accumulators<C>& acc, const Staging& s) {
  const Problem& p = args.problem;
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    const int tile = first_tile<C>(work, s) + m;
    RowScales scales;
    bool real[2];
    for (int half = 0; half < 2; half++) {
      const int i = tile * kTileRows + row_in_tile<typename C::Format>(s, half);
      real[half] = i < p.inter;
      scales.alpha[half] = s.alpha[0];
      scales.bias[half] = p.w13_bias != nullptr && real[half] ? p.w13_bias[work.expert * int64_t{p.inter} + i] : 0.0f;
    }
    s.synchronize();   // nobody reads the staging any more
    stage_operand_factors(args, work, s);
    if (kMaySplit<typename C::Format> && p.splits) add_parts<C>(work, acc[m]);
    activate_plain<C>(p, work, acc[m], s, scales, real);
    if (kMaySplit<typename C::Format> && p.splits) make_parts<C, false>(work, acc[m]);
    s.synchronize();
    if (kRounds<typename C::Format> && args.h_wide != nullptr) {
      store_wide<C>(acc[m], s, args.inter_padded - tile * kTileRows, [&](int token) {
        const int64_t row = work.first_row + token;
        return token < work.rows ? args.h_wide + row * args.inter_padded + tile * kTileRows : nullptr;
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
    if (args.h_wide == nullptr) store_plain_groups<C>(args, shared, work, acc, s);
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

// 32 float32 results of each token, which two of the warps have, into the staging: 128 bytes, swizzled like others.
template <class C>
__device__ __forceinline__ void stage_floats(const Work& work, const TileSums<C>& acc, const Staging& s) {
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = row_in_tile<typename C::Format>(s, i / 2) % 32, token = s.lane % 4 * 2 + i % 2;
      const uint32_t to = s.address + (group * 8 + token) * 128 + (row / 4 ^ token) * 16 + row % 4 * 4;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(acc[group * 4 + i]) : "memory");
    }
  }
}

// 64 float32 results of each token, 32 at a time. Of two rows that are a slot's the first one is stored.
template <class C>
__device__ __forceinline__ void store_output_wide(const GemmArgs& args, const Work& work, const TileSums<C>& acc,
                                                  const Staging& s, int first_row, const int* slots) {
  const int hidden = args.problem.hidden, each = rows_of_slot(args.problem), piece = s.thread % 8;
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    if (half > 0) s.synchronize();  // nobody reads the staging any more
    if (s.warp / 2 == half) stage_floats<C>(work, acc, s);
    s.synchronize();
    const int at = first_row + half * 32 + piece * 4;
    float* y = static_cast<float*>(args.y) + at;
    for (int row = s.thread / 8 * each; row < work.rows && at < hidden; row += kRowsAPass * each) {
      const uint4 v = load_shared16(s.address + row * 128 + (piece ^ row % 8) * 16);
      *reinterpret_cast<uint4*>(y + static_cast<int64_t>(slots[row]) * hidden) = v;
    }
  }
}

template <class Format>
__device__ __forceinline__ RowScales scales_of_second(const GemmArgs& args, const Work& work, const Staging& s,
                                                      int first_row) {
  const Problem& p = args.problem;
  RowScales scales;
  for (int half = 0; half < 2; half++) {
    const int row = first_row + row_in_tile<Format>(s, half);
    scales.alpha[half] = s.alpha[0];
    scales.bias[half] = 0.0f;
    if (p.w2_bias != nullptr && row < p.hidden) scales.bias[half] = p.w2_bias[work.expert * int64_t{p.hidden} + row];
  }
  return scales;
}

// Begun before the multiplication, so that nobody waits for memory after it.
__device__ __forceinline__ void prefetch_slots(const GemmArgs& args, const Work& work, const Staging& s, int* slots) {
  for (int row = s.thread; row < work.rows; row += 128) {
    copy4(shared_address(slots + row), args.schedule.slot_of_row + work.first_row + row);
  }
}

template <class C>
__device__ __forceinline__ void finish_second(const GemmArgs& args, GemmShared<C>&, const Work& work,
                                              Accumulators<C>& acc, const Staging& s, const int* slots) {
  copy_wait();   // for prefetch_slots, which the first synchronization below makes known to all
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    s.synchronize();   // nobody reads the staging any more
    const int first = (first_tile<C>(work, s) + m) * kTileRows;
    const RowScales scales = scales_of_second<typename C::Format>(args, work, s, first);
    if (kMaySplit<typename C::Format> && args.problem.splits) add_parts<C>(work, acc[m]);
    if (args.h_factor == nullptr) {
      transform<C>(work, acc[m], s, [&](float sum, int half, int) { return scales.of(sum, half, 1.0f); });
    } else {
      stage_factors(work, s, [&](int row) { return args.h_factor[row]; });
      transform<C>(work, acc[m], s,
                   [&](float sum, int half, int token) { return scales.of(sum, half, factor_of<true>(s, token)); });
      s.synchronize();
    }
    if (args.y_wide) {
      store_output_wide<C>(args, work, acc[m], s, first, slots);
      continue;
    }
    stage_tile<C>(work, acc[m], s);
    s.synchronize();
    store_output<C>(args, work, s, first, slots);
  }
}

}  // namespace moeq::sm90
