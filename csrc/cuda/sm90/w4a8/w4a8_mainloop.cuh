// A warpgroup's share of a tile: 64 weight rows times up to 256 tokens.
//
// The tensor cores keep about 13 bits of a running fp8 sum, so each step of 128 in K starts from zero and is added to
// the sums in float32. A tile wider than one instruction is done in two halves that share the partial sums' registers.
#pragma once
#include "w4a8_shared.cuh"
#include "../device/wgmma_e4m3.cuh"
#include "../formats/weights_int4_e4m3.cuh"
#include "../formats/weights_packed.cuh"

namespace moeq::sm90::w4a8 {

// sums[part][4 * j + 2 * h + b]: row 16 * warp + lane / 4 + 8 * h, token part * span + 8 * j + lane % 4 * 2 + b.
template <int parts_, int tokens_>
struct Parts {
  static constexpr int kMany = parts_, kTokens = tokens_;   // how many, and tokens of one at most
};
using Whole = Parts<1, kMaxSingle>;
using Halves = Parts<2, kMaxWidth / 2>;
using Short = Parts<1, kMaxNarrow>;
using Shorts = Parts<2, kMaxNarrow>;

template <class P>
struct Sums {
  static constexpr int kRegisters = P::kTokens / 2;
  float v[P::kMany][kRegisters];
};

// What chooses the instruction, and how many tokens it spans.
template <class P>
struct Span {
  int tokens, index;
  __device__ explicit Span(int width) {
    tokens = width / P::kMany;
    if constexpr (P::kTokens == kMaxNarrow) {
      index = tokens / 8 - 1;
    } else {
      index = P::kMany == 2 ? (tokens - 88) / 8 : tokens <= 96 ? tokens / 16 - 1 : (tokens - 104) / 8 + 6;
    }
  }
};

// `a`: registers of the first of some steps, or where they are in shared memory.
template <int registers, class Weights>
__device__ __forceinline__ void start(float (&part)[registers], Weights a, uint64_t tokens, int index) {
  if constexpr (registers == Sums<Short>::kRegisters) {
    multiply_short(part, a, tokens, index);
  } else if constexpr (registers == Sums<Whole>::kRegisters) {
    multiply_single(part, a, tokens, index);
  } else {
    multiply_half(part, a, tokens, index);
  }
}

// Few branches: more additions than needed take less time. Sums beyond a tile's tokens are never looked at.
template <int registers>
__device__ __forceinline__ void add(float (&sums)[registers], const float (&part)[registers], int tokens) {
  constexpr int kFewest = 8, kFew = 32;   // registers: 16 and 64 tokens
#pragma unroll
  for (int i = 0; i < kFewest; i++) sums[i] = __fadd_rn(sums[i], part[i]);
  if (registers == Sums<Short>::kRegisters && tokens <= 2 * kFewest) return;
#pragma unroll
  for (int i = kFewest; i < kFew; i++) sums[i] = __fadd_rn(sums[i], part[i]);
  if (registers == kMaxSingle / 2 && tokens <= 2 * kFew) return;
#pragma unroll
  for (int i = kFew; i < registers; i++) sums[i] = __fadd_rn(sums[i], part[i]);
}

// The same, times the scales of a thread's two rows.
template <int registers>
__device__ __forceinline__ void add(float (&sums)[registers], const float (&part)[registers], int tokens,
                                    const RowScales& scales) {
  constexpr int kFew = 32;  // registers: 64 tokens
#pragma unroll
  for (int i = 0; i < kFew; i++) sums[i] = __fmaf_rn(part[i], i / 2 % 2 ? scales.high : scales.low, sums[i]);
  if (registers == kMaxSingle / 2 && tokens <= 2 * kFew) return;
#pragma unroll
  for (int i = kFew; i < registers; i++) sums[i] = __fmaf_rn(part[i], i / 2 % 2 ? scales.high : scales.low, sums[i]);
}

// The compiler takes an operand's registers for free once the instruction is issued; they are not until it is done.
__device__ __forceinline__ void keep(uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i / 4][i % 4]));
}

// A number that the compiler keeps in a register: it would read it again at each step, and wait.
__device__ __forceinline__ int kept(int value) {
  asm volatile("mov.b32 %0, %0;" : "+r"(value));
  return value;
}

// Steps of a tile, and the thread of a warpgroup that makes them.
struct Steps {
  int many, thread;
};

