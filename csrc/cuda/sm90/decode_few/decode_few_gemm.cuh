// What the multiplying warps of a decode of very few tokens do, for the helpers to finish.
#pragma once
#include "decode_few_feed.cuh"
#include "decode_few_fp8_round.cuh"
#include "../decode/decode_multiply.cuh"
#include "../formats/formats.cuh"

namespace moeq::sm90::few {

// A warp's sums: two blocks of 16 rows, 32 apart, each for up to eight tokens.
struct Sums {
  float v[2][4];
};

// Addresses of shared memory as numbers: a pointer's base is added at each use.
__device__ __forceinline__ uint4 load_16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

template <typename T>
__device__ __forceinline__ T load_scales(uint32_t at) {
  T value;
  if constexpr (sizeof(T) == 2) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(reinterpret_cast<uint16_t&>(value)) : "r"(at));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(reinterpret_cast<uint32_t&>(value)) : "r"(at));
  } else if constexpr (sizeof(T) == 16) {
    reinterpret_cast<uint4&>(value) = load_16(at);
  } else {
    static_assert(sizeof(T) == 8, "a word, half, two or four of them");
    uint2& both = reinterpret_cast<uint2&>(value);
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(both.x), "=r"(both.y) : "r"(at));
  }
  return value;
}

// Where a warp is in a GEMM's units. In two groups of warps, each of which takes every other unit, warps wait less for
// each other; in one, the last unit is done sooner.
struct Place {
  int groups, workers;      // workers: pairs of warps in a group
  int pair, group;          // this warp's
  int offset;               // of the next unit: warps that had one tile less come first
  int known;                // entry and part of K that `row` belongs to
  int count;                // of its slots
  int run, met;             // operands of GEMM2 so far, and those that have been waited for
  uint32_t row;             // this thread's token, an address of shared memory
  uint32_t scales[2];       // of e4m3 values: those of the tokens whose sums this thread has
  const float* factors;
};

// What a thread does with the stages of a unit.
template <class Format>
struct Multiplier {
  int at, scales_at;   // of this thread in a stage

  __device__ __forceinline__ explicit Multiplier(const Args& args)
      : at(threadIdx.x % 64 * 16),
        scales_at(args.stage_tiles * kTileCodeBytes + Format::scale_offset(threadIdx.x % 64)) {}

  template <Kind kKind, class Fixed>
  __device__ __forceinline__ void begin_unit(const Args&, const Fixed&, const Work&, int) {}
  __device__ __forceinline__ void expect_tile(int) {}
  __device__ __forceinline__ void finish_unit(const Place&, Sums&) const {}

  // This warp's share of a stage: 32 rows of tiles `first`, first + workers, ... Both blocks of rows multiply the same
  // tokens, which are read once for both.
  __device__ __forceinline__ void multiply(uint32_t stage, const Place& place, int, int done, int first, int tiles,
                                           Sums& sums) {
    using Word = typename Format::ScaleWord;
    const uint32_t codes = stage + at, scales = stage + scales_at, row = place.row + done * 128;
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += place.workers) {
      const uint32_t code_at = codes + tile * kTileCodeBytes;
      const uint32_t scale_at = scales + tile * Format::kTileScaleBytes;
      const uint4 code[2] = {load_16(code_at), load_16(code_at + kTileCodeBytes / 2)};
      const Word word[2] = {load_scales<Word>(scale_at), load_scales<Word>(scale_at + Format::kTileScaleBytes / 2)};
      const uint4 b0 = load_16(row + tile * 128);
      const typename Format::Scales scale[2] = {Format::scales(word[0]), Format::scales(word[1])};
      Sums unscaled = {};
      Sums& to = kScalesSums<Format> ? unscaled : sums;
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Format::decode(code[i].x, scale[i], a[i]);
        decode::multiply_add(to.v[i], a[i], b0.x, b0.y);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Format::decode(code[i].y, scale[i], a[i]);
        decode::multiply_add(to.v[i], a[i], b0.z, b0.w);
      }
      const uint4 b1 = load_16(row + tile * 128 + 16);   // late, for registers are few
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Format::decode(code[i].z, scale[i], a[i]);
        decode::multiply_add(to.v[i], a[i], b1.x, b1.y);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Format::decode(code[i].w, scale[i], a[i]);
        decode::multiply_add(to.v[i], a[i], b1.z, b1.w);
        if constexpr (kScalesSums<Format>) {
          decode::add_scaled(sums.v[i], to.v[i], Format::factors(word[i]));
        }
      }
    }
  }
};

// Sums are multiplied by the scales of the tokens that they are of.
template <class Weights>
struct Multiplier<BesideE4m3<Weights>> : Multiplier<Weights> {
  using Multiplier<Weights>::Multiplier;

  __device__ __forceinline__ void finish_unit(const Place& place, Sums& sums) const {
    const float x[2] = {load_scales<float>(place.scales[0]), load_scales<float>(place.scales[1])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums.v[i][j] *= x[j % 2];
      }
    }
  }
};

