// The persistent kernels of both GEMMs for weights of 8 bits, beside 16-bit activations and beside e4m3 ones: each end
// of GEMM1. Weights lie in the tiles of w4a8_layout.h, 64 rows by 128 values of K; a stage has one of each tile of
// rows, and both steps of tokens.
//
// Where scales are those of rows, or in tiles, products are added to the sums, which are scaled at the end. Where some
// are those of 128 values of K, of weights or of tokens, a step of 128 starts from zero and is added to the sums in
// float32, times the scales of its rows and tokens; wide tiles of tokens are multiplied in halves of 72 for that, one
// after the other. So are steps of slim tiles, which wait for memory.
#pragma once
#include "gemm_args.cuh"
#include "gemm_kernel.cuh"
#include "../device/async.cuh"
#include "../formats/weights_int8.cuh"
#include "../layout/w4a8_layout.h"

namespace moeq::sm90 {

template <>
inline constexpr bool kHasNeighbours<ByteFormat> = true;
template <>
inline constexpr bool kHasNeighbours<W8a8Format> = true;
template <>
inline constexpr bool kHasNeighbours<ByteBlockFormat> = true;
template <>
inline constexpr bool kHasNeighbours<ByteInt8Format> = true;

constexpr int kByteSlim = 32, kByteNarrow = 96, kByteWide = 144;
constexpr int kMxfp8ScaleBytes = 2 * tile_scale_bytes(Format::kMxfp8);  // of a tile

template <class F, int width>
struct ByteConfig {
  static_assert(width == kByteSlim || width == kByteNarrow || width == kByteWide);
  using Format = F;
  static constexpr bool kOverlaps = width != kByteSlim;  // a half is decoded while the one before is multiplied
  static constexpr int kMaxWidth = width;
  static constexpr int kPartWidth = width == kByteWide ? width / 2 : width;  // tokens that are multiplied at a time
  static constexpr int kConsumers = 2;
  static constexpr int kWarpgroupTiles = 2;
  static constexpr int kTokenSteps = width == kByteWide ? 1 : 2;
  static constexpr int kTokenStages = width == kByteWide ? 4 : 3;
  static constexpr int kWeightStages = kOverlaps ? 3 : 2;  // of 128 in K
  static constexpr int kBlocks = kOverlaps ? 1 : 2;
  static constexpr int kProducerRegisters = kOverlaps ? 40 : 24;
  static constexpr int kConsumerRegisters = kOverlaps ? 232 : 104;
};

// Scales of weights, where they lie in tiles.
template <class C>
struct BesideOperands {
  uint8_t scales[C::kWeightStages][Sizes<C>::kBlockTiles][kMxfp8ScaleBytes];
};

template <int width>
struct BesideOperands<ByteConfig<ByteBlockFormat, width>> {};
template <int width>
struct BesideOperands<ByteConfig<ByteInt8Format, width>> {};

// Those of 128 values of tokens, where a stage begins with them, and what intermediates are rounded with.
template <int width>
struct BesideOperands<ByteConfig<W8a8Format, width>> {
  using C = ByteConfig<W8a8Format, width>;
  float token_scales[C::kTokenStages][width];
  GroupRounding<C> rounding;
};

template <class F, int width>
struct GemmOperands<ByteConfig<F, width>> {
  using C = ByteConfig<F, width>;
  uint8_t tokens[C::kTokenStages][C::kTokenSteps][Sizes<C>::kTokenStepBytes];
  uint8_t codes[C::kWeightStages][Sizes<C>::kBlockTiles][w4a8::kFp8Bytes];
  uint8_t staging[C::kConsumers][C::kMaxWidth * 128];
  BesideOperands<C> beside;
  IntermediateBlocks<C> blocks;
};

template <int width>
__device__ __forceinline__ uint32_t scales_of_stage(GemmShared<ByteConfig<W8a8Format, width>>& shared, int stage) {
  return shared_address(shared.beside.token_scales[stage]);
}

// Where tokens have no scales of groups, all are 1: nobody copies others.
template <int width>
__device__ __forceinline__ void prepare_consumers(const GemmArgs& args,
                                                  GemmShared<ByteConfig<W8a8Format, width>>& shared) {
  using C = ByteConfig<W8a8Format, width>;
  clear_maxima(shared.beside.rounding);
  float* scales = &shared.beside.token_scales[0][0];
  if (args.operand_scale == nullptr) {
    for (int i = threadIdx.x; i < C::kTokenStages * width; i += 128 * C::kConsumers) scales[i] = 1.0f;
  }
  synchronize_consumers<C>();
}

// A warpgroup's share of a tile of 8-bit weights: 128 rows, decoded in registers, times `width` tokens in shared
// memory.

// Scales of a thread's two rows of a tile: float32 in memory, one of each 128 of K or one of each row.
struct ByteRows {
  int at[2];