// All that warps have loaded of the stage has been used.
template <class Policy>
__device__ __forceinline__ void release(GemmShared<Policy>& shared, int stage, int thread) {
  if (thread % 32 == 0) barrier_arrive(shared_address(&shared.empty[stage]));
}

// `loaded`: a word of each load of the stage's scales that may be under way; see once_loaded.
template <class Policy>
__device__ __forceinline__ void release(GemmShared<Policy>& shared, int stage, int thread, uint32_t loaded) {
  __syncwarp();   // of all lanes
  const uint32_t empty = once_loaded(shared_address(&shared.empty[stage]), loaded);
  if (thread % 32 == 0) barrier_arrive(empty);
}

template <class P>
__device__ __forceinline__ uint64_t tokens_of_part(uint64_t tokens, const Span<P>& span, int i) {
  return tokens + i * span.tokens * (kTileK / 16);
}

// Scales that decoding has taken into the codes.
struct NoScales {};
template <int registers>
__device__ __forceinline__ void add(float (&sums)[registers], const float (&part)[registers], int tokens, NoScales) {
  add(sums, part, tokens);
}

template <class Codes>
__device__ __forceinline__ auto decode_step(const uint8_t* codes, const uint8_t* scales, int thread,
                                            uint32_t (&a)[4][4]) {
  if constexpr (Codes::kInt4) {
    return decode_int4_tile<Codes>(codes, scales, thread, a);
  } else {
    decode_tile<Codes>(codes, scales, thread, a);
    return NoScales{};
  }
}

// Packed: each thread decodes what it multiplies.
template <class P, class Policy>
__device__ __forceinline__ void multiply_decoded(Sums<P>& sums, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                                 int warpgroup, const Span<P>& span, const Steps& steps) {
  constexpr int parts = P::kMany;
  float part[Sums<P>::kRegisters] = {};
  for (int k = 0; k < steps.many; k++) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    uint32_t a[4][4];
    const auto scales = decode_step<typename Policy::Codes>(shared.weights[ring.slot] + warpgroup * kPackedBytes,
                                                            shared.scales[ring.slot] + warpgroup * Policy::kTileScales,
                                                            steps.thread, a);
    const uint64_t tokens = swizzled_operand(shared_address(shared.tokens[ring.slot]));
#pragma unroll
    for (int i = 0; i < parts; i++) {
      start(part, &a[0], tokens_of_part(tokens, span, i), span.index);
      wgmma_wait<0>();
      if (i == parts - 1) {
        keep(a);
        release(shared, ring.slot, steps.thread);
      }
      add(sums.v[i], part, span.tokens, scales);
    }
    ring.advance();
  }
}

// Packed, large experts: a main loop for each width of a tile, and what a warp can do only while it multiplies nothing
// made short. A step's codes are loaded before the step in front of it is started, their tables are made behind that,
// and they are decoded beside its additions.
template <int width, class Codes>
struct PackedKnown : PackedCodes<width, Codes> {};
template <int width>
using Known = PackedKnown<width, PackedNvfp4>;
template <int width>
using KnownMx = PackedKnown<width, PackedMxfp4>;

template <class Policy>
constexpr bool kKnowsWidths = false;
template <int width, class Codes>
constexpr bool kKnowsWidths<PackedKnown<width, Codes>> = true;

// What a thread has of a tile, as it lies in memory.
struct LoadedTile {
  uint32_t scales;
  uint4 codes[2];   // of the halves of K
};

// Of half 0: rows g and g + 8, of half 1.
struct TileTables {
  Table of[4];
};

// Once the stage has come.
template <class Policy>
__device__ __forceinline__ LoadedTile load_tile(const GemmShared<Policy>& shared, const Ring<Policy::kStages>& ring,
                                                int warpgroup, int thread) {
  barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
  const uint8_t* codes = shared.weights[ring.slot] + warpgroup * kPackedBytes + thread * 16;
  const uint8_t* scales = shared.scales[ring.slot] + warpgroup * Policy::kTileScales;
  LoadedTile tile;
  tile.scales = *reinterpret_cast<const uint32_t*>(scales + Policy::Codes::scales_of(thread));
  tile.codes[0] = *reinterpret_cast<const uint4*>(codes);
  tile.codes[1] = *reinterpret_cast<const uint4*>(codes + kPackedBytes / 2);
  return tile;
}

