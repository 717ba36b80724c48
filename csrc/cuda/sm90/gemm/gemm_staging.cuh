// From accumulators to rows of a result, through shared memory: what all epilogues share.
//
// A warpgroup stages 64 results (16-bit, 128 bytes) of each token, its 16-byte pieces swizzled by the token.
#pragma once
#include "gemm_mainloop.cuh"
#include "../numerics/act_rounding.cuh"

namespace moeq::sm90 {

// In the place of the scales of blocks, where there are some: these come after the factors have been read, and have
// been read when the next tile's factors come.
template <class C>
__device__ __forceinline__ uint32_t factors_address(GemmShared<C>& shared, int warpgroup) {
  if constexpr (Sizes<C>::kHasBlocks) {
    static_assert(sizeof(shared.blocks[0]) >= C::kMaxWidth * sizeof(float));
    return shared_address(shared.blocks[warpgroup]);
  } else {
    return shared_address(shared.factors[warpgroup]);
  }
}

struct Staging {
  uint32_t address;
  uint32_t factors, biases;  // what the tile's end needs besides: see prefetch_factors, prefetch_biases
  int warpgroup, thread, warp, lane;
  float alpha[2];   // of the work at hand: see fetch_alphas
  int work_slot;    // where it is in the ring

  template <class C>
  __device__ Staging(GemmShared<C>& shared, int wg)
      : address(shared_address(shared.staging[wg])),
        factors(factors_address(shared, wg)),
        biases(shared_address(shared.biases[wg])),
        warpgroup(wg),
        thread(threadIdx.x % 128),
        warp(threadIdx.x % 128 / 32),
        lane(threadIdx.x % 32) {}