  __device__ __forceinline__ void find(const WeightScales& scales, bool gated, int tile, int warp, int g) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int wanted = gated ? tile * 32 + warp * 8 + g : tile * kTileRows + warp * 16 + 2 * g + half;
      const int row = min(wanted, scales.rows - 1);  // rows of padding take any
      at[half] = (gated ? half * scales.half : 0) + (scales.blocks ? row / 128 : row) * scales.row;
    }
  }
};

// Where a warpgroup is in the rings, from tile to tile, and what its weights are multiplied by.
template <class F, int width>
struct Consumer<ByteConfig<F, width>> {
  using C = ByteConfig<F, width>;
  Ring<C::kTokenStages> tokens;
  Ring<C::kWeightStages> weights;
  uint32_t codes, exponents;  // of this thread in the first tile of the first stage
  bool in_tiles;  // scales are powers of two of 32 of K
  const float* of_expert;  // else: in memory
  int k_step;  // from one 128 of K to the next
  ByteRows rows[C::kWarpgroupTiles];

  __device__ Consumer(GemmShared<C>& shared, int warpgroup) {
    const int thread = threadIdx.x % 128, tile = warpgroup * C::kWarpgroupTiles;
    codes = shared_address(shared.codes[0][tile]) + thread / 32 * 2048 + matrix_row(thread % 32);
    if constexpr (kIsByte<F>) exponents = shared_address(shared.beside.scales[0][tile]) + exponents_offset(thread);
  }

  __device__ __forceinline__ uint32_t codes_of(int m) const {
    return codes + (weights.slot * Sizes<C>::kBlockTiles + m) * w4a8::kFp8Bytes;
  }

  // What a half's codes of both rows are multiplied by.
  __device__ __forceinline__ Raises raises(int m, int half) const {
    if (!in_tiles) return {kRaiseE4m3, kRaiseE4m3};
    const int stage = (weights.slot * Sizes<C>::kBlockTiles + m) * kMxfp8ScaleBytes;
    uint16_t both;
    load_shared(both, exponents + stage + half * (kMxfp8ScaleBytes / 2));
    return raises_of(both);
  }

  // What sums of a step of 128 are multiplied by.
  __device__ __forceinline__ float2 factors(int m, int step) const {
    if (kIsByte<F> && in_tiles) return make_float2(kMxfp8AccumulatorScale, kMxfp8AccumulatorScale);
    constexpr float kUnit = kIsInt8<F> ? kInt8AccumulatorScale : 1.0f;
    return make_float2(__ldg(of_expert + rows[m].at[0] + step * k_step) * kUnit,
                       __ldg(of_expert + rows[m].at[1] + step * k_step) * kUnit);
  }
};

