// The persistent kernels of both GEMMs for weights of 8 bits: each end of GEMM1. Weights lie in the tiles of
// w4a8_layout.h, 64 rows by 128 values of K; a stage has one of each tile of rows, and both steps of tokens.
//
// A step of 128 in K starts from zero and is added to the sums in float32, times the scales of its rows and tokens.
// Wide tiles of tokens are multiplied in halves of 72 for that, one after the other.
#include "gemm_args.cuh"
#include "gemm_kernel.cuh"
#include "../device/async.cuh"
#include "../formats/weights_e4m3.cuh"
#include "../layout/w4a8_layout.h"

namespace moeq::sm90 {

template <>
inline constexpr bool kHasNeighbours<ByteFormat> = true;

constexpr int kByteSlim = 32, kByteNarrow = 96, kByteWide = 144;
constexpr int kMxfp8ScaleBytes = 2 * tile_scale_bytes(Format::kMxfp8);  // of a tile

template <int width>
struct ByteConfig {
  static_assert(width == kByteSlim || width == kByteNarrow || width == kByteWide);
  using Format = ByteFormat;
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

template <int width>
struct GemmOperands<ByteConfig<width>> {
  using C = ByteConfig<width>;
  uint8_t tokens[C::kTokenStages][C::kTokenSteps][Sizes<C>::kTokenStepBytes];
  uint8_t codes[C::kWeightStages][Sizes<C>::kBlockTiles][w4a8::kFp8Bytes];
  uint8_t staging[C::kConsumers][C::kMaxWidth * 128];
  uint8_t scales[C::kWeightStages][Sizes<C>::kBlockTiles][kMxfp8ScaleBytes];  // where they lie in tiles
};

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
template <int width>
struct Consumer<ByteConfig<width>> {
  using C = ByteConfig<width>;
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
    exponents = shared_address(shared.scales[0][tile]) + exponents_offset(thread);
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
    if (in_tiles) return make_float2(kMxfp8AccumulatorScale, kMxfp8AccumulatorScale);
    return make_float2(__ldg(of_expert + rows[m].at[0] + step * k_step),
                       __ldg(of_expert + rows[m].at[1] + step * k_step));
  }
};

template <int width>
__device__ __forceinline__ void begin_tile(Consumer<ByteConfig<width>>& at, const GemmArgs& args, const Work& work) {
  using C = ByteConfig<width>;
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

// 64 rows by 64 of K of tile m of the stage at hand.
template <class C>
__device__ __forceinline__ void decode_half(uint32_t (&fragments)[4][4], const Consumer<C>& at, int m, int half) {
  const uint32_t from = at.codes_of(m) ^ half * 64;
  const uint4 low = load_matrices(from), high = load_matrices(from + 1024);
  const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
  const Raises raise = at.raises(m, half);
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const E4m3Halves l = decode_e4m3_in_order(low_words[step], raise.low);
    const E4m3Halves h = decode_e4m3_in_order(high_words[step], raise.high);
    uint32_t (&to)[4] = fragments[step];
    to[0] = l.first, to[1] = h.first, to[2] = l.second, to[3] = h.second;
  }
}

template <class C>
using PartSums = float[C::kPartWidth / 2];

// Sums of a step, from token `first` of the tile on, added times the scales of their rows. Those beyond a tile's tokens
// are never looked at.
template <class C>
__device__ __forceinline__ void add_scaled(TileSums<C>& sums, const PartSums<C>& part, int first, float2 factor) {
#pragma unroll
  for (int i = 0; i < C::kPartWidth / 2; i++) {
    float& sum = sums[first / 2 + i];
    sum = __fmaf_rn(part[i], i / 2 % 2 == 0 ? factor.x : factor.y, sum);
  }
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
  // All codes of the stage have been read.
  __device__ __forceinline__ void leave_weights() {
    __syncwarp();
    arrive_once_a_warp(shared_address(&shared.weights_empty[at.weights.slot]), lane);
    at.weights.advance();
  }
  __device__ __forceinline__ void leave_tokens() {
    arrive_once_a_warp(shared_address(&shared.tokens_empty[at.tokens.slot]), lane);
    at.tokens.advance();
  }
  // Both tiles of a step, one after the other: two blocks of a multiprocessor fill each other's gaps.
  __device__ __forceinline__ void in_turn(Accumulators<C>& sums, int step) {
    wait_for_weights();
    const uint32_t tokens = wait_for_tokens(at.tokens);
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      const float2 factor = at.factors(m, step);
      decode_half(fragments[0], at, m, 0);
      decode_half(fragments[1], at, m, 1);
      if (m == C::kWarpgroupTiles - 1) leave_weights();
      start_two_steps<C::kPartWidth>(part, fragments, tokens, width / 8 - 1);
      wait_for_sums<C::kPartWidth>(part);
      keep(fragments[0]);
      keep(fragments[1]);
      add_scaled<C>(sums[m], part, 0, factor);
    }
    leave_tokens();
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
    const uint32_t tokens = wait_for_tokens(at.tokens);
    uint32_t others = 0;
#pragma unroll
    for (int m = 0; m < C::kWarpgroupTiles; m++) {
      const float2 factor = at.factors(m, step);
      start_step<kPart>(part, fragments[0], tokens, first);
      decode_half(fragments[1], at, m, 1);
      if (m == 0) others = wait_for_second_half(tokens);
      multiply_step<kPart>(part, fragments[1], others, first);
      if (m == kLast) {
        leave_weights();
        if (!last) wait_for_weights();
      }
      if (has_more) {
        wait_for_sums<kPart>(part);
        add_scaled<C>(sums[m], part, 0, factor);
        start_step<kPart>(part, fragments[0], tokens + kPartRows, second);
        multiply_step<kPart>(part, fragments[1], others + kPartRows, second);
      }
      wgmma_wait<1>();
      keep(fragments[0]);
      if (m < kLast || !last) decode_half(fragments[0], at, (m + 1) % C::kWarpgroupTiles, 0);
      wait_for_sums<kPart>(part);
      keep(fragments[1]);
      if (has_more) {
        add_scaled<C>(sums[m], part, C::kMaxWidth - kPart, factor);
      } else {
        add_scaled<C>(sums[m], part, 0, factor);
      }
    }
    leave_tokens();
    if constexpr (C::kTokenSteps == 1) leave_tokens();
  }
};