  // Where this lane's row of a store_transposed goes: its token among 8 is lane % 8.
  __device__ uint32_t row(int group, int piece) const {
    return address + (group * 8 + lane % 8) * 128 + (piece ^ lane % 8) * 16;
  }
  __device__ void synchronize() const { named_barrier(1 + warpgroup, 128); }
};

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

// The first of a warpgroup's tiles of 64 rows among those of the matrix.
template <class C>
__device__ __forceinline__ int first_tile(const Work& work, const Staging& s) {
  return (work.row_block * C::kConsumers + s.warpgroup) * C::kWarpgroupTiles;
}

__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// Before the multiplication, so that nobody waits for memory after it. The power of two that decoded weights lack is
// within: exact.
template <class Format>
__device__ __forceinline__ void fetch_alphas(const Problem& p, const Work& work, Staging& s) {
  const float* alphas = work.second ? p.g2_alphas : p.g1_alphas;
  const int count = work.second ? 1 : p.alphas13;
  if (alphas != nullptr) alphas += work.expert * count;
  s.alpha[0] = (alphas == nullptr ? 1.0f : alphas[0]) * Format::kAccumulatorScale;
  s.alpha[1] = (alphas == nullptr ? 1.0f : alphas[count - 1]) * Format::kAccumulatorScale;
}

// Whether the weights' layout leaves K in its own order.
template <class Format>
inline constexpr bool kKeepsOrder = false;

// Whether activations beside these weights may be rounded to fewer than 16 bits: beside all of 4 bits.
template <class Format>
inline constexpr bool kRounds = !kKeepsOrder<Format>;

// Whether a thread's two rows of 16 are neighbours, where they are not one of gate and one of up; else they are eight
// apart.
template <class Format>
inline constexpr bool kHasNeighbours = false;

// Where a thread's rows lie in a tile whose rows do not alternate.
template <class Format>
__device__ __forceinline__ int row_in_tile(const Staging& s, int half) {
  return s.warp * 16 + (kHasNeighbours<Format> ? s.lane / 4 * 2 + half : half * 8 + s.lane / 4);
}

// Staged rows of 64 intermediates -> h in that order, swizzled.
__device__ __forceinline__ void store_intermediate_in_order(const Work& work, const Staging& s, __nv_bfloat16* to) {
  const int piece = s.thread % 8;
  for (int row = s.thread / 8; row < work.rows; row += kRowsAPass) {
    const uint4 v = load_shared16(s.address + row * 128 + (piece ^ row % 8) * 16);
    *reinterpret_cast<uint4*>(to + row * kTileK + (piece ^ row % 8) * 8) = v;
  }
}

// Staged rows of 64 or 32 intermediates -> h, in the order in which GEMM2's fragments take them, swizzled. 32 are one
// half of each 16 bytes, the one that `column` says.
template <int columns>
__device__ __forceinline__ void store_intermediate_permuted(const Work& work, const Staging& s, __nv_bfloat16* to,
                                                            int column) {
  const int piece = s.thread % 8;                        // pairs piece + 8 * c of the 32 of a row
#pragma unroll 2
  for (int row = s.thread / 8; row < work.rows; row += kRowsAPass) {
    const uint32_t from = s.address + row * 128 + piece % 4 * 4;
    uint4 v;
    v.x = load_shared(from + ((0 + piece / 4) ^ row % 8) * 16);
    v.y = load_shared(from + ((2 + piece / 4) ^ row % 8) * 16);
    __nv_bfloat16* at = to + row * kTileK + (piece ^ row % 8) * 8;
    if constexpr (columns == kTileK / 2) {
      *reinterpret_cast<uint2*>(at + column % kTileK / 8) = make_uint2(v.x, v.y);
      continue;
    }
    v.z = load_shared(from + ((4 + piece / 4) ^ row % 8) * 16);
    v.w = load_shared(from + ((6 + piece / 4) ^ row % 8) * 16);
    *reinterpret_cast<uint4*>(at) = v;
  }
}

// Staged rows of so many intermediates, `column` and on, -> h.
template <class C, int columns>
__device__ __forceinline__ void store_intermediate(const GemmArgs& args, const Work& work, const Staging& s,
                                                   int column) {
  if (column >= args.inter_padded) return;
  __nv_bfloat16* to = args.h + (int64_t{column / kTileK} * args.rows + work.first_row) * kTileK;
  if constexpr (kKeepsOrder<typename C::Format>) {
    static_assert(columns == kTileK);
    store_intermediate_in_order(work, s, to);
  } else {
    store_intermediate_permuted<columns>(work, s, to, column);
  }
}

// Scales of a thread's two rows of a tile.
struct RowScales {
  float alpha[2], bias[2];
  __device__ __forceinline__ float of(float acc, int row, float factor) const {
    return __fmaf_rn(acc, alpha[row] * factor, bias[row]);
  }
};

// What a tile's end needs from memory is asked for before the multiplication: there nothing hides a load, which waits
// behind the multiprocessor's own copies for a microsecond and more. Known to a warpgroup after `copy_wait` and a
// synchronization, and read before the last one of the tile's end, as the next tile's takes its place.
__device__ __forceinline__ void prefetch_slots(const GemmArgs& args, const Work& work, const Staging& s, int* slots) {
  for (int row = s.thread; row < work.rows; row += 128) {
    copy4(shared_address(slots + row), args.schedule.slot_of_row + work.first_row + row);
  }
}

__device__ __forceinline__ void store_shared(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// What products of each row of tokens lack; null: nothing.
template <class C>
__device__ __forceinline__ void prefetch_factors(const float* factors, const Work& work, const Staging& s) {
  for (int row = s.thread; row < C::kMaxWidth; row += 128) {
    if (factors != nullptr && row < work.rows) {
      copy4(s.factors + row * 4, factors + work.first_row + row);
    } else {
      store_shared(s.factors + row * 4, 1.0f);
    }
  }
}

template <bool scaled>
__device__ __forceinline__ float factor_of(const Staging& s, int token) {
  return scaled ? __uint_as_float(load_shared(s.factors + token * 4)) : 1.0f;
}

__device__ __forceinline__ const float* biases_of(const Problem& p, const Work& work) {
  return work.second ? p.w2_bias : p.w13_bias;
}

// Those of a warpgroup's rows, in the order in which its threads have them: first rows, then second ones, of each warp.
template <class C>
__device__ __forceinline__ void prefetch_biases(const Problem& p, const Work& work, const Staging& s) {
  const float* biases = biases_of(p, work);
  if (biases == nullptr || s.thread >= C::kWarpgroupTiles * kTileRows) return;
  const bool gated = !work.second && p.gated;
  const int tile = first_tile<C>(work, s) + s.thread / kTileRows, rows = work.second ? p.hidden : p.inter;
  const int warp = s.thread % kTileRows / 16, half = s.thread / 8 % 2, g = s.thread % 8;
  const int of_pair = kHasNeighbours<typename C::Format> ? 2 * g + half : 8 * half + g;
  const int row = gated ? tile * 32 + warp * 8 + g : tile * kTileRows + warp * 16 + of_pair;
  const uint32_t to = s.biases + s.thread * 4;
  if (row < rows) {
    copy4(to, biases + (gated ? work.expert * int64_t{2} + half : int64_t{work.expert}) * rows + row);
  } else {
    store_shared(to, 0.0f);
  }
}

// Of a thread's first or second row of its warpgroup's tile m.
__device__ __forceinline__ float bias_of(const Problem& p, const Work& work, const Staging& s, int m, int half) {
  if (biases_of(p, work) == nullptr) return 0.0f;
  return __uint_as_float(load_shared(s.biases + (m * kTileRows + s.warp * 16 + half * 8 + s.lane / 4) * 4));
}

__device__ __forceinline__ float gscale_of_intermediate(const Problem& p, int expert) {
  return p.a2_gscale[p.a2 == ActScale::kExpert ? expert : 0];
}

template <Factors factors>
__device__ __forceinline__ uint32_t pack_16(float low, float high) {
  if constexpr (factors == Factors::kBfloat16) return pack_bf16(low, high);
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// 64 rows of a tile as 16-bit results into the staging, where a thread has neighbours: a word of each token.
template <class C, Factors factors>
__device__ __forceinline__ void stage_neighbours(const Work& work, const TileSums<C>& acc, const Staging& s) {
  const int piece = s.warp * 2 + s.lane / 16;
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const int token = s.lane % 4 * 2 + b;
      const uint32_t to = s.address + (group * 8 + token) * 128 + (piece ^ token) * 16 + s.lane / 4 % 4 * 4;
      const uint32_t both = pack_16<factors>(acc[group * 4 + b], acc[group * 4 + 2 + b]);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(both) : "memory");
    }
  }
}

