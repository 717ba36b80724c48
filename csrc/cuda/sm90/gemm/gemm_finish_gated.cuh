// The end of GEMM1 of gated activations: both halves of a row are in one thread.
#pragma once
#include "../numerics/act_rounding.cuh"
#include "../numerics/activations.cuh"
#include "gemm_staging.cuh"
#include "gemm_args.cuh"

namespace moeq::sm90 {

// Of a thread's gate and up row in its warpgroup's tile m; rows beyond the last one come out as zeros.
template <class C>
__device__ __forceinline__ RowScales scales_of_gated(const Problem& p, const Work& work, const Staging& s, int m) {
  const int i = (first_tile<C>(work, s) + m) * 32 + s.warp * 8 + s.lane / 4;
  RowScales scales;
  for (int half = 0; half < 2; half++) {
    scales.alpha[half] = i < p.inter ? s.alpha[half] : 0.0f;
    scales.bias[half] = bias_of(p, work, s, m, half);
  }
  return scales;
}

// The intermediates of a warpgroup take the place of their gates in the accumulators.
template <class C, bool scaled, class Function>
__device__ __forceinline__ void apply(const GemmArgs& args, const Work& work, Accumulators<C>& acc, const Staging& s,
                                      Function function) {
  const Problem& p = args.problem;
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    const RowScales scales = scales_of_gated<C>(p, work, s, m);
#pragma unroll
    for (int group = 0; group < C::kMaxWidth / 8; group++) {
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

template <class C, class Function>
__device__ __forceinline__ void apply_scaled(const GemmArgs& args, const Work& work, Accumulators<C>& acc,
                                             const Staging& s, Function function) {
  apply<C, kRounds<typename C::Format>>(args, work, acc, s, function);
  if (Sizes<C>::kHasBlocks) s.synchronize();  // scales of blocks take the factors' place
}

#define MOEQ_ACTIVATION(name)                  \
  case Activation::name:                       \
    return apply_scaled<C>(args, work, acc, s, \
                           [&](float gate, float up) { return activate(Activation::name, p, gate, up); });

// Whether GEMM1's end multiplies by its rows' factors, be they 1: not silu where there are none.
template <Finish finish>
__device__ __forceinline__ bool needs_factors(const GemmArgs& args) {
  const Problem& p = args.problem;
  const bool is_silu = finish == Finish::kSwiglu && p.alpha == 1.0f && p.beta == 0.0f && p.limit == INFINITY;
  return !is_silu || args.operand_factor != nullptr;
}

// The switch is outside of the loops over the accumulators, which are unrolled.
template <class C, Finish finish>
__device__ __forceinline__ void apply_activation(const GemmArgs& args, const Work& work, Accumulators<C>& acc,
                                                 const Staging& s) {
  const Problem& p = args.problem;
  if constexpr (finish == Finish::kSwiglu) {
    if (!needs_factors<finish>(args)) {
      apply<C, false>(args, work, acc, s, [](float gate, float up) { return silu(gate) * up; });
    } else {
      apply_scaled<C>(args, work, acc, s, [&](float gate, float up) { return swiglu(p, gate, up); });
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

// The maxima of each token's half blocks, which a warp has: a block of 16 spans two neighbouring warps.
template <class C>
__device__ __forceinline__ void stage_maxima(GemmShared<C>& shared, const Work& work, const Accumulators<C>& acc,
                                             const Staging& s) {
  constexpr int kGroups = C::kMaxWidth / 8, kAtOnce = 4;  // of 8 tokens
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
#pragma unroll
    for (int first = 0; first < kGroups; first += kAtOnce) {
      if (first * 8 >= work.width) break;
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = first + i / 2 < kGroups ? acc[m][(first + i / 2) * 4 + i % 2] : 0.0f;
      const int which = s.lane / 4, group = first + which / 2;
      const float largest = maximum_of_lanes(x, s.lane);
      if (first + kAtOnce <= kGroups || group < kGroups) {
        float2& block = shared.blocks[s.warpgroup][m][group * 8 + s.lane % 4 * 2 + which % 2][s.warp / 2];
        (s.warp % 2 == 0 ? block.x : block.y) = largest;
      }
    }
  }
}

// Rounds the intermediates to NVFP4 values.
template <class C>
__device__ __forceinline__ void quantize_gated(const GemmArgs& args, GemmShared<C>& shared, const Work& work,
                                               Accumulators<C>& acc, const Staging& s) {
  auto& blocks = shared.blocks[s.warpgroup];
  stage_maxima(shared, work, acc, s);
  s.synchronize();
  const float gscale = gscale_of_intermediate(args.problem, work.expert);
  for (int i = s.thread; i < work.width * 2 * C::kWarpgroupTiles; i += 128) {
    float2& block = blocks[i / 2 % C::kWarpgroupTiles][i / 2 / C::kWarpgroupTiles][i % 2];
    const BlockFactors factors = block_factors(max_magnitude(block.x, block.y), gscale);
    block = make_float2(factors.quantize_by, factors.step);
  }
  s.synchronize();
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
#pragma unroll
    for (int group = 0; group < C::kMaxWidth / 8; group++) {
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

// Rounds the intermediates to mxfp8 values: a token's 32 columns of a tile are a block.
template <class C>
__device__ __forceinline__ void quantize_gated_mx(GemmShared<C>& shared, const Work& work, Accumulators<C>& acc,
                                                  const Staging& s) {
  auto& blocks = shared.blocks[s.warpgroup];
  stage_maxima(shared, work, acc, s);
  s.synchronize();
  for (int i = s.thread; i < work.width * C::kWarpgroupTiles; i += 128) {
    // clang-format off: it takes the type for a function's name
    float2 (&maxima)[2] = blocks[i % C::kWarpgroupTiles][i / C::kWarpgroupTiles];
    // clang-format on
    const Rounding rounding =
        mx_rounding(max_magnitude(max_magnitude(maxima[0].x, maxima[0].y), max_magnitude(maxima[1].x, maxima[1].y)));
    maxima[0] = make_float2(rounding.by, rounding.within);
  }
  s.synchronize();
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
#pragma unroll
    for (int group = 0; group < C::kMaxWidth / 8; group++) {
      if (group * 8 >= work.width) break;
      const int token = group * 8 + s.lane % 4 * 2;
      const float2 first = blocks[m][token][0], second = blocks[m][token + 1][0];
      float &a = acc[m][group * 4], &b = acc[m][group * 4 + 1];
      const float2 rounded = round_two_to_e4m3(multiply(a, first.x), multiply(b, second.x));
      a = multiply(rounded.x, first.y);
      b = multiply(rounded.y, second.y);
    }
  }
}

// In float32, for those whose quantization has to see whole rows.
template <class C>
__device__ __forceinline__ void store_wide_gated(const GemmArgs& args, const Work& work, const Accumulators<C>& acc,
                                                 const Staging& s) {
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    if (m > 0) s.synchronize();  // nobody reads the staging any more
#pragma unroll
    for (int group = 0; group < C::kMaxWidth / 8; group++) {
      if (group * 8 >= work.width) break;
#pragma unroll
      for (int b = 0; b < 2; b++) {
        stage_float(s, group * 8 + s.lane % 4 * 2 + b, s.warp * 8 + s.lane / 4, acc[m][group * 4 + b]);
      }
    }
    s.synchronize();
    const int column = (first_tile<C>(work, s) + m) * 32;
    store_floats(work, s, args.inter_padded - column, 1,
                 [&](int row) { return args.h_wide + int64_t{work.first_row + row} * args.inter_padded + column; });
  }
}

// The intermediates, in the first two of each four sums, into the staging: 8 of a warp and tile.
template <class C>
__device__ __forceinline__ void stage_gated(const Work& work, const Accumulators<C>& acc, const Staging& s) {
  constexpr int kGroups = 4 / C::kWarpgroupTiles;   // of 8 tokens
  const uint32_t to = s.row(s.lane / 8 % kGroups, s.lane / 8 / kGroups * 4 + s.warp);
#pragma unroll
  for (int first = 0; first < C::kMaxWidth / 8; first += kGroups) {
    if (first * 8 >= work.width) break;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* sums = acc[i / kGroups] + (first + i % kGroups) * 4;
      packed[i] = pack_16<kFactorsOf<C>>(sums[0], sums[1]);
    }
    store_transposed(to + first * 1024, packed[0], packed[1], packed[2], packed[3]);
  }
}

// GEMM1 of gated activations: both of a row's halves are in a thread.
template <class C, Finish finish>
__device__ __forceinline__ void finish_gated(const GemmArgs& args, GemmShared<C>& shared, const Work& work,
                                             Accumulators<C>& acc, const Staging& s) {
  const Problem& p = args.problem;
  copy_wait();
  s.synchronize();   // nobody reads the staging any more; what was asked for ahead is there
  const bool splits = kMaySplit<typename C::Format> && p.splits;
  if (splits) {
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) add_parts<C>(work, acc[m]);
  }
  apply_activation<C, finish>(args, work, acc, s);
  if (splits) {
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) make_parts<C, true>(work, acc[m]);
  }
  if constexpr (kRounds<typename C::Format>) {
    if (args.h_wide != nullptr) return store_wide_gated<C>(args, work, acc, s);
  }
  if constexpr (Sizes<C>::kQuantizes) {
    if (p.a2 != ActScale::kNone) quantize_gated<C>(args, shared, work, acc, s);
  }
  if constexpr (Sizes<C>::kQuantizesMx) {
    if (args.mx) quantize_gated_mx<C>(shared, work, acc, s);
  }
  if constexpr (kIsW8a8<typename C::Format>) {
    if (args.h_scale != nullptr) round_groups<C, true>(args, shared.beside.rounding, work, acc, s);
  }
  stage_gated<C>(work, acc, s);
  s.synchronize();
  constexpr int columns = Sizes<C>::kGatedColumns;
  store_intermediate<C, columns>(args, work, s, first_tile<C>(work, s) * 32);
}

}  // namespace moeq::sm90
