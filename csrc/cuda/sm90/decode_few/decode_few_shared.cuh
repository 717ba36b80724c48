// Shared memory of the decode kernel for very few tokens, and what all its parts need.
#pragma once
#include <cstddef>
#include <type_traits>

#include "decode_few_deal.cuh"
#include "../device/async.cuh"

namespace moeq::sm90::few {

// e4m3 weights in the place of a format of formats.cuh: with scales of 128 x 128, and of 128 values of a token, or of
// rows; `kRounded`: beside activations that are rounded to e4m3, else they stay as they are.
template <bool kGroups, bool kRounded>
struct Fp8Format {};

// Weights of policy `packed`, NVFP4 or MXFP4 (weights_packed.cuh).
template <class Codes_>
struct PackedFormat {
  using Codes = Codes_;
  static constexpr int kTileScaleBytes = Codes::kScaleBytes / 2;   // of 64 values of K
};
template <class Format>
constexpr bool kIsPacked = false;
template <class Codes>
constexpr bool kIsPacked<PackedFormat<Codes>> = true;

// MXFP8 weights, whose powers of two are in their operands.
struct Mxfp8Format {
  static constexpr int kTileScaleBytes = tile_scale_bytes(Format::kMxfp8);   // of 64 values of K
};

// int8 weights with scales of rows, in the tiles of e4m3 ones, beside 16-bit activations.
struct Int8Format {};

// A format of formats.cuh, or MXFP8, whose tokens and intermediate are rounded to e4m3.
template <class Weights_>
struct BesideE4m3 : Weights_ {
  using Weights = Weights_;
};

template <class Format>
constexpr bool kIsMxfp8 = std::is_base_of_v<Mxfp8Format, Format>;

// Bytes whose scales are beside the tiles: e4m3 or int8.
template <class Format>
constexpr bool kIsBytes = std::is_same_v<Format, Int8Format>;
template <bool kGroups, bool kRounded>
constexpr bool kIsBytes<Fp8Format<kGroups, kRounded>> = true;

// Whether each 128 x 128 weights have a scale.
template <class Format>
constexpr bool kHasBlocks = false;
template <bool kRounded>
constexpr bool kHasBlocks<Fp8Format<true, kRounded>> = true;

// Whether tokens and intermediate are rounded to e4m3, and whether each 128 of their values have a scale.
template <class Format>
constexpr bool kRoundsToE4m3 = false;
template <class Weights>
constexpr bool kRoundsToE4m3<BesideE4m3<Weights>> = true;
template <class Codes>
constexpr bool kRoundsToE4m3<PackedFormat<Codes>> = true;
template <bool kGroups>
constexpr bool kRoundsToE4m3<Fp8Format<kGroups, true>> = true;
template <class Format>
constexpr bool kRoundsGroups = kHasBlocks<Format> && kRoundsToE4m3<Format>;

// Whether K of a row that has a scale of its own may be cut.
template <class Format>
constexpr bool kCutsRows = false;
template <class Weights>
constexpr bool kCutsRows<BesideE4m3<Weights>> = true;
template <>
constexpr bool kCutsRows<Fp8Format<false, true>> = true;

// Whether values of e4m3 codes are float16, which one instruction makes of two codes, not bfloat16.
template <class Format>
constexpr bool kInHalf = kIsPacked<Format>;
template <bool kGroups>
constexpr bool kInHalf<Fp8Format<kGroups, true>> = true;

// Whether weights lie as w4a8_layout.h says, and what lies behind a row tile's scales.
template <class Format>
constexpr bool kIsOfW4a8 = kIsBytes<Format> || kIsPacked<Format> || kIsMxfp8<Format>;
template <class Format>
constexpr int kBytesBehindRow = kIsPacked<Format> ? kTileRows : 0;

// Of 64 rows by 64 values of K: codes, and what a stage has for them.
template <class Format>
constexpr int kCodeBytes = kIsBytes<Format> || kIsMxfp8<Format> ? kFp8TileBytes : kTileCodeBytes;
template <class Format>
constexpr int stage_tile_bytes() {
  if constexpr (kIsBytes<Format>) {
    return kFp8TileBytes;
  } else if constexpr (kIsMxfp8<Format>) {
    return kMxfp8TileBytes;
  } else {
    return tile_bytes_of(Format::kTileScaleBytes);
  }
}
template <class Format>
constexpr int kStageTileBytes = stage_tile_bytes<Format>();

constexpr int kMaxima = 3;

// One expert's slots, up to `columns` of them.
struct Entry {
  int expert, first, count;
};

constexpr uint32_t kForeign = 0xffffffffu;

// Where an entry's rows of tokens are copied when its units are: of every other entry.
struct GatheredRows {
  uint64_t landed[2];   // an entry's rows have
  uint64_t left[2];     // all warps that multiply have left them
};

struct NoGatheredRows {};

// What a launch of up to so many slots has in the same places, whatever the problem.
template <int kSlots_>
struct FixedOf : std::conditional_t<(kSlots_ > kMaxSlots), GatheredRows, NoGatheredRows> {
  static constexpr int kSlots = kSlots_;
  uint64_t full[kMaxStages];     // a stage's weights have landed
  uint64_t empty[kMaxStages];    // all warps have left it
  uint64_t summed[2];            // all warps have left their sums of a unit in a buffer
  uint64_t freed[2];             // the helpers have read them
  uint64_t made[2];              // a buffer has GEMM2's operand of an entry and part
  uint64_t tokens;               // the tokens' rows have landed
  uint64_t unused;
  Work work[kShares];
  int asked;                     // stages that the copying warp has asked for
  uint32_t epoch;
  Entry entries[kSlots];
  float output_alphas[kSlots];   // GEMM2's, of slots
  float2 alphas[kSlots];      // GEMM1's, of entries
  uint32_t place[kSlots];     // entry of a slot, or kForeign
  int slots[kSlots];          // sorted by entry, ascending within one
  alignas(16) int experts[kSlots];        // of slots, where the routing takes more than a warp
  float weights[kSlots];      // of slots
  uint32_t openers[kSlots / 32];   // of a warp's slots each: how many open an entry << 16 | slots of theirs
  uint32_t amax[kMaxTokensPacked];   // of rows that are being quantized
  float x_factor[kMaxTokens];
  union {   // of operands of GEMM2: those that are rounded to e4m3 have the one, to NVFP4 the other
    uint32_t h_amax[kMaxima][kColumns];
    float h_factor[2][kColumns];
  };
};
using Fixed = FixedOf<kMaxSlots>;
static_assert(offsetof(Fixed, experts) % 16 == 0, "read 16 bytes at a time");

// Whether rows of tokens are copied entry by entry.
template <class Fixed>
constexpr bool kGathers = (Fixed::kSlots > kMaxSlots);

constexpr int slots_of(Kind kind) { return kind == Kind::kGathered ? kGatheredSlots : kMaxSlots; }

// [2, workers, columns, rows of a tile]: what is left of a unit for the helpers.
__device__ __forceinline__ float* sums_of(const Args& args, uint8_t* base, int buffer, int worker, int column) {
  const int place = (buffer * kWorkers + worker) * args.columns + column;
  return reinterpret_cast<float*>(base + args.sums_offset) + place * kTileRows;
}

// Questions about a problem that the kind of kernel may have answered.
template <Kind kKind>
struct Case {
  static constexpr bool kGeneral = kKind == Kind::kGeneral;
  static constexpr bool kQuantized = kKind == Kind::kQuantized || kKind == Kind::kQuantizedShared;
  static constexpr bool kShared = shares_units(kKind);
  static constexpr bool kGathered = kKind == Kind::kGathered;
  static __device__ __forceinline__ bool gated(const Problem& p) { return !kGeneral || p.gated; }
  static __device__ __forceinline__ bool bias13(const Problem& p) { return kGeneral && p.w13_bias != nullptr; }
  static __device__ __forceinline__ bool bias2(const Problem& p) { return kGeneral && p.w2_bias != nullptr; }
  static __device__ __forceinline__ bool quantizes_tokens(const Problem& p) {
    return kGeneral ? p.a1 != ActScale::kNone : kQuantized;
  }
  static __device__ __forceinline__ bool quantizes_hidden(const Problem& p) {
    return kGeneral ? p.a2 != ActScale::kNone : kQuantized;
  }
  static __device__ __forceinline__ bool dynamic_tokens(const Problem& p) {
    return kGeneral && p.a1 == ActScale::kToken;
  }
  static __device__ __forceinline__ bool dynamic_hidden(const Problem& p) {
    return kGeneral && p.a2 == ActScale::kToken;
  }
  // Of float16 hidden states, and of those whose operands are two bfloat16 each.
  static __device__ __forceinline__ bool half(const Problem& p) { return kGeneral && p.x_half; }
  static __device__ __forceinline__ bool splits(const Problem& p) { return kGeneral && p.splits; }
};

__host__ __device__ constexpr int fixed_bytes(Kind kind) {
  const size_t bytes = kind == Kind::kGathered ? sizeof(FixedOf<slots_of(Kind::kGathered)>) : sizeof(Fixed);
  return (static_cast<int>(bytes) + 127) / 128 * 128;
}

// Comes to a barrier without waiting for the others.
__device__ __forceinline__ void named_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Named barriers. 0 is everybody's.
enum Meeting : int {
  kWorkersMeet = 1,
  kSortersMeet,
  kHelpersMeet,
  kFactorsKnown,     // of dynamically quantized tokens: workers know them, helpers need them
  kBarriersMade,     // workers have made the barriers of the ring, the copying warp needs them
  kPrepared,         // all threads: slots are sorted, the tokens' barrier is made
  kMultiplied        // workers and helpers
};

__device__ __forceinline__ void sync_helpers() { named_barrier(kHelpersMeet, kHelperThreads); }

__device__ __forceinline__ void sync_workers() { named_barrier(kWorkersMeet, kThreads); }

__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % 32; }

