// The intermediate as GEMM2's operand, rounded to e4m3 by the helping warps, which read it as GEMM1's blocks have
// activated it.
#pragma once
#include "decode_few_fp8_round.cuh"

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

// The rows of one entry and part of K, the `run`-th operand. All helpers. A scale of a row needs all of it before it
// can be rounded: values stay where they are meanwhile, if they are few. Maxima have three places, so that those of the
// next operand are cleared when nobody reads or writes them.
template <bool kGroups, bool kHalf>
__device__ __forceinline__ void make_rounded_rows(const Args& args, Fixed& fixed, const Work& work, int run,
                                                  uint8_t* h) {
  const Entry entry = fixed.entries[work.entry];
  const HiddenRows rows = hidden_rows(args, work, entry);
  const HowToRound how = how_to_round<kGroups>(args, 1, entry.expert);
  const bool finds = !kGroups && how.dynamic && !how.mx, few = rows.all <= kGroupsAtOnce * kHelpers;
  const int helper = threadIdx.x / 32 - kFirstHelper;
  uint32_t* maxima = fixed.h_amax[run % kMaxima];
  if (finds && threadIdx.x % kHelperThreads < kColumns) {
    fixed.h_amax[(run + 1) % kMaxima][threadIdx.x % kHelperThreads] = 0;
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

}  // namespace moeq::sm90::few
