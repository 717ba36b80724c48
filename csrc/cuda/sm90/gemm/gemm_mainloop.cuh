// A warpgroup's share of a tile: 64 or 128 weight rows, decoded in registers, times `width` tokens in shared memory.
#pragma once
#include "gemm_pipeline.cuh"
#include "../device/wgmma_bf16.cuh"

namespace moeq::sm90 {

template <class C>
constexpr Factors kFactorsOf = kIsHalf<typename C::Format> ? Factors::kFloat16 : Factors::kBfloat16;

// acc[m][4 * j + 2 * h + b]: row 16 * warp + lane / 4 + 8 * h of tile m, token 8 * j + lane % 4 * 2 + b.
template <class C>
using TileSums = float[C::kMaxWidth / 2];
template <class C>
using Accumulators = TileSums<C>[C::kWarpgroupTiles];

// What a thread holds of a tile of weights, before it is decoded.
template <class Format>
struct RawTile {
  uint4 codes;
  typename Format::ScaleWord scales;

  __device__ __forceinline__ void load(uint32_t code_at, uint32_t scale_at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                 : "r"(code_at)
                 : "memory");
    load_shared(scales, scale_at);
  }

  __device__ __forceinline__ void decode(uint32_t (&fragments)[4][4]) const {
    const typename Format::Scales ready = Format::scales(scales);
    Format::decode(codes.x, ready, fragments[0]);
    Format::decode(codes.y, ready, fragments[1]);
    Format::decode(codes.z, ready, fragments[2]);
    Format::decode(codes.w, ready, fragments[3]);
  }
};

// Where a warpgroup is in the rings, from tile to tile, and this thread's places in the first stage of weights.
template <class C>
struct Consumer {
  Ring<C::kTokenStages> tokens;
  Ring<C::kWeightStages> weights;
  uint32_t codes, scales;

  __device__ Consumer(GemmShared<C>& shared, int warpgroup) {
    const int thread = threadIdx.x % 128, tile = warpgroup * C::kWarpgroupTiles;
    codes = shared_address(shared.codes[0][tile]) + thread * 16;
    scales = shared_address(shared.scales[0][tile]) + C::Format::scale_offset(thread);
  }
  // Tile m of a step of this stage.
  __device__ __forceinline__ void load(RawTile<typename C::Format>& tile, int step, int m) const {
    const int at = weights.slot * Sizes<C>::kBlockTiles + m;
    tile.load(codes + at * Sizes<C>::kStageCodes + step * kTileCodeBytes,
              scales + at * Sizes<C>::kStageScales + step * C::Format::kTileScaleBytes);
  }
};

// What a consumer has to know of a tile of weights besides where it lies.
template <class C>
__device__ __forceinline__ void begin_tile(Consumer<C>&, const GemmArgs&, const Work&) {}

__device__ __forceinline__ void arrive_once_a_warp(uint32_t barrier, int lane) {
  if (lane == 0) barrier_arrive(barrier);
}

// The compiler does not know that a multiplication under way still reads its fragments: until here it does.
__device__ __forceinline__ void keep(const uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
}

// One warpgroup's multiplication of a tile.
template <class C>
struct Multiplication {
  using Raw = RawTile<typename C::Format>;
  using Fragments = uint32_t[2][4][4];
  // Where scales take many registers, the second of two tiles is fetched once the first is decoded.
  static constexpr bool kFetchLate = sizeof(typename C::Format::Scales) + sizeof(typename C::Format::ScaleWord) > 12;

  GemmShared<C>& shared;
  Consumer<C>& at;
  const int index, lane;
  uint32_t previous = 0;   // the barrier that tells that the stage of tokens before has been read; 0: told
  Raw next;                // the first tile of the step to come
  TileSums<C> unscaled;    // a step's, where the format's sums are scaled

