// Tokens and intermediate, rounded to e4m3 in shared memory: values of the codes as bfloat16, and behind a row its
// scale, or those of its groups of 128. mxfp8's scales are in the values.
#pragma once
#include "decode_few_hidden.cuh"
#include "../numerics/e4m3_round.cuh"

namespace moeq::sm90::few {

constexpr int kGroupK = 128;   // a warp's, four values of each lane

__device__ __forceinline__ float amax_of_four(const float4& v) {
  return max_magnitude(max_magnitude(v.x, v.y), max_magnitude(v.z, v.w));
}

// Of a whole warp's; magnitudes have the order of their bits, NaN above all.
__device__ __forceinline__ uint32_t amax_of_warp(const float4& v) {
  return __reduce_max_sync(0xffffffffu, __float_as_uint(amax_of_four(v)));
}

// Of the eight lanes that have a block of mxfp8. All lanes.
__device__ __forceinline__ float amax_of_eight(const float4& v) {
  float amax = amax_of_four(v);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    amax = max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  }
  return amax;
}

// Not inlined: fetched once for the tokens and for the intermediate.
__device__ __noinline__ inline uint2 round_four(float4 v, Rounding rounding) {
  float values[4] = {v.x, v.y, v.z, v.w};
  round_to_e4m3(values, rounding);
  const __nv_bfloat162 first = __floats2bfloat162_rn(values[0], values[1]);
  const __nv_bfloat162 second = __floats2bfloat162_rn(values[2], values[3]);
  return make_uint2(reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second));
}

// A warp's group `group` of a row of `fours` times four values: four of each lane that is within, and the scale, if
// this group has one or is the row's first.
template <bool kGroups>
__device__ __forceinline__ void store_group(uint8_t* row, int scales_at, int group, int fours, const float4& v,
                                            const Rounding& rounding) {
  const int lane = lane_of_warp(), at = group * (kGroupK / 4) + lane;
  const uint2 rounded = round_four(v, rounding);
  if (at < fours) {
    reinterpret_cast<uint2*>(row)[at] = rounded;
  }
  if (lane == 0 && (kGroups || group == 0)) {
    reinterpret_cast<float*>(row + scales_at)[kGroups ? group : 0] = rounding.factor;
  }
}

// Zeros beyond the row's end.
__device__ __forceinline__ float4 load_four(const uint8_t* row, int group, int fours) {
  const int at = group * (kGroupK / 4) + lane_of_warp();
  const uint2 raw = at < fours ? reinterpret_cast<const uint2*>(row)[at] : make_uint2(0, 0);
  return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
                     __uint_as_float(raw.y & 0xffff0000u));
}

// What a row takes of so many tiles of 64 values, and groups that hold them.
constexpr int kTileFours = kTileK / 4;
__device__ __forceinline__ int groups_of(int tiles) { return (tiles + 1) / 2; }

// The tokens, where they lie. All workers.
template <bool kGroups>
__device__ __forceinline__ void round_tokens(const Args& args, Fixed& fixed, uint8_t* x) {
  const int fours = args.k_tiles[0] * kTileFours, groups = groups_of(args.k_tiles[0]), all = args.p.tokens * groups;
  const bool mx = !kGroups && args.mx, dynamic = args.fp8.rounding[0] == ActScale::kToken;
  const bool finds = !kGroups && dynamic && !mx;
#pragma unroll 1
  for (int pass = finds ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int at = threadIdx.x / 32; at < all; at += kWarps) {
      const int token = at / groups, group = at - token * groups;
      uint8_t* row = x + token * args.x_stride;
      const float4 v = load_four(row, group, fours);
      const uint32_t amax = kGroups || pass == 0 ? amax_of_warp(v) : fixed.amax[token];
      if (pass == 0) {
        if (lane_of_warp() == 0) {
          atomicMax(&fixed.amax[token], amax);
        }
        continue;
      }
      const Rounding rounding = mx        ? mx_rounding(amax_of_eight(v))
                                : dynamic ? dynamic_rounding(amax)
                                          : given_rounding(args.fp8.gscale[0][0]);
      store_group<kGroups>(row, args.fp8.scales_at[0], group, fours, v, rounding);
    }
    sync_workers();
  }
}