template <class F, int width>
__device__ __forceinline__ void begin_tile(Consumer<ByteConfig<F, width>>& at, const GemmArgs& args, const Work& work) {
  using C = ByteConfig<F, width>;
  const Problem& p = args.problem;
  at.in_tiles = p.format == Format::kMxfp8;
  if (at.in_tiles) return;
  const WeightScales& scales = work.second ? p.scales2 : p.scales13;
  at.of_expert = scales.data + work.expert * scales.expert;
  at.k_step = scales.blocks ? 1 : 0;
  const int thread = threadIdx.x % 128, first = work.row_block * Sizes<C>::kBlockTiles;
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    const int tile = first + threadIdx.x / 128 * C::kWarpgroupTiles + m;
    at.rows[m].find(scales, !work.second && p.gated, tile, thread / 32, thread % 32 / 4);
  }
}

// The same as float16.
__device__ __forceinline__ E4m3Halves decode_e4m3_to_half(uint32_t codes) {
  const uint2 values = decode4_to_half(codes);
  return {values.x, values.y};
}

// 64 rows by 64 of K of tile m of the stage at hand. Returns a word of each load: see once_loaded.
template <class C>
__device__ __forceinline__ uint32_t decode_half(uint32_t (&fragments)[4][4], const Consumer<C>& at, int m, int half) {
  using F = typename C::Format;
  const uint32_t from = at.codes_of(m) ^ half * 64;
  const uint4 low = load_matrices(from), high = load_matrices(from + 1024);
  const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
  Raises raise = {kRaiseE4m3, kRaiseE4m3};
  if constexpr (kIsByte<F>) raise = at.raises(m, half);
#pragma unroll
  for (int step = 0; step < 4; step++) {
    E4m3Halves l, h;
    if constexpr (kIsW8a8<F>) {
      l = decode_e4m3_to_half(low_words[step]);
      h = decode_e4m3_to_half(high_words[step]);
    } else if constexpr (kIsInt8<F>) {
      l = decode_int8_in_order(low_words[step]);
      h = decode_int8_in_order(high_words[step]);
    } else {
      l = decode_e4m3_in_order(low_words[step], raise.low);
      h = decode_e4m3_in_order(high_words[step], raise.high);
    }
    uint32_t (&to)[4] = fragments[step];
    to[0] = l.first, to[1] = h.first, to[2] = l.second, to[3] = h.second;
  }
  return low.x | high.x | (kIsByte<F> ? raise.low : 0);
}

template <class C>
using PartSums = float[C::kPartWidth / 2];

// Two neighbouring tokens' scales. Volatile: they are loaded where they are used, as there are few registers.
__device__ __forceinline__ float2 load_two_scales(uint32_t at) {
  float2 scales;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(scales.x), "=f"(scales.y) : "r"(at) : "memory");
  return scales;
}

// Sums of a step, from token `first` of the tile on, added times the scales of their rows and, where there are some
// (`scales`: of this lane's first tokens of the stage), of their tokens. Those beyond a tile's tokens are never looked
// at. Returns a word of each load: see once_loaded.
template <class C>
__device__ __forceinline__ uint32_t add_scaled(TileSums<C>& sums, const PartSums<C>& part, int first, float2 factor,
                                               uint32_t scales) {
  uint32_t loaded = 0;
#pragma unroll
  for (int group = 0; group < C::kPartWidth / 8; group++) {
    float2 of_tokens = {1.0f, 1.0f};
    if constexpr (kIsW8a8<typename C::Format>) of_tokens = load_two_scales(scales + (first + group * 8) * 4);
    loaded |= __float_as_uint(of_tokens.x);
#pragma unroll
    for (int i = 4 * group; i < 4 * group + 4; i++) {
      float& sum = sums[first / 2 + i];
      const float product = kIsW8a8<typename C::Format> ? part[i] * (i % 2 == 0 ? of_tokens.x : of_tokens.y) : part[i];
      sum = __fmaf_rn(product, i / 2 % 2 == 0 ? factor.x : factor.y, sum);
    }
  }
  return loaded;
}

