// The end of GEMM1 of gated activations: both halves of a row are in one thread.
#pragma once
#include "gemm_activation.cuh"
#include "gemm_staging.cuh"
#include "prefill_quantize.cuh"

namespace moeq::sm90 {

enum class Finish { kSwiglu, kGated, kPlain };

// The intermediates of a warpgroup take the place of their gates in the accumulators.
template <bool scaled, class Function>
__device__ __forceinline__ void apply(const GemmArgs& args, const Work& work, Accumulators& acc, const Staging& s,
                                      Function function) {
  const Problem& p = args.problem;
#pragma unroll
  for (int m = 0; m < kWarpgroupTiles; m++) {
    const int i = ((work.row_block * kConsumers + s.warpgroup) * kWarpgroupTiles + m) * 32 + s.warp * 8 + s.lane / 4;
    RowScales scales;
    for (int half = 0; half < 2; half++) {
      scales.alpha[half] = i < p.inter ? s.alpha[half] : 0.0f;   // rows beyond the last one come out as zeros
      scales.bias[half] = 0.0f;
      if (p.w13_bias != nullptr && i < p.inter) {
        scales.bias[half] = p.w13_bias[(work.expert * int64_t{2} + half) * p.inter + i];
      }
    }
#pragma unroll
    for (int group = 0; group < kMaxWidth / 8; group++) {
      if (group % 2 == 0 && group * 8 >= work.width) break;
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const float factor = factor_of<scaled>(s, group * 8 + s.lane % 4 * 2 + b);
        const float gate = scales.of(acc[m][group * 4 + b], 0, factor);
        const float up = scales.of(acc[m][group * 4 + 2 + b], 1, factor);
        acc[m][group * 4 + b] = function(gate, up);
      }
    }
  }
}

template <class Function>
__device__ __forceinline__ void apply_scaled(const GemmArgs& args, const Work& work, Accumulators& acc,
                                             const Staging& s, Function function) {
  stage_operand_factors(args, work, s);
  apply<true>(args, work, acc, s, function);
  s.synchronize();
}

#define MOEQ_ACTIVATION(name)                                                                            \
  case Activation::name:                                                                                 \
    return apply_scaled(args, work, acc, s,                                                              \
                        [&](float gate, float up) { return activate(Activation::name, p, gate, up); });

// The switch is outside of the loops over the accumulators, which are unrolled.
template <Finish finish>
__device__ __forceinline__ void apply_activation(const GemmArgs& args, const Work& work, Accumulators& acc,
                                                 const Staging& s) {
  const Problem& p = args.problem;
  if constexpr (finish == Finish::kSwiglu) {
    const bool is_silu = p.alpha == 1.0f && p.beta == 0.0f && p.limit == INFINITY;
    if (is_silu && args.operand_factor == nullptr) {
      apply<false>(args, work, acc, s, [](float gate, float up) { return silu(gate) * up; });
    } else {
      apply_scaled(args, work, acc, s, [&](float gate, float up) { return swiglu(p, gate, up); });
    }
  } else {
    switch (p.activation) {
      MOEQ_ACTIVATION(kSwiglustep)
      MOEQ_ACTIVATION(kSitu)
      MOEQ_ACTIVATION(kGelu)
      MOEQ_ACTIVATION(kGeluTanh)
      MOEQ_ACTIVATION(kRelu2)
      default:
        return;   // the others have kernels of their own
    }
  }
}
#undef MOEQ_ACTIVATION

// Rounds the intermediates to NVFP4 values. A block of 16 of a token spans eight lanes of two neighbouring warps.
__device__ __forceinline__ void quantize_gated(const GemmArgs& args, GemmShared& shared, const Work& work,
                                               Accumulators& acc, const Staging& s) {
  auto& blocks = shared.blocks[s.warpgroup];
#pragma unroll
  for (int m = 0; m < kWarpgroupTiles; m++) {
#pragma unroll
    for (int group = 0; group < kMaxWidth / 8; group++) {
      if (group * 8 >= work.width) break;
#pragma unroll
      for (int b = 0; b < 2; b++) {
        float amax = fabsf(acc[m][group * 4 + b]);
        for (int step = 4; step < 32; step *= 2) {
          amax = max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, step));
        }
        float2& block = blocks[m][group * 8 + s.lane % 4 * 2 + b][s.warp / 2];
        if (s.lane < 4) (s.warp % 2 == 0 ? block.x : block.y) = amax;
      }
    }
  }
  s.synchronize();
  const float gscale = gscale_of_intermediate(args.problem, work.expert);
  for (int i = s.thread; i < work.width * 2 * kWarpgroupTiles; i += 128) {
    float2& block = blocks[i / 2 % kWarpgroupTiles][i / 2 / kWarpgroupTiles][i % 2];
    const BlockFactors factors = block_factors(max_magnitude(block.x, block.y), gscale);
    block = make_float2(factors.quantize_by, factors.step);
  }
  s.synchronize();
#pragma unroll
  for (int m = 0; m < kWarpgroupTiles; m++) {
#pragma unroll
    for (int group = 0; group < kMaxWidth / 8; group++) {
      if (group * 8 >= work.width) break;
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const float2 block = blocks[m][group * 8 + s.lane % 4 * 2 + b][s.warp / 2];
        float& h = acc[m][group * 4 + b];
        h = quantized_value(h, {block.x, block.y});
      }
    }
  }
}

// Straight to memory, for those whose quantization has to see whole rows.
__device__ __forceinline__ void store_wide_gated(const GemmArgs& args, const Work& work, const Accumulators& acc,
                                                 const Staging& s) {
#pragma unroll
  for (int m = 0; m < kWarpgroupTiles; m++) {
    const int i = ((work.row_block * kConsumers + s.warpgroup) * kWarpgroupTiles + m) * 32 + s.warp * 8 + s.lane / 4;
    if (i >= args.inter_padded) continue;
    float* to = args.h_wide + int64_t{work.first_row} * args.inter_padded + i;
#pragma unroll
    for (int group = 0; group < kMaxWidth / 8; group++) {
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const int token = group * 8 + s.lane % 4 * 2 + b;
        if (token < work.rows) to[int64_t{token} * args.inter_padded] = acc[m][group * 4 + b];
      }
    }
  }
}

// GEMM1 of gated activations: both of a row's halves are in a thread.
template <Finish finish>
__device__ __forceinline__ void finish_gated(const GemmArgs& args, GemmShared& shared, const Work& work,
                                             Accumulators& acc, const Staging& s) {
  const Problem& p = args.problem;
  apply_activation<finish>(args, work, acc, s);
  if (args.h_wide != nullptr) return store_wide_gated(args, work, acc, s);
  if (p.a2 != ActScale::kNone) quantize_gated(args, shared, work, acc, s);
  const uint32_t to = s.row(s.lane / 8 % 2, s.lane / 16 * 4 + s.warp);
#pragma unroll
  for (int pair = 0; pair < kPairs; pair++) {
    if (pair * 16 >= work.width) break;
    uint32_t packed[kWarpgroupTiles][2];
#pragma unroll
    for (int m = 0; m < kWarpgroupTiles; m++) {
#pragma unroll
      for (int group = 0; group < 2; group++) {
        packed[m][group] = pack_bf16(acc[m][pair * 8 + group * 4], acc[m][pair * 8 + group * 4 + 1]);
      }
    }
    store_transposed(to + pair * 2048, packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
  }
  s.synchronize();
  store_intermediate(args, work, s, work.row_block * kConsumers + s.warpgroup);
}

}  // namespace moeq::sm90