// Four columns of the intermediate as GEMM1's blocks have activated them; they may not be there yet.
struct FourColumns {
  Pair first, second;

  __device__ __forceinline__ float4 values() const { return make_float4(first.a(), first.b(), second.a(), second.b()); }
};

__device__ __forceinline__ const Pair* four_columns(const Args& args, uint32_t epoch, int slot, int four) {
  const int per_slot = args.row_tiles[0] * (kTileRows / 2);
  return sent_pairs(args, epoch) + (slot * per_slot + 2 * four);
}

// The rows of one entry and part of K, by all helpers, each of which has groups of 128 values: their largest magnitudes
// (`finds`) or their values.
template <bool kGroups>
__device__ __forceinline__ void make_groups(const Args& args, Fixed& fixed, const Work& work, const Entry& entry,
                                            bool finds, uint8_t* h) {
  constexpr int kAtOnce = 2;
  const int begin = work.part * work.part_tiles, tiles = min(work.part_tiles, args.k_tiles[1] - begin);
  const int fours = tiles * kTileFours, groups = groups_of(tiles), all = entry.count * groups;
  const int lane = lane_of_warp(), helper = threadIdx.x / 32 - kFirstHelper;
  const bool mx = !kGroups && args.mx, dynamic = args.fp8.rounding[1] == ActScale::kToken;
  const uint32_t epoch = fixed.epoch;
#pragma unroll 1
  for (int start = helper; start < all; start += kAtOnce * kHelpers) {
    FourColumns columns[kAtOnce];
    const Pair* from[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = min(start + i * kHelpers, all - 1), column = at / groups;
      const int four = min((at - column * groups) * (kGroupK / 4) + lane, fours - 1);
      from[i] = four_columns(args, epoch, fixed.slots[entry.first + column], begin * kTileFours + four);
      columns[i] = {look(from[i]), look(from[i] + 1)};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = start + i * kHelpers, column = at / groups;
      if (at >= all) {
        break;
      }
      await(columns[i].first, from[i], epoch);
      await(columns[i].second, from[i] + 1, epoch);
      __syncwarp();
      const int group = at - column * groups;
      const bool inside = group * (kGroupK / 4) + lane < fours;
      const float4 v = inside ? columns[i].values() : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const uint32_t amax = kGroups || finds ? amax_of_warp(v) : fixed.h_amax[column];
      if (finds) {
        if (lane_of_warp() == 0) {
          atomicMax(&fixed.h_amax[column], amax);
        }
        continue;
      }
      const float* gscale = args.fp8.gscale[1];
      const Rounding rounding =
          mx        ? mx_rounding(amax_of_eight(v))
          : dynamic ? dynamic_rounding(amax)
                    : given_rounding(gscale[args.fp8.rounding[1] == ActScale::kExpert ? entry.expert : 0]);
      store_group<kGroups>(h + column * args.h_stride, args.fp8.scales_at[1], group, fours, v, rounding);
    }
  }
}

template <bool kGroups>
__device__ __forceinline__ void make_rounded_rows(const Args& args, Fixed& fixed, const Work& work, uint8_t* h) {
  const Entry entry = fixed.entries[work.entry];
  const bool finds = !kGroups && args.fp8.rounding[1] == ActScale::kToken && !args.mx;
  if (finds) {
    make_groups<kGroups>(args, fixed, work, entry, true, h);
    sync_helpers();
  }
  make_groups<kGroups>(args, fixed, work, entry, false, h);
  if (finds) {
    sync_helpers();
    if (threadIdx.x % kHelperThreads < kColumns) {
      fixed.h_amax[threadIdx.x % kHelperThreads] = 0;
    }
    sync_helpers();
  }
}

}  // namespace moeq::sm90::few