template <class Codes>
__device__ __forceinline__ TileTables tables_of(const LoadedTile& tile) {
  TileTables tables;
  make_tables<Codes>(tile.scales, tables.of);
  if (tile.scales & 0x80808080u) {
#pragma unroll
    for (int i = 0; i < 4; i++) tables.of[i] = rounded_table<Codes>(tile.scales >> 8 * i & 255);
  }
  __syncwarp();
  return tables;
}

__device__ __forceinline__ void decode(const LoadedTile& tile, const TileTables& tables, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 words = tile.codes[half];
    decode8(words.x, tables.of[2 * half], a[2 * half][0], a[2 * half][2]);
    decode8(words.y, tables.of[2 * half + 1], a[2 * half][1], a[2 * half][3]);
    decode8(words.z, tables.of[2 * half], a[2 * half + 1][0], a[2 * half + 1][2]);
    decode8(words.w, tables.of[2 * half + 1], a[2 * half + 1][1], a[2 * half + 1][3]);
  }
}

// The compiler must not read partial sums before they have been waited for.
template <int registers>
__device__ __forceinline__ void arrived(float (&part)[registers]) {
#pragma unroll
  for (int i = 0; i < registers; i++) asm volatile("" : "+f"(part[i])::"memory");
}

// `a` has the step's weights, and the next step's when this returns. width: of a part.
template <int width, bool last, class P, class Policy>
__device__ __forceinline__ void multiply_step(Sums<P>& sums, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                              int warpgroup, int thread, uint32_t (&a)[4][4]) {
  float part[width / 2];
  LoadedTile next;
  TileTables tables;
  const int slot = ring.slot;
  const uint64_t tokens = swizzled_operand(shared_address(shared.tokens[slot]));
  ring.advance();
  if (!last) next = load_tile(shared, ring, warpgroup, thread);
#pragma unroll
  for (int i = 0; i < P::kMany; i++) {
    KnownProduct<width>::start(part, &a[0], tokens + i * width * (kTileK / 16));
    if (i == 0 && !last) tables = tables_of<typename Policy::Codes>(next);
    wgmma_wait<0>();
    arrived(part);
    if (i + 1 == P::kMany) {
      keep(a);
      release(shared, slot, thread);
      if (!last) decode(next, tables, a);
    }
#pragma unroll
    for (int j = 0; j < width / 2; j++) sums.v[i][j] = __fadd_rn(sums.v[i][j], part[j]);
  }
}

template <int width, class P, class Policy>
__device__ __forceinline__ void multiply_known(Sums<P>& sums, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                               int warpgroup, const Steps& steps) {
  uint32_t a[4][4];
  const LoadedTile tile = load_tile(shared, ring, warpgroup, steps.thread);
  decode(tile, tables_of<typename Policy::Codes>(tile), a);
  for (int k = 1; k < steps.many; k++) multiply_step<width, false>(sums, shared, ring, warpgroup, steps.thread, a);
  multiply_step<width, true>(sums, shared, ring, warpgroup, steps.thread, a);
}

// Tokens of a part, by Span::index.
template <class P>
__host__ __device__ constexpr int known_width(int index) {
  if (P::kMany == 2) return 88 + 8 * index;
  return index < 6 ? 16 * (index + 1) : 104 + 8 * (index - 6);
}

// The main loop of the tile's width, looked for from `index` on.
template <int index, class P, class Policy>
__device__ __forceinline__ void multiply_width(Sums<P>& sums, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                               int warpgroup, const Span<P>& span, const Steps& steps) {
  constexpr int width = known_width<P>(index);
  if constexpr (width < P::kTokens) {
    if (span.index != index) {
      multiply_width<index + 1>(sums, shared, ring, warpgroup, span, steps);
      return;
    }
  }
  multiply_known<width>(sums, shared, ring, warpgroup, steps);
}