// 64 rows of a tile as 16-bit results into the staging.
template <class C, Factors factors = Factors::kBfloat16>
__device__ __forceinline__ void stage_tile(const Work& work, const TileSums<C>& acc, const Staging& s) {
  if constexpr (kHasNeighbours<typename C::Format>) return stage_neighbours<C, factors>(work, acc, s);
  const uint32_t to = s.row(s.lane / 16, s.warp * 2 + s.lane / 8 % 2);
#pragma unroll
  for (int pair = 0; pair < C::kMaxWidth / 16; pair++) {
    if (pair * 16 >= work.width) break;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) packed[i] = pack_16<factors>(acc[pair * 8 + i * 2], acc[pair * 8 + i * 2 + 1]);
    store_transposed(to + pair * 2048, packed[0], packed[1], packed[2], packed[3]);
  }
}

// A thread's rows of one tile: acc = function(acc, half, token), half 0 for the first of its two rows (row_in_tile).
template <class C, class Function>
__device__ __forceinline__ void transform(const Work& work, TileSums<C>& acc, const Staging& s, Function function) {
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float& value = acc[group * 4 + i];
      value = function(value, i / 2, group * 8 + s.lane % 4 * 2 + i % 2);
    }
  }
}

// Whether neighbouring tokens of a tile may be the two parts of one (numerics/act_rounding.cuh).
template <class Format>
inline constexpr bool kMaySplit = kRounds<Format> && !kIsHalf<Format>;

// Of parts: both get the token's sums.
template <class C>
__device__ __forceinline__ void add_parts(const Work& work, TileSums<C>& acc) {
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
#pragma unroll
    for (int i = group * 4; i < group * 4 + 4; i += 2) {
      acc[i] += acc[i + 1];
      acc[i + 1] = acc[i];
    }
  }
}

