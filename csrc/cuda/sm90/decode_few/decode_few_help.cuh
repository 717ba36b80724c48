// What the helping warps do: they add up what the multiplying warps leave of a unit and send it, and between the GEMMs
// they make what GEMM2 multiplies.
#pragma once
#include "decode_few_fp8_round.cuh"
#include "decode_few_hidden.cuh"

namespace moeq::sm90::few {

// Four columns of the intermediate; they may not be there yet.
struct FourColumns {
  Pair first, second;

  __device__ __forceinline__ void look_at(const Pair* from) {
    first = look(from);
    second = look(from + 1);
  }
  // Looks at one of them at a time: others' weights come through the same L2.
  __device__ __forceinline__ void await(const Pair* from, uint32_t epoch) {
    BoundedWait wait;
    while (!(first.has(epoch) && second.has(epoch))) {
      (second.has(epoch) ? first : second) = look(from + (second.has(epoch) ? 0 : 1));
      check_wait(wait);
    }
  }

  __device__ __forceinline__ float4 values() const { return make_float4(first.a(), first.b(), second.a(), second.b()); }
};

// Whether a row's scale is that of its largest magnitude and K is cut, so that who rounds a part does not see the row:
// GEMM1's blocks send the largest magnitudes that they have then.
template <class Format>
__device__ __forceinline__ bool exchanges_maxima(const Args& args, const Work& work) {
  return kCutsRows<Format> && !args.mx && args.fp8.rounding[1] == ActScale::kToken && work.part_bits > 0;
}

// Those of a slot's row, of each row tile of GEMM1, behind all else in the exchange.
template <Kind kKind>
__device__ __forceinline__ uint64_t* maxima_of(const Args& args, uint32_t epoch, int slot) {
  const int first = args.partials + (Case<kKind>::kShared ? static_cast<int>(gridDim.x) * (kTileRows / 2) : 0);
  return reinterpret_cast<uint64_t*>(half_of(args, epoch) + first) + slot * args.row_tiles[0];
}

// The largest one, as soon as all are there. All lanes.
template <Kind kKind>
__device__ __forceinline__ uint32_t await_maximum(const Args& args, uint32_t epoch, int slot) {
  const uint64_t* from = maxima_of<kKind>(args, epoch, slot);
  uint32_t amax = 0;
#pragma unroll 1
  for (int tile = lane_of_warp(); tile < args.row_tiles[0]; tile += 32) {
    BoundedWait wait;
    uint64_t found = look_at_word(from + tile);
    while (static_cast<uint32_t>(found >> 32) != epoch) {
      found = look_at_word(from + tile);
      check_wait(wait);
    }
    amax = max(amax, static_cast<uint32_t>(found));
  }
  return __reduce_max_sync(0xffffffffu, amax);
}

// The rows of one entry and part of K.
struct HiddenRows {
  Groups groups;
  int begin, all;   // the part's first four columns; groups of all rows
  int first_slot;
};

constexpr int kGroupsAtOnce = 2;   // of a helper, each seventh

__device__ __forceinline__ HiddenRows hidden_rows(const Args& args, const Work& work, const Entry& entry) {
  const int begin = work.part * work.part_tiles;
  const Groups groups = groups_of(min(work.part_tiles, args.k_tiles[1] - begin));
  return {groups, begin * (kTileK / 4), entry.count * groups.count, entry.first};
}

// A lane's four values of groups `first`, first + kHelpers, ...; zeros beyond the rows' ends.
template <class Fixed>
__device__ __forceinline__ void await_groups(const Args& args, const Fixed& fixed, const HiddenRows& rows, int first,
                                             float4 (&v)[kGroupsAtOnce]) {
  FourColumns columns[kGroupsAtOnce];
  int from[kGroupsAtOnce];   // -1: nothing
  const uint32_t epoch = fixed.epoch;
  const Pair* sent = sent_pairs(args, epoch);
#pragma unroll
  for (int i = 0; i < kGroupsAtOnce; ++i) {
    from[i] = -1;
    if (first + i * kHelpers < rows.all) {
      const GroupPlace place = place_of(rows.groups, first + i * kHelpers);
      const int four = four_of_lane(place.group);
      if (four < rows.groups.fours) {
        const int slot = fixed.slots[rows.first_slot + place.row];
        from[i] = slot * args.row_tiles[0] * (kTileRows / 2) + 2 * (rows.begin + four);
        columns[i].look_at(sent + from[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kGroupsAtOnce; ++i) {
    v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (from[i] >= 0) {
      columns[i].await(sent + from[i], epoch);
      v[i] = columns[i].values();
    }
  }
  __syncwarp();
}

// The largest magnitudes of groups as await_groups gives them, to those of their rows.
__device__ __forceinline__ void find_maxima(const HiddenRows& rows, int first, const float4 (&v)[kGroupsAtOnce],
                                            uint32_t* maxima) {
#pragma unroll
  for (int i = 0; i < kGroupsAtOnce; ++i) {
    if (first + i * kHelpers < rows.all) {
      const uint32_t amax = amax_of_warp(v[i]);
      if (lane_of_warp() == 0) {
        atomicMax(maxima + place_of(rows.groups, first + i * kHelpers).row, amax);
      }
    }
  }
}

template <bool kGroups, bool kHalf>
__device__ __forceinline__ void round_groups(const Args& args, const HiddenRows& rows, const HowToRound& how, int first,
                                             const float4 (&v)[kGroupsAtOnce], const uint32_t* maxima, uint8_t* h) {
#pragma unroll
  for (int i = 0; i < kGroupsAtOnce && first + i * kHelpers < rows.all; i += 2) {
    GroupPlace places[2];
    float4 four[2] = {};
    uint32_t amax[2] = {};
    bool exists[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = first + (i + j) * kHelpers;
      exists[j] = i + j < kGroupsAtOnce && at < rows.all;
      if (exists[j]) {
        places[j] = place_of(rows.groups, at);
        four[j] = v[i + j < kGroupsAtOnce ? i + j : 0];
        amax[j] = kGroups ? amax_of_warp(four[j]) : maxima[places[j].row];
      }
    }
    const RoundedFours rounded = round_fours<kHalf>(how, four[0], amax[0], four[1], amax[1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (exists[j]) {
        store_group<kGroups>(h + places[j].row * args.h_stride, args.fp8.scales_at[1], places[j].group,
                             rows.groups.fours, rounded.values[j], rounded.factors[j]);
      }
    }
  }
}

// The largest magnitudes of rows of which the block has a part, to where those of whole rows are. All helpers.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void await_maxima(const Args& args, const Fixed& fixed, const Entry& entry,
                                             uint32_t* maxima) {
#pragma unroll 1
  for (int row = threadIdx.x / 32 - kFirstHelper; row < entry.count; row += kHelpers) {
    const uint32_t amax = await_maximum<kKind>(args, fixed.epoch, fixed.slots[entry.first + row]);
    if (lane_of_warp() == 0) {
      maxima[row] = amax;
    }
  }
}

// The rows of one entry and part of K, the `run`-th operand. All helpers. A scale of a row needs all of it before it
// can be rounded: values stay where they are meanwhile, if they are few. Maxima have three places, so that those of the
// next operand are cleared when nobody reads or writes them.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void make_rounded_rows(const Args& args, Fixed& fixed, const Work& work, int run,
                                                  uint8_t* h) {
  constexpr bool kGroups = kRoundsGroups<Format>, kHalf = kInHalf<Format>;
  const Entry entry = fixed.entries[work.entry];
  const HiddenRows rows = hidden_rows(args, work, entry);
  const HowToRound how = how_to_round<kGroups>(args, 1, entry.expert);
  const bool apart = exchanges_maxima<Format>(args, work);
  const bool finds = !kGroups && how.dynamic && !how.mx && !apart, few = rows.all <= kGroupsAtOnce * kHelpers;
  const int helper = threadIdx.x / 32 - kFirstHelper;
  uint32_t* maxima = fixed.h_amax[run % kMaxima];
  if (finds && threadIdx.x % kHelperThreads < kColumns) {
    fixed.h_amax[(run + 1) % kMaxima][threadIdx.x % kHelperThreads] = 0;
  }
  if (apart) {
    await_maxima<kKind>(args, fixed, entry, maxima);
    sync_helpers();
  }
  float4 v[kGroupsAtOnce];
#pragma unroll 1
  for (int pass = finds ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int first = helper; first < rows.all; first += kGroupsAtOnce * kHelpers) {
      if (pass == 0 || !finds || !few) {
        await_groups(args, fixed, rows, first, v);
      }
      if (pass == 0) {
        find_maxima(rows, first, v, maxima);
      } else {
        round_groups<kGroups, kHalf>(args, rows, how, first, v, maxima, h);
      }
    }
    if (pass == 0) {
      sync_helpers();
    }
  }
}

// What the helping warps do: they add up what the multiplying warps leave of a unit and send it, and between the GEMMs
// they make what GEMM2 multiplies.

// A warp's row pairs of a whole unit of GEMM1 -> two values of the intermediate: on every lane where not gated, else on
// those that hold gate rows. What is rounded to e4m3 is sent as it is: 128 columns are more than a unit has.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void send_hidden(const Args& args, const Fixed& fixed, const Entry& entry, int entry_number,
                                            int slot, int row_tile, float2 sums) {
  const Problem& p = args.p;
  const int lane = threadIdx.x % 32;
  const bool is_up = Case<kKind>::gated(p) && lane % 8 >= 4;
  const int pair =
      Case<kKind>::gated(p) ? row_tile * (kTileRows / 4) + lane / 8 * 4 + lane % 4 : row_tile * (kTileRows / 2) + lane;
  const float2 alphas = fixed.alphas[entry_number];
  const float alpha = (is_up ? alphas.y : alphas.x) * args.scale;
  float2 v = {sums.x * alpha, sums.y * alpha};
  const bool inside = 2 * pair < p.inter;
  if (Case<kKind>::bias13(p) && inside) {
    const int64_t rows = (Case<kKind>::gated(p) ? 2 : 1) * static_cast<int64_t>(p.inter);
    const float* of = p.w13_bias + entry.expert * rows + 2 * pair + (is_up ? p.inter : 0);
    v.x += of[0], v.y += of[1];
  }
  float2 up = v;
  if (Case<kKind>::gated(p)) {
    up.x = __shfl_xor_sync(0xffffffffu, v.x, 4);
    up.y = __shfl_xor_sync(0xffffffffu, v.y, 4);
  }
  Two h = {activate_few<kKind>(p, v.x, up.x), activate_few<kKind>(p, v.y, up.y)};
  if (Case<kKind>::quantizes_hidden(p)) {
    h = quantize_pair(h, p.a2_gscale[p.a2 == ActScale::kExpert ? entry.expert : 0], Case<kKind>::gated(p));
  }
  if (inside && !is_up) {
    const int pairs = hidden_pairs_of_tile(kKind, kRoundsToE4m3<Format>);
    const int64_t line = static_cast<int64_t>(slot) * args.row_tiles[0] * (2 * pairs);
    if constexpr (kRoundsToE4m3<Format>) {
      send_pair(args, line / 2 + pair, h.a, h.b, fixed.epoch);
    } else {
      send_rounded(args, line + pair, h.a, h.b, fixed.epoch, Case<kKind>::splits(p));
    }
  }
  if constexpr (kCutsRows<Format>) {
    if (exchanges_maxima<Format>(args, fixed.work[1])) {
      const float largest = inside && !is_up ? max_magnitude(h.a, h.b) : 0.0f;
      const uint32_t amax = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      if (lane == 0) {
        send_word(maxima_of<kKind>(args, fixed.epoch, slot) + row_tile, amax, fixed.epoch);
      }
    }
  }
}

// Where a block's sums of a unit that it shares are exchanged: one token's.
__device__ __forceinline__ int partials_of(const Args& args, int block) {
  return args.partials + block * (kTileRows / 2) + lane_of_warp();
}

// Of a unit that blocks share, by the block that has its first part: the sums of all parts, in their order.
template <class Fixed>
__device__ __forceinline__ float2 add_partials(const Args& args, const Fixed& fixed, int parts, float2 sums) {
#pragma unroll 1
  for (int part = 1; part < parts; ++part) {
    const Pair* from = sent_pairs(args, fixed.epoch) + partials_of(args, blockIdx.x + part);
    Pair found = look(from);
    await(found, from, fixed.epoch);
    sums.x += found.a(), sums.y += found.b();
  }
  return sums;
}

// Adds up what the warps left of a unit, the `number`-th of this block, and sends it. Each helper takes every seventh
// column; where there is one, every seventh unit.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void finish_unit(const Args& args, Fixed& fixed, uint8_t* base, const Work& work, int gemm,
                                            bool whole, int number) {
  const int lane = lane_of_warp(), buffer = number % 2;
  const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
  const Entry entry = fixed.entries[work.entry];
  const int groups = work.groups;
  barrier_wait(shared_address(&fixed.summed[buffer]), number / 2 % 2);
  const int helper = threadIdx.x / 32 - kFirstHelper;
#pragma unroll 1
  for (int column = Case<kKind>::kShared ? (helper + number) % kHelpers : helper; column < entry.count;
       column += kHelpers) {
    float2 all = {0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kWorkers; ++w) {
      if (w < kWorkers / 2 || groups == 1) {
        const float2 one = *reinterpret_cast<const float2*>(sums_of(args, base, buffer, w, column) + 2 * lane);
        all.x += one.x, all.y += one.y;
      }
    }
    const int slot = fixed.slots[entry.first + column];
    if (Case<kKind>::kShared && work.part_bits < 0) {
      if (work.part > 0) {
        send_pair(args, partials_of(args, blockIdx.x), all.x, all.y, fixed.epoch);
        continue;
      }
      all = add_partials(args, fixed, 1 << -work.part_bits, all);
    }
    if (whole) {
      send_hidden<Format, kKind>(args, fixed, entry, work.entry, slot, work.row_tile, all);
    } else {
      const int line = work.part * args.slots + slot;
      send_pair(args, (gemm == 0 ? 0 : args.outputs) + (line * row_tiles + work.row_tile) * (kTileRows / 2) + lane,
                all.x, all.y, fixed.epoch);
    }
  }
  __syncwarp();
  if (lane == 0) {
    barrier_arrive(shared_address(&fixed.freed[buffer]));
  }
}

// The units of an entry and part of K from here on, and the work behind them.
__device__ __forceinline__ int units_of_run(const Args& args, const Work& work) {
  return min(work.count, args.row_tiles[1] - work.row_tile);
}

__device__ __forceinline__ void next_run(const Args& args, Work& work) {
  work.count -= units_of_run(args, work);
  work.row_tile = args.row_tiles[1] - 1;
  next_unit(work, args.row_tiles[1]);
}

// All units of both GEMMs; of GEMM2 the operand of an entry and part of K, then the units of those before it, where
// there are two buffers. A buffer is made again when all units that multiplied it are finished.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void help(const Args& args, Fixed& fixed, uint8_t* base) {
  int number = 0;
  const bool whole = finishes_hidden<kKind>(args.p);
  Work first = first_unit<kKind>(fixed.work, 0);
#pragma unroll 1
  for (; first.count > 0; --first.count) {
    finish_unit<Format, kKind>(args, fixed, base, first, 0, whole, number++);
    next_unit<kKind>(fixed.work, first, args.row_tiles[0]);
  }
  Work making = fixed.work[1], work = making;
  const int last = args.h_buffers - 1;
#pragma unroll 1
  for (int run = 0; work.count > 0; ++run) {
    if (making.count > 0) {
      const int buffer = run & last;
      uint8_t* h = base + args.h_offset + buffer * args.columns * args.each * args.h_stride;
      if constexpr (kRoundsToE4m3<Format>) {
        make_rounded_rows<Format, kKind>(args, fixed, making, run, h);
      } else {
        make_rows<kKind>(args, fixed, making, buffer, h);
      }
      __syncwarp();
      if (lane_of_warp() == 0) {
        barrier_arrive(shared_address(&fixed.made[buffer]));
      }
      next_run(args, making);
    }
    if (run < last) {
      continue;
    }
#pragma unroll 1
    for (int units = units_of_run(args, work); units > 0; --units) {
      finish_unit<Format, kKind>(args, fixed, base, work, 1, false, number++);
      --work.count;
      next_unit(work, args.row_tiles[1]);
    }
  }
}

}  // namespace moeq::sm90::few