// A warpgroup's multiplication of a tile, stage by stage.
template <class C>
struct ByteMultiplication {
  GemmShared<C>& shared;
  Consumer<C>& at;
  const int width, lane;
  uint32_t fragments[2][4][4];
  PartSums<C> part;  // of the step at hand

  __device__ __forceinline__ void wait_for_weights() const {
    barrier_wait(shared_address(&shared.weights_full[at.weights.slot]), at.weights.parity);
  }
  __device__ __forceinline__ uint32_t wait_for_tokens(const Ring<C::kTokenStages>& ring) const {
    barrier_wait(shared_address(&shared.tokens_full[ring.slot]), ring.parity);
    return shared_address(shared.tokens[ring.slot]) / 16 | 1 << 16;
  }
  // Those of this lane's tokens, of the stage at hand.
  __device__ __forceinline__ uint32_t token_scales() const {
    return scales_of_stage(shared, at.tokens.slot) + lane % 4 * 2 * static_cast<int>(sizeof(float));
  }
  // All codes of the stage have been read; the last of them: `codes`.
  __device__ __forceinline__ void leave_weights(uint32_t codes) {
    __syncwarp();
    arrive_once_a_warp(once_loaded(shared_address(&shared.weights_empty[at.weights.slot]), codes), lane);
    at.weights.advance();
  }
  // Likewise, and of their scales `scales`, if they have some.
  __device__ __forceinline__ void leave_tokens(uint32_t scales) {
    uint32_t empty = shared_address(&shared.tokens_empty[at.tokens.slot]);
    if constexpr (kIsW8a8<typename C::Format>) {
      __syncwarp();
      empty = once_loaded(empty, scales);
    }
    arrive_once_a_warp(empty, lane);
    at.tokens.advance();
  }
  // Both tiles of a step, one after the other: two blocks of a multiprocessor fill each other's gaps.
  __device__ __forceinline__ void in_turn(Accumulators<C>& sums, int step) {
    wait_for_weights();
    const uint32_t tokens = wait_for_tokens(at.tokens), scales = token_scales();
    uint32_t loaded = 0;
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      const float2 factor = at.factors(m, step);
      const uint32_t first = decode_half(fragments[0], at, m, 0), second = decode_half(fragments[1], at, m, 1);
      if (m == C::kWarpgroupTiles - 1) leave_weights(first | second);
      start_two_steps<C::kPartWidth, kFactorsOf<C>>(part, fragments, tokens, width / 8 - 1);
      wait_for_sums<C::kPartWidth>(part);
      keep(fragments[0]);
      keep(fragments[1]);
      loaded |= add_scaled<C>(sums[m], part, 0, factor, scales);
    }
    leave_tokens(loaded);
  }

  // Tokens of both halves of a step's K, which are a stage or two.
  __device__ __forceinline__ uint32_t wait_for_second_half(uint32_t first) const {
    if constexpr (C::kTokenSteps == 2) return first + Sizes<C>::kTokenStepBytes / 16;
    Ring<C::kTokenStages> next = at.tokens;
    next.advance();
    return wait_for_tokens(next);
  }

  // While the tensor cores multiply by one half of a tile's K, the next half is decoded, and that of the next tile
  // while they multiply the last tokens by the second one. The first half of the stage's first tile is decoded already.
  __device__ __forceinline__ void overlapped(Accumulators<C>& sums, int step, bool last) {
    constexpr int kPart = C::kPartWidth, kPartRows = kPart * 128 / 16, kLast = C::kWarpgroupTiles - 1;
    const bool has_more = kPart < C::kMaxWidth && width > kPart;  // tokens than a part
    const int first = (has_more ? kPart : width) / 8 - 1, second = (width - kPart) / 8 - 1;
    const uint32_t tokens = wait_for_tokens(at.tokens), scales = token_scales();
    uint32_t others = 0, loaded = 0;
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      const float2 factor = at.factors(m, step);
      start_step<kPart, kFactorsOf<C>>(part, fragments[0], tokens, first);
      const uint32_t codes = decode_half(fragments[1], at, m, 1);
      if (m == 0) others = wait_for_second_half(tokens);
      multiply_step<kPart, kFactorsOf<C>>(part, fragments[1], others, first);
      if (m == kLast) {
        leave_weights(codes);
        if (!last) wait_for_weights();
      }
      if (has_more) {
        wait_for_sums<kPart>(part);
        add_scaled<C>(sums[m], part, 0, factor, scales);
        start_step<kPart, kFactorsOf<C>>(part, fragments[0], tokens + kPartRows, second);
        multiply_step<kPart, kFactorsOf<C>>(part, fragments[1], others + kPartRows, second);
      }
      wgmma_wait<1>();
      keep(fragments[0]);
      if (m < kLast || !last) decode_half(fragments[0], at, (m + 1) % C::kWarpgroupTiles, 0);
      wait_for_sums<kPart>(part);
      keep(fragments[1]);
      if (has_more) {
        loaded |= add_scaled<C>(sums[m], part, C::kMaxWidth - kPart, factor, scales);
      } else {
        loaded |= add_scaled<C>(sums[m], part, 0, factor, scales);
      }
    }
    leave_tokens(loaded);
    if constexpr (C::kTokenSteps == 1) leave_tokens(loaded);
  }

  // Half a tile's K is decoded while the tensor cores multiply by the other tile's, and products are added to the sums.
  template <int m>
  __device__ __forceinline__ void sum_half(TileSums<C>& sums, int half, uint32_t tokens) {
    wgmma_wait<1>();  // these fragments are free again
    keep(fragments[m]);
    const uint32_t codes = decode_half(fragments[m], at, m, half);
    if (m == C::kWarpgroupTiles - 1 && half == 1) leave_weights(codes);
    multiply_step<C::kMaxWidth>(sums, fragments[m], tokens, width / 8 - 1);
  }

  // A stage of tokens is left once the products of what follows are under way.
  __device__ __forceinline__ void sum_all_halves(Accumulators<C>& sums, int halves) {
    static_assert(C::kWarpgroupTiles == 2, "fragments of one tile are free while the other one's are read");
    uint32_t tokens = 0, left = 0;
#pragma unroll 1
    for (int i = 0; i < halves; i++) {
      const int half = i % 2;
      if (half == 0) wait_for_weights();
      if (C::kTokenSteps == 1 || half == 0) tokens = wait_for_tokens(at.tokens);
      const uint32_t of_half = C::kTokenSteps == 1 ? tokens : tokens + half * (Sizes<C>::kTokenStepBytes / 16);
      sum_half<0>(sums[0], half, of_half);
      sum_half<1>(sums[1], half, of_half);
      if (left != 0) arrive_once_a_warp(left, lane);
      left = 0;
      if (C::kTokenSteps == 1 || half == 1) {
        left = shared_address(&shared.tokens_empty[at.tokens.slot]);
        at.tokens.advance();
      }
    }
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      wait_for_sums<C::kMaxWidth>(sums[m]);  // what is done with them stays behind it
      keep(fragments[m]);
    }
    arrive_once_a_warp(left, lane);
  }

  // Sums of whole rows, times their scales.
  __device__ __forceinline__ void scale_sums(Accumulators<C>& sums) const {
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      const float2 factor = at.factors(m, 0);
#pragma unroll
      for (int i = 0; i < C::kMaxWidth / 2; i++) sums[m][i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
    }
  }

  __device__ __forceinline__ void all_steps(Accumulators<C>& sums, int steps) {
    clear<C>(sums);
    if constexpr (C::kOverlaps && (kIsByte<typename C::Format> || kIsInt8<typename C::Format>)) {
      sum_all_halves(sums, 2 * steps);
      scale_sums(sums);
    } else if constexpr (C::kOverlaps) {
      wait_for_weights();
      decode_half(fragments[0], at, 0, 0);
#pragma unroll 1
      for (int step = 0; step < steps; step++) overlapped(sums, step, step + 1 == steps);
    } else {
#pragma unroll 1
      for (int step = 0; step < steps; step++) in_turn(sums, step);
    }
  }
};