// Scales of a thread's two rows, of one 128 of K after another. Each lane has those of one step of the next 32, loaded
// 32 steps ahead: a load of what all lanes need would be waited for before the tensor cores start, at each step.
class BlockScales {
 public:
  // tile: of rows.
  __device__ __forceinline__ BlockScales(const GemmArgs& args, const Work& work, int tile, int many) : steps_(many) {
    const WeightScales& s = args.weight_scales;
    const int block = min(tile, args.row_tiles - 1) * (args.gated ? kTileRows / 2 : kTileRows) / 128;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      at_[h] = s.data + work.expert * s.expert + (args.gated ? h * s.half : 0) + block * s.row;
    }
    next_ = loaded(0);
  }

  // Of all lanes together, one k after another. same: .x for both.
  template <bool same>
  __device__ __forceinline__ float2 of(int k) {
    if (k % 32 == 0) {
      mine_ = next_;
      next_ = loaded(k + 32);
    }
    const float first = __shfl_sync(0xffffffffu, mine_.x, k % 32);
    return make_float2(first, same ? first : __shfl_sync(0xffffffffu, mine_.y, k % 32));
  }

 private:
  // This lane's, of the 32 steps from `first` on.
  __device__ __forceinline__ float2 loaded(int first) const {
    const int k = first + threadIdx.x % 32;
    return k < steps_ ? make_float2(__ldg(at_[0] + k), __ldg(at_[1] + k)) : make_float2(0.0f, 0.0f);
  }

  const float* at_[2];
  int steps_;
  float2 mine_, next_;
};

// groups: scales of the part's tokens; a word of each load of them is returned. same: both rows have weight.x.
template <bool same, int registers>
__device__ __forceinline__ uint32_t add_scaled(float (&sums)[registers], const float (&part)[registers], int tokens,
                                               const float* groups, float2 weight) {
  constexpr int kGroup = 16;   // registers: 32 tokens
  uint32_t loaded = 0;
#pragma unroll
  for (int first = 0; first < registers; first += kGroup) {
    if (first * 2 >= tokens) break;
#pragma unroll
    for (int i = first; i < first + kGroup && i < registers; i += 4) {
      const float2 token = *reinterpret_cast<const float2*>(groups + 2 * i + threadIdx.x % 4 * 2);
      loaded |= __float_as_uint(token.x);
      const float2 first = make_float2(__fmul_rn(weight.x, token.x), __fmul_rn(weight.x, token.y));
      const float2 second = same ? first : make_float2(__fmul_rn(weight.y, token.x), __fmul_rn(weight.y, token.y));
      sums[i] = __fmaf_rn(part[i], first.x, sums[i]);
      sums[i + 1] = __fmaf_rn(part[i + 1], first.y, sums[i + 1]);
      sums[i + 2] = __fmaf_rn(part[i + 2], second.x, sums[i + 2]);
      sums[i + 3] = __fmaf_rn(part[i + 3], second.y, sums[i + 3]);
    }
  }
  return loaded;
}

// Rows and Blocks: the tensor cores read weights where they lie. same: a thread's two rows have one scale, as they do
// but for gate and up.
template <bool same, class P, class Policy>
__device__ __forceinline__ void multiply_bytes(Sums<P>& sums, GemmShared<Policy>& shared, Ring<Policy::kStages>& ring,
                                               int warpgroup, const Span<P>& span, const Steps& steps,
                                               const GemmArgs& args, const Work& work) {
  constexpr int parts = P::kMany;
  float part[Sums<P>::kRegisters] = {};
  BlockScales scales(args, work, work.row_block * Policy::kBlockTiles + warpgroup, Policy::kGroups ? steps.many : 0);
  for (int k = 0; k < steps.many; k++) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    const uint64_t tokens = swizzled_operand(shared_address(shared.tokens[ring.slot]));
    const uint64_t weights = swizzled_operand(shared_address(shared.weights[ring.slot] + warpgroup * kFp8Bytes));
    float2 scale = make_float2(1.0f, 1.0f);
    uint32_t loaded = 0;
#pragma unroll
    for (int i = 0; i < parts; i++) {
      start(part, weights, tokens_of_part(tokens, span, i), span.index);
      if (Policy::kGroups && i == 0) scale = scales.template of<same>(k);
      wgmma_wait<0>();
      if (!Policy::kGroups && i == parts - 1) release(shared, ring.slot, steps.thread);
      if constexpr (Policy::kGroups) {
        loaded |= add_scaled<same>(sums.v[i], part, span.tokens, shared.groups[ring.slot] + i * span.tokens, scale);
      } else {
        add(sums.v[i], part, span.tokens);
      }
    }
    if (Policy::kGroups) release(shared, ring.slot, steps.thread, loaded);
    ring.advance();
  }
}

}  // namespace moeq::sm90::w4a8