// Of tokens' intermediates, which both parts have: the parts. gated: those of two rows are in the first two sums.
template <class C, bool gated>
__device__ __forceinline__ void make_parts(const Work& work, TileSums<C>& acc) {
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
#pragma unroll
    for (int i = group * 4; i < group * 4 + (gated ? 2 : 4); i += 2) {
      acc[i] = round_to_half(acc[i]);
      acc[i + 1] = rest_of_half(acc[i]);
    }
  }
}

// Maxima over the eight lanes that share lane % 4 of the magnitudes of 8 numbers each: number (lane / 4) is returned.
// Every exchange halves what is left.
__device__ __forceinline__ float maximum_of_lanes(const float (&x)[8], int lane) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const bool high = lane & 16;
    const float other = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 4], 16);
    four[i] = max_magnitude(fabsf(high ? x[i + 4] : x[i]), other);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const bool high = lane & 8;
    const float other = __shfl_xor_sync(0xffffffffu, high ? four[i] : four[i + 2], 8);
    two[i] = max_magnitude(high ? four[i + 2] : four[i], other);
  }
  const bool high = lane & 4;
  const float other = __shfl_xor_sync(0xffffffffu, high ? two[0] : two[1], 4);
  return max_magnitude(high ? two[1] : two[0], other);
}

// Intermediates that become e4m3 codes with a scale for each 128 of a token: a thread block's, of both warpgroups,
// where there are gates, else a warpgroup's.
template <class C>
struct GroupRounding {
  // Largest magnitudes, as bits: those of a piece of work at its place in the ring. They are cleared two pieces later,
  // when nobody reads them any more and nobody can be about to write them.
  uint32_t maxima[kWorkSlots][C::kConsumers][C::kMaxWidth];
  float2 scales[C::kConsumers][C::kMaxWidth];  // and their reciprocals; 0 where quotients are not made of those
};

template <class C>
__device__ __forceinline__ void synchronize_consumers() {
  named_barrier(1 + C::kConsumers, 128 * C::kConsumers);
}

// By all threads that multiply, before the first piece of work.
template <class C>
__device__ __forceinline__ void clear_maxima(GroupRounding<C>& rounding) {
  uint32_t* maxima = &rounding.maxima[0][0][0];
  for (int i = threadIdx.x; i < kWorkSlots * C::kConsumers * C::kMaxWidth; i += 128 * C::kConsumers) maxima[i] = 0;
}

// A thread's magnitudes of a token, of the rows of both its tiles. gated: what is no intermediate is left out.
template <class C, bool gated>
__device__ __forceinline__ float amax_of_token(const Accumulators<C>& acc, int group, int b) {
  float amax = 0.0f;
#pragma unroll
  for (int m = 0; m < C::kWarpgroupTiles; m++) {
    amax = max_magnitude(amax, acc[m][group * 4 + b]);
    if (!gated) amax = max_magnitude(amax, acc[m][group * 4 + 2 + b]);
  }
  return amax;
}

template <class C, bool gated>
__device__ __forceinline__ void find_maxima(uint32_t (&maxima)[C::kMaxWidth], const Work& work,
                                            const Accumulators<C>& acc, const Staging& s) {
#pragma unroll
  for (int first = 0; first < C::kMaxWidth / 8; first += 4) {
    if (first * 8 >= work.width) break;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int group = first + i / 2;
      x[i] = group < C::kMaxWidth / 8 ? amax_of_token<C, gated>(acc, group, i % 2) : 0.0f;
    }
    const int which = s.lane / 4, token = (first + which / 2) * 8 + s.lane % 4 * 2 + which % 2;
    const uint32_t largest = bits_of(maximum_of_lanes(x, s.lane));
    if (token < C::kMaxWidth) atomicMax(&maxima[token], largest);
  }
}