// Comes to an mbarrier for several.
__device__ __forceinline__ void barrier_arrive_times(uint32_t barrier, int times) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}

struct Turn {
  int stage;
  uint32_t parity;
  int number;   // of all stages before
};

__device__ __forceinline__ void next_stage(Turn& turn, int stages) {
  ++turn.number;
  if (++turn.stage == stages) {
    turn.stage = 0;
    turn.parity ^= 1;
  }
}

// Where e4m3 and int8 weights of a unit have their scales.
struct ScalePlace {
  const float* first;   // the expert's
  int half, row, rows;
  bool paired;          // rows of gate and up take turns
};

template <Kind kKind>
__device__ __forceinline__ ScalePlace scale_place(const Args& args, int expert, int gemm) {
  const WeightScales& scales = gemm == 0 ? args.fp8.weights[0] : args.fp8.weights[1];
  const bool paired = gemm == 0 && Case<kKind>::gated(args.p);
  return {scales.data + expert * scales.expert, paired ? scales.half : 0, scales.row, scales.rows, paired};
}

// Those of a row tile's block of 128 rows, of which none ends within a tile; `second`: of up rows.
__device__ __forceinline__ const float* block_scales(const ScalePlace& place, int row_tile, int second) {
  const int row = min(row_tile * (place.paired ? kTileRows / 2 : kTileRows), place.rows - 1);
  return place.first + second * place.half + row / 128 * place.row;
}

// That of one of a thread's four rows: `block` of its two of 16, 32 apart, `second` of two rows in it.
__device__ __forceinline__ float row_scale(const ScalePlace& place, int row_tile, int block, int second) {
  const int g = lane_of_warp() / 4, sixteen = kTileRows / 16 * row_tile + threadIdx.x / 32 % 2 + 2 * block;
  const int row = place.paired ? 8 * sixteen + g : 16 * sixteen + 2 * g + second;
  return __ldg(place.first + second * place.half + min(row, place.rows - 1) * place.row);   // padded rows: any
}

// Asks for the block scales of a unit, one thread, long before they are needed.
template <Kind kKind>
__device__ __forceinline__ void prefetch_scales(const Args& args, const Work& work, int expert, int gemm, int end) {
  constexpr int kLine = 128 / sizeof(float);
  const ScalePlace place = scale_place<kKind>(args, expert, gemm);
#pragma unroll 1
  for (int block = work.part * work.part_tiles / 2; block < end / 2; block += kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(block_scales(place, work.row_tile, 0) + block));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(block_scales(place, work.row_tile, 1) + block));
  }
}

}  // namespace moeq::sm90::few