  __device__ __forceinline__ void wait_for_tokens() const {
    barrier_wait(shared_address(&shared.tokens_full[at.tokens.slot]), at.tokens.parity);
  }
  __device__ __forceinline__ uint32_t tokens_of(int step) const {
    return shared_address(shared.tokens[at.tokens.slot][step]) / 16 | 1 << 16;
  }
  __device__ __forceinline__ void leave_tokens() {
    previous = shared_address(&shared.tokens_empty[at.tokens.slot]);
    at.tokens.advance();
  }
  __device__ __forceinline__ void release_previous() {
    if (previous != 0) arrive_once_a_warp(previous, lane);
    previous = 0;
  }
  // Waits for all multiplications.
  __device__ __forceinline__ void settle(const Fragments& fragments) {
    wgmma_wait<0>();
    keep(fragments[0]);
    keep(fragments[1]);
    release_previous();
  }

  // While the tensor cores multiply by one operand, the next one is decoded into the other fragments.
  template <bool release>
  __device__ __forceinline__ void multiply_overlapped(TileSums<C>& acc, uint32_t (&fragments)[4][4], uint32_t tokens,
                                                      const Raw& tile) {
    wgmma_wait<1>();   // these fragments are free again
    if (release) release_previous();
    tile.decode(fragments);
    multiply_step<C::kMaxWidth, kFactorsOf<C>>(acc, fragments, tokens, index);
  }

  // Tile m of a step; `load_next` fetches what follows.
  template <int m, class LoadNext>
  __device__ __forceinline__ void overlapped_tile(TileSums<C>& acc, Fragments& fragments, uint32_t tokens,
                                                  LoadNext load_next) {
    const Raw current = next;
    load_next();
    multiply_overlapped<m == 1>(acc, fragments[m], tokens, current);
  }