// Scales from maxima, for this warpgroup, and to memory, once for a group.
template <class C, bool gated>
__device__ __forceinline__ void make_scales(const GemmArgs& args, GroupRounding<C>& rounding, const Work& work,
                                            const Staging& s) {
  const int of_block = gated ? 0 : s.warpgroup;
  const int group = gated ? work.row_block : work.row_block * C::kConsumers + of_block;
  const bool stores = (!gated || s.warpgroup == 0) && group * 128 < args.inter_padded;
  const uint32_t (&maxima)[C::kMaxWidth] = rounding.maxima[s.work_slot][of_block];
  uint32_t (&cleared)[C::kMaxWidth] = rounding.maxima[(s.work_slot + 2) % kWorkSlots][s.warpgroup];
  for (int token = s.thread; token < C::kMaxWidth; token += 128) {
    cleared[token] = 0;
    if (token >= work.width) continue;
    const float scale = dynamic_rounding(maxima[token]).by;
    rounding.scales[s.warpgroup][token] = make_float2(scale, w4a8::has_reciprocal(scale) ? __frcp_rn(scale) : 0.0f);
    if (stores && token < work.rows) args.h_scale[int64_t{group} * args.rows + work.first_row + token] = scale;
  }
}

__device__ __forceinline__ float quotient_by(float x, float2 scale) {
  return scale.y == 0.0f ? __fdiv_rn(x, scale.x) : w4a8::quotient(x, scale.x, scale.y);
}

// The values of codes take the place of intermediates.
template <class C, bool gated>
__device__ __forceinline__ void round_groups(const GemmArgs& args, GroupRounding<C>& rounding, const Work& work,
                                             Accumulators<C>& acc, const Staging& s) {
  static_assert(C::kConsumers == 2 && C::kWarpgroupTiles == 2, "a block has 128 intermediates, or a warpgroup has");
  find_maxima<C, gated>(rounding.maxima[s.work_slot][gated ? 0 : s.warpgroup], work, acc, s);
  synchronize_consumers<C>();
  make_scales<C, gated>(args, rounding, work, s);
  s.synchronize();
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
    const int token = group * 8 + s.lane % 4 * 2;
    const float2 first = rounding.scales[s.warpgroup][token], second = rounding.scales[s.warpgroup][token + 1];
#pragma unroll
    for (int i = 0; i < (gated ? 1 : 2) * C::kWarpgroupTiles; i++) {
      float* values = acc[i % C::kWarpgroupTiles] + group * 4 + i / C::kWarpgroupTiles * 2;
      const float2 rounded = round_two_to_e4m3(quotient_by(values[0], first), quotient_by(values[1], second));
      values[0] = rounded.x;
      values[1] = rounded.y;
    }
  }
}

// Float32 results of a token, 32 at a time, through the staging: 128 bytes, swizzled like others.
__device__ __forceinline__ void stage_float(const Staging& s, int token, int column, float value) {
  store_shared(s.address + token * 128 + (column / 4 ^ token % 8) * 16 + column % 4 * 4, value);
}

// Half of a tile's rows, which two of the warps have.
template <class C>
__device__ __forceinline__ void stage_floats(const Work& work, const TileSums<C>& acc, const Staging& s) {
#pragma unroll
  for (int group = 0; group < C::kMaxWidth / 8; group++) {
    if (group * 8 >= work.width) break;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = row_in_tile<typename C::Format>(s, i / 2) % 32;
      stage_float(s, group * 8 + s.lane % 4 * 2 + i % 2, row, acc[group * 4 + i]);
    }
  }
}

// From the staging, 16 bytes a thread. place(row): where the 32 of a row are, of which `columns` are real. Of `each`
// rows the first one is stored.
template <class Place>
__device__ __forceinline__ void store_floats(const Work& work, const Staging& s, int columns, int each, Place place) {
  const int piece = s.thread % 8;
  if (piece * 4 >= columns) return;
  for (int row = s.thread / 8 * each; row < work.rows; row += kRowsAPass * each) {
    const uint4 v = load_shared16(s.address + row * 128 + (piece ^ row % 8) * 16);
    *reinterpret_cast<uint4*>(place(row) + piece * 4) = v;
  }
}

// All rows of a tile.
template <class C, class Place>
__device__ __forceinline__ void store_wide(const Work& work, const TileSums<C>& acc, const Staging& s, int columns,
                                           int each, Place place) {
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    if (half > 0) s.synchronize();  // nobody reads the staging any more
    if (s.warp / 2 == half) stage_floats<C>(work, acc, s);
    s.synchronize();
    store_floats(work, s, columns - half * 32, each, [&](int row) { return place(row) + half * 32; });
  }
}

}  // namespace moeq::sm90