// A warp's sums of a unit, the `number`-th of this block, for the helpers. The two rows that a thread has of 16 are
// eight apart; in the layout of w4a8_layout.h they are neighbours, but for gate and up.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void leave_sums(const Args& args, Fixed& fixed, uint8_t* base, int gemm,
                                           const float* factors, int count, int number, int groups, Sums& sums) {
  const bool apart = !kIsOfW4a8<Format> || (gemm == 0 && Case<kKind>::gated(args.p));
  const int lane = lane_of_warp(), warp = threadIdx.x / 32, buffer = number % 2;
  barrier_wait(shared_address(&fixed.freed[buffer]), number / 2 % 2 ^ 1);
  const bool splits = Case<kKind>::splits(args.p);
  if (splits) {  // a thread's two columns are a token's two parts
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums.v[i][0] += sums.v[i][1];
      sums.v[i][2] += sums.v[i][3];
    }
  }
  const int column = splits ? lane % 4 : lane % 4 * 2;
  float* to = sums_of(args, base, buffer, (warp / 2) & (kWorkers / groups - 1), column) + warp % 2 * 16 +
              (apart ? lane / 4 : lane / 4 * 2);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (column + j < count && !(splits && j == 1)) {
      const float factor = Case<kKind>::dynamic_hidden(args.p) && factors != nullptr ? factors[column + j] : 1.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[j * kTileRows + 32 * i] = sums.v[i][j] * factor;
        to[j * kTileRows + 32 * i + (apart ? 8 : 1)] = sums.v[i][j + 2] * factor;
      }
    }
  }
  sums = {};
  __syncwarp();
  if (lane == 0) {
    barrier_arrive_times(shared_address(&fixed.summed[buffer]), groups);
  }
}

__device__ __forceinline__ Place begin_gemm(const Work& work) {
  Place place = {};
  place.groups = work.groups;
  place.workers = kWorkers / work.groups;
  place.pair = threadIdx.x / 64;
  place.group = work.groups == 1 ? 0 : place.pair / place.workers;
  place.known = -1;
  return place;
}

// Leaves out the stages of a unit that the other group multiplies.
__device__ __forceinline__ void skip_stages(const Args& args, const Work& work, int tiles, Turn& turn) {
#pragma unroll 1
  for (int k = 0; k < tiles; k += work.stage_tiles) {
    next_stage(turn, args.stages);
  }
}

// Where the tokens of this thread's sums have their scales; after `place.run` has counted the operand.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void find_scales(const Args& args, const Fixed& fixed, uint8_t* base, int gemm,
                                            const Work& work, const Entry& entry, Place& place) {
  // A part of GEMM1's K begins within its row of groups; GEMM2's operand is the part.
  const bool parted = kRoundsGroups<Format> && Case<kKind>::kShared && gemm == 0;
  const int begin = parted ? work.part * work.part_tiles / 2 * static_cast<int>(sizeof(float)) : 0;
  const int buffer = (place.run - 1) & (args.h_buffers - 1);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int column = min(lane_of_warp() % 4 * 2 + j, entry.count - 1);
    if (gemm == 0) {
      const int row = kGathers<Fixed> ? first_row(args, entry, place.run - 1) + column
                                      : quotient(fixed.slots[entry.first + column], args.inverse_top_k);
      place.scales[j] = args.x_offset + row * args.x_stride + args.fp8.scales_at[0];
    } else {
      place.scales[j] = args.h_offset + (buffer * args.columns + column) * args.h_stride + args.fp8.scales_at[1];
    }
    place.scales[j] += shared_address(base) + begin;
  }
}

// All rows of GEMM1 up to the last entry's, where rows are copied entry by entry.
template <class Fixed>
__device__ __forceinline__ void await_rows(const Fixed& fixed, Place& place) {
#pragma unroll 1
  for (; place.met < place.run; ++place.met) {
    barrier_wait(shared_address(&fixed.landed[place.met % 2]), place.met / 2 % 2);
  }
}

// This warp has no more to do with the last entry's rows. It has waited for all rows until now, so that no phase of
// `landed` can pass it. What it has written of rows that it rounds is written before others are copied to their place.
template <class Format, class Fixed>
__device__ __forceinline__ void leave_rows(const Fixed& fixed, Place& place) {
  await_rows(fixed, place);
  if constexpr (kRoundsToE4m3<Format>) {
    fence_async_proxy();
  }
  __syncwarp();
  if (lane_of_warp() == 0) {
    barrier_arrive(shared_address(&fixed.left[(place.run - 1) % 2]));
  }
}

