// The end of GEMM1 of activations without a gate.
#pragma once
#include "../numerics/gemm_activation.cuh"
#include "gemm_staging.cuh"
#include "../prefill/prefill_quantize.cuh"

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

// GEMM1 where there is no gate.
template <class C>
__device__ __forceinline__ void finish_plain(const GemmArgs& args, const Work& work, Accumulators<C>& acc,
                                             const Staging& s) {
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
    activate_plain<C>(p, work, acc[m], s, scales, real);
    s.synchronize();
    if (kRounds<typename C::Format> && args.h_wide != nullptr) {
      store_wide<C>(acc[m], s, args.inter_padded - tile * kTileRows, [&](int token) {
        const int64_t row = work.first_row + token;
        return token < work.rows ? args.h_wide + row * args.inter_padded + tile * kTileRows : nullptr;
      });
      continue;
    }
    if (Sizes<C>::kQuantizes && p.a2 != ActScale::kNone) {
      quantize_plain<C>(work, acc[m], gscale_of_intermediate(p, work.expert));
    }
    stage_tile<C>(work, acc[m], s);
    s.synchronize();
    store_intermediate<C, kTileK>(args, work, s, tile * kTileK);
  }
}

}  // namespace moeq::sm90