template <class F, int tokens>
__device__ __forceinline__ void multiply_tile(Accumulators<ByteConfig<F, tokens>>& sums,
                                              GemmShared<ByteConfig<F, tokens>>& shared,
                                              Consumer<ByteConfig<F, tokens>>& at, const Work& work) {
  using C = ByteConfig<F, tokens>;
  const int lane = threadIdx.x % 32, steps = work.k_tiles / 2;
  ByteMultiplication<C>{shared, at, work.width, lane, {}, {}}.all_steps(sums, steps);
}

// By one thread. The last tile of rows stands in for those beyond.
template <class F, int width>
__device__ __forceinline__ void load_weights(const GemmArgs& args, GemmShared<ByteConfig<F, width>>& shared) {
  using C = ByteConfig<F, width>;
  constexpr int kTiles = Sizes<C>::kBlockTiles;
  const Problem& p = args.problem;
  const int scale_bytes = kIsByte<F> && p.format == Format::kMxfp8 ? kMxfp8ScaleBytes : 0;
  Ring<kWorkSlots> work_ring;
  Ring<C::kWeightStages> ring;
  while (true) {
    const Work work = take_work(shared, work_ring);
    if (work.expert < 0) return;
    const int row_tiles = work.second ? args.tiles2 : args.tiles13, steps = work.k_tiles / 2;
    const int first = work.row_block * kTiles, real = min(kTiles, row_tiles - first);
    const int64_t tile = (int64_t{work.expert} * row_tiles + first) * steps;
    const uint8_t* codes = (work.second ? p.w2 : p.w13) + tile * w4a8::kFp8Bytes;
    const uint8_t* scales = scale_bytes == 0 ? nullptr : (work.second ? p.w2_scale : p.w13_scale) + tile * scale_bytes;
    const int wanted = max(steps - kStagesAhead, 0);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      if (step == wanted) barrier_arrive(shared_address(&shared.work_wanted));
      barrier_wait(shared_address(&shared.weights_empty[ring.slot]), ring.parity ^ 1);
      const uint32_t full = shared_address(&shared.weights_full[ring.slot]);
      barrier_expect(full, kTiles * (w4a8::kFp8Bytes + scale_bytes));
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        const int64_t from = int64_t{min(i, real - 1)} * steps + step;
        copy_bulk(shared_address(shared.codes[ring.slot][i]), codes + from * w4a8::kFp8Bytes, w4a8::kFp8Bytes, full);
        if constexpr (kIsByte<F>) {
          if (scale_bytes == 0) continue;
          copy_bulk(shared_address(shared.beside.scales[ring.slot][i]), scales + from * scale_bytes, scale_bytes, full);
        }
      }
      ring.advance();
    }
  }
}

template <class F>
struct ByteConfigs {
  using Slim = ByteConfig<F, kByteSlim>;
  using Narrow = ByteConfig<F, kByteNarrow>;
  using Wide = ByteConfig<F, kByteWide>;
};
template <>
struct ConfigsOf<ByteFormat> : ByteConfigs<ByteFormat> {};
template <>
struct ConfigsOf<W8a8Format> : ByteConfigs<W8a8Format> {};
template <>
struct ConfigsOf<ByteInt8Format> : ByteConfigs<ByteInt8Format> {};
template <>
struct ConfigsOf<ByteBlockFormat> : ByteConfigs<ByteBlockFormat> {
  using Slim = ByteConfigs<ByteFormat>::Slim;  // which scales the sums of each step
};

}  // namespace moeq::sm90