  // A stage of weights of two tiles a step; stages of tokens of one step.
  __device__ __forceinline__ void overlapped_stage(Accumulators<C>& acc, Fragments& fragments, int steps) {
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_for_tokens();
      const uint32_t tokens = tokens_of(0);
      overlapped_tile<0>(acc[0], fragments, tokens, [&] { at.load(next, step, 1); });
      overlapped_tile<1>(acc[1], fragments, tokens, [&] {
        if (step + 1 < steps) at.load(next, step + 1, 0);
      });
      leave_tokens();
    }
  }

  __device__ __forceinline__ void multiply_pair(Accumulators<C>& acc, Fragments& fragments, int step, Raw& second) {
    const uint32_t tokens = tokens_of(step);
    settle(fragments);
    next.decode(fragments[0]);
    if (kFetchLate) at.load(second, step, 1);
    second.decode(fragments[1]);
    multiply_two_tiles<C::kMaxWidth>(acc[0], fragments, tokens, index);
  }

  // A stage of weights of two tiles a step, both at once; stages of tokens of as many steps.
  __device__ __forceinline__ void stage_of_pairs(Accumulators<C>& acc, Fragments& fragments, int steps) {
    wait_for_tokens();
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      Raw second;
      if (!kFetchLate) at.load(second, step, 1);
      multiply_pair(acc, fragments, step, second);
      if (step + 1 < steps) at.load(next, step + 1, 0);
    }
    leave_tokens();
  }

  // The next tile of a step of a format whose sums are scaled, for which they have to be there.
  template <class LoadNext>
  __device__ __forceinline__ void scaled_tile(TileSums<C>& acc, uint32_t (&fragments)[4][4], uint32_t tokens,
                                              LoadNext load_next) {
    next.decode(fragments);
    start_step<C::kMaxWidth>(unscaled, fragments, tokens, index);
    const auto factors = C::Format::factors(next.scales);
    load_next();
    wait_for_sums<C::kMaxWidth>(unscaled);
    keep(fragments);
    add_scaled(acc, factors);
  }

  template <class Factors>
  __device__ __forceinline__ void add_scaled(TileSums<C>& acc, const Factors& factors) {
#pragma unroll
    for (int j = 0; j < C::kMaxWidth / 8; j++) {
      if (j > 0 && j > index) break;
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i++) {
        acc[i] = __fmaf_rn(unscaled[i], i % 4 < 2 ? factors.low : factors.high, acc[i]);
      }
    }
  }

  // A stage of weights of two tiles a step, one after the other; stages of tokens of as many steps.
  __device__ __forceinline__ void scaled_stage(Accumulators<C>& acc, Fragments& fragments, int steps) {
    wait_for_tokens();
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const uint32_t tokens = tokens_of(step);
      scaled_tile(acc[0], fragments[0], tokens, [&] { at.load(next, step, 1); });
      scaled_tile(acc[1], fragments[0], tokens, [&] {
        if (step + 1 < steps) at.load(next, step + 1, 0);
      });
    }
    leave_tokens();
    release_previous();
  }

  __device__ __forceinline__ void multiply_steps(Accumulators<C>& acc, Fragments& fragments, int steps, Raw& second) {
    settle(fragments);
    next.decode(fragments[0]);
    if (steps > 1) {
      if (kFetchLate) at.load(second, 1, 0);
      second.decode(fragments[1]);
      multiply_two_steps<C::kMaxWidth, kFactorsOf<C>>(acc[0], fragments, tokens_of(0), index);
    } else {
      multiply_step<C::kMaxWidth, kFactorsOf<C>>(acc[0], fragments[0], tokens_of(0), index);
    }
  }

  // A stage of weights of one tile a step, both steps at once; stages of tokens of as many steps.
  __device__ __forceinline__ void stage_of_singles(Accumulators<C>& acc, Fragments& fragments, int steps) {
    Raw second;
    if (!kFetchLate && steps > 1) at.load(second, 1, 0);
    wait_for_tokens();
    multiply_steps(acc, fragments, steps, second);
    leave_tokens();
  }

  __device__ __forceinline__ void stage(Accumulators<C>& acc, Fragments& fragments, int steps) {
    if constexpr (kScalesSums<typename C::Format>) {
      scaled_stage(acc, fragments, steps);
    } else if constexpr (!C::kTakesTurns) {
      overlapped_stage(acc, fragments, steps);
    } else if constexpr (C::kWarpgroupTiles == 2) {
      stage_of_pairs(acc, fragments, steps);
    } else {
      stage_of_singles(acc, fragments, steps);
    }
  }
};

template <class C>
__device__ __forceinline__ void clear(Accumulators<C>& acc) {
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
#pragma unroll
    for (int i = 0; i < C::kMaxWidth / 2; i++) acc[m][i] = 0.0f;
  }
}

template <class C>
__device__ __forceinline__ void multiply_tile(Accumulators<C>& acc, GemmShared<C>& shared, Consumer<C>& at,
                                              const Work& work) {
  typename Multiplication<C>::Fragments fragments;
  if constexpr (C::kTakesTurns) {   // `keep` reads them before they are first written
#pragma unroll
    for (int i = 0; i < 32; i++) fragments[i / 16][i / 4 % 4][i % 4] = 0;
  }
  clear<C>(acc);
  Multiplication<C> multiplication{shared, at, work.width / 8 - 1, static_cast<int>(threadIdx.x % 32)};
#pragma unroll 1
  for (int k = 0; k < work.k_tiles; k += kWeightSteps) {
    barrier_wait(shared_address(&shared.weights_full[at.weights.slot]), at.weights.parity);
    at.load(multiplication.next, 0, 0);
    multiplication.stage(acc, fragments, min(kWeightSteps, work.k_tiles - k));
    __syncwarp();
    arrive_once_a_warp(shared_address(&shared.weights_empty[at.weights.slot]), multiplication.lane);
    at.weights.advance();
  }
  if constexpr (C::kTakesTurns) {
    multiplication.settle(fragments);
  } else {
    wgmma_wait<0>();
    multiplication.release_previous();
  }
}

}  // namespace moeq::sm90