// Whose token `place.row` is, if another entry or part of K comes.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void find_row(const Args& args, Fixed& fixed, uint8_t* base, int gemm, const Work& work,
                                         Place& place) {
  const int operand =
      Case<kKind>::kShared ? (work.entry << kMaxPartBits) + work.part : (work.entry << work.part_bits) + work.part;
  if (operand == place.known) {
    return;
  }
  if constexpr (kGathers<Fixed>) {
    if (gemm == 0 && place.run > 0) {
      leave_rows<Format>(fixed, place);
    }
  }
  place.known = operand;
  const Entry entry = fixed.entries[work.entry];
  const int lane = lane_of_warp();
  const bool splits = Case<kKind>::splits(args.p);
  const int each = splits ? 2 : 1;
  const int row = min(lane / 4, entry.count * each - 1);   // columns without a token repeat the last one
  const int column = splits ? row / 2 : row, part = splits ? row % 2 : 0;
  place.count = entry.count;
  if (kGathers<Fixed> && gemm == 0) {
    const int first = first_row(args, entry, place.run++);
    if constexpr (kGathers<Fixed> && kRoundsToE4m3<Format>) {
      await_rows(fixed, place);
      round_gathered(args, fixed, entry.count, place.run - 1, base + args.x_offset + first * args.x_stride);
    }
    place.row = shared_address(base) + args.x_offset + (first + column) * args.x_stride + lane % 4 * 32;
  } else if (gemm == 0) {
    const int token = quotient(fixed.slots[entry.first + column], args.inverse_top_k);
    const int begin = Case<kKind>::kShared ? work.part * work.part_tiles * (kTileK * 2) : 0;
    place.row = shared_address(base) + args.x_offset + (token * each + part) * args.x_stride + begin + lane % 4 * 32;
  } else {
    const int buffer = place.run++ & (args.h_buffers - 1);
    place.row =
        shared_address(base) + args.h_offset + (buffer * args.columns * each + row) * args.h_stride + lane % 4 * 32;
    place.factors = fixed.h_factor[buffer];
  }
  if constexpr (kRoundsToE4m3<Format>) {
    find_scales<Format, kKind>(args, fixed, base, gemm, work, entry, place);
  }
}

// All operands up to this one: a barrier's phases must not be skipped.
template <class Fixed>
__device__ __forceinline__ void await_operand(const Args& args, const Fixed& fixed, Place& place) {
  const int last = args.h_buffers - 1;
#pragma unroll 1
  for (; place.met < place.run; ++place.met) {
    barrier_wait(shared_address(&fixed.made[place.met & last]), place.met >> last & 1);
  }
}

// All units of one GEMM. `number` counts the block's units.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void run_gemm(const Args& args, Fixed& fixed, uint8_t* base, int gemm, Turn& turn,
                                         int& number) {
  const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
  const int k_tiles = gemm == 0 ? args.k_tiles[0] : args.k_tiles[1];
  const int stage_bytes = args.stage_tiles * kStageTileBytes<Format>;
  const uint32_t ring = shared_address(base) + args.ring_offset;
  const uint32_t full = shared_address(fixed.full), empty = shared_address(fixed.empty);
  Multiplier<Format> multiplier(args);
  Work work = first_unit<kKind>(fixed.work, gemm);
  Place place = begin_gemm(work);
  Sums sums = {};
#pragma unroll 1
  for (int unit = 0; unit < work.count; ++unit, ++number, next_unit<kKind>(fixed.work, work, row_tiles)) {
    const int begin = work.part * work.part_tiles, all = min(work.part_tiles, k_tiles - begin);
    find_row<Format, kKind>(args, fixed, base, gemm, work, place);
    if ((unit & (place.groups - 1)) != place.group) {
      skip_stages(args, work, all, turn);
      continue;
    }
    multiplier.template begin_unit<kKind>(args, fixed, work, gemm);
    multiplier.expect_tile(begin);  // before what else is waited for
    if (gemm == 1) {
      await_operand(args, fixed, place);
    } else if constexpr (kGathers<Fixed>) {
      await_rows(fixed, place);
    }
#pragma unroll 1
    for (int done = 0; done < all; done += work.stage_tiles) {
      const int first = (place.pair - done - place.offset) & (place.workers - 1);
      const int tiles = min(work.stage_tiles, all - done);
      if (first < tiles) {
        multiplier.expect_tile(begin + done + first);
      }
      if (place.groups > 1 && (!Case<kKind>::kShared || turn.number >= args.stages)) {
        await_announcement(fixed, turn.number);
      }
      barrier_wait(full + 8 * turn.stage, turn.parity);
      multiplier.multiply(ring + turn.stage * stage_bytes, place, begin, done, first, tiles, sums);
      __syncwarp();
      if (lane_of_warp() == 0) {
        barrier_arrive_times(empty + 8 * turn.stage, place.groups);
      }
      next_stage(turn, args.stages);
    }
    multiplier.finish_unit(place, sums);
    leave_sums<Format, kKind>(args, fixed, base, gemm, place.factors, place.count, number, place.groups, sums);
    place.offset += all;
  }
}

}  // namespace moeq::sm90::few