template <int tokens>
__device__ __forceinline__ void multiply_tile(Accumulators<ByteConfig<tokens>>& sums,
                                              GemmShared<ByteConfig<tokens>>& shared, Consumer<ByteConfig<tokens>>& at,
                                              const Work& work) {
  using C = ByteConfig<tokens>;
  ByteMultiplication<C> multiplication{shared, at, work.width, static_cast<int>(threadIdx.x % 32), {}, {}};
  clear<C>(sums);
  const int steps = work.k_tiles / 2;
  if constexpr (C::kOverlaps) {
    multiplication.wait_for_weights();
    decode_half(multiplication.fragments[0], at, 0, 0);
  }
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    if constexpr (C::kOverlaps) {
      multiplication.overlapped(sums, step, step + 1 == steps);
    } else {
      multiplication.in_turn(sums, step);
    }
  }
}

// By one thread. The last tile of rows stands in for those beyond.
template <int width>
__device__ __forceinline__ void load_weights(const GemmArgs& args, GemmShared<ByteConfig<width>>& shared) {
  using C = ByteConfig<width>;
  constexpr int kTiles = Sizes<C>::kBlockTiles;
  const Problem& p = args.problem;
  const int scale_bytes = p.format == Format::kMxfp8 ? kMxfp8ScaleBytes : 0;
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
        if (scale_bytes != 0) {
          copy_bulk(shared_address(shared.scales[ring.slot][i]), scales + from * scale_bytes, scale_bytes, full);
        }
      }
      ring.advance();
    }
  }
}

template <>
struct ConfigsOf<ByteFormat> {
  using Slim = ByteConfig<kByteSlim>;
  using Narrow = ByteConfig<kByteNarrow>;
  using Wide = ByteConfig<kByteWide>;
};

template GemmVariants gemm_variants<ByteFormat, Finish::kSwiglu>();
template GemmVariants gemm_variants<ByteFormat, Finish::kGated>();
template GemmVariants gemm_variants<ByteFormat, Finish::kPlain>();

}  // namespace moeq::sm90
