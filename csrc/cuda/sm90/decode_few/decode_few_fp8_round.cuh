// Tokens and intermediate, rounded to e4m3 in shared memory: values of the codes as bfloat16 or float16, and behind a
// row its scale, or those of its groups of 128. mxfp8's scales are in the values.
#pragma once
#include "decode_few_hidden.cuh"
#include "../device/scans.cuh"
#include "../numerics/act_rounding.cuh"

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
__device__ __forceinline__ float amax_of_eight(const float4& v) { return amax_of_lanes<1, 8>(amax_of_four(v)); }

__device__ __forceinline__ uint32_t codes_of(const float4& v, const Rounding& rounding) {
  return w4a8::with_scaling(rounding.by, rounding.divide, [&](auto scaled) {
    return w4a8::encode4(scaled(v.x), scaled(v.y), scaled(v.z), scaled(v.w));
  });
}

__device__ __forceinline__ uint32_t codes_of_quotients(const float4& v, float by, float inverse) {
  const auto scaled = [=](float x) { return w4a8::quotient(x, by, inverse); };
  return w4a8::encode4(scaled(v.x), scaled(v.y), scaled(v.z), scaled(v.w));
}

__device__ __forceinline__ uint2 as_bf16(const float4& v, float within) {
  const __nv_bfloat162 first = __floats2bfloat162_rn(v.x * within, v.y * within);
  const __nv_bfloat162 second = __floats2bfloat162_rn(v.z * within, v.w * within);
  return make_uint2(reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second));
}

template <bool kHalf>
__device__ __forceinline__ uint2 values_of(uint32_t codes, float within) {
  if constexpr (kHalf) {   // of mxfp8's scales it would not hold all
    return decode4_to_half(codes);
  } else {
    return as_bf16(decode4(codes), within);
  }
}

// How an operand is rounded: to mxfp8; to e4m3 by scales of rows or groups, from largest magnitudes; or by a static
// scale.
struct HowToRound {
  bool mx, dynamic;
  float gscale;

  // `amax`, as bits: of what shares a scale.
  __device__ __forceinline__ Rounding of(const float4& v, uint32_t amax) const {
    return mx ? mx_rounding(amax_of_eight(v)) : dynamic ? dynamic_rounding(amax) : given_rounding(gscale);
  }
};

template <bool kGroups>
__device__ __forceinline__ HowToRound how_to_round(const Args& args, int gemm, int expert) {
  const bool mx = !kGroups && args.mx;
  const ActScale scale = gemm == 0 ? args.fp8.rounding[0] : args.fp8.rounding[1];
  const float* gscale = gemm == 0 ? args.fp8.gscale[0] : args.fp8.gscale[1];
  const bool dynamic = scale == ActScale::kToken;
  return {mx, dynamic, !mx && !dynamic ? gscale[scale == ActScale::kExpert ? expert : 0] : 0.0f};
}

// Twice four values, and the scales that they lack.
struct RoundedFours {
  uint2 values[2];
  float factors[2];
};

// All lanes. Two at a time, as each step waits for the one before. Not inlined: fetched once for the tokens and for the
// intermediate.
template <bool kHalf>
__device__ __noinline__ RoundedFours round_fours(HowToRound how, float4 a, uint32_t amax_a, float4 b, uint32_t amax_b) {
  const Rounding of_a = how.of(a, amax_a), of_b = how.of(b, amax_b);
  uint32_t codes[2];
  if (of_a.divide && w4a8::has_reciprocal(of_a.by) && w4a8::has_reciprocal(of_b.by)) {
    codes[0] = codes_of_quotients(a, of_a.by, __frcp_rn(of_a.by));
    codes[1] = codes_of_quotients(b, of_b.by, __frcp_rn(of_b.by));
  } else {
    codes[0] = codes_of(a, of_a);
    codes[1] = codes_of(b, of_b);
  }
  return {{values_of<kHalf>(codes[0], of_a.within), values_of<kHalf>(codes[1], of_b.within)},
          {of_a.factor, of_b.factor}};
}

// What rows of an operand have: `fours` times four values in groups of 128.
struct Groups {
  int fours, count;
  float inverse;   // of count
};

struct GroupPlace {
  int row, group;
};

__device__ __forceinline__ Groups groups_of(int tiles) {
  const int count = (tiles + 1) / 2;
  return {tiles * (kTileK / 4), count, __frcp_rn(static_cast<float>(count))};
}

__device__ __forceinline__ GroupPlace place_of(const Groups& groups, int at) {
  const int row = quotient(at, groups.inverse);
  return {row, at - row * groups.count};
}

// Which four values of its row a lane has.
__device__ __forceinline__ int four_of_lane(int group) { return group * (kGroupK / 4) + lane_of_warp(); }

// A lane's four values of a group, if they are within the row, and the scale, if this group has one or is the first.
template <bool kGroups>
__device__ __forceinline__ void store_group(uint8_t* row, int scales_at, int group, int fours, uint2 values,
                                            float factor) {
  const int at = four_of_lane(group);
  if (at < fours) {
    reinterpret_cast<uint2*>(row)[at] = values;
  }
  if (lane_of_warp() == 0 && (kGroups || group == 0)) {
    reinterpret_cast<float*>(row + scales_at)[kGroups ? group : 0] = factor;
  }
}

// Zeros beyond the row's end.
__device__ __forceinline__ float4 load_four(const uint8_t* row, int group, int fours, bool half) {
  const int at = four_of_lane(group);
  const uint2 raw = at < fours ? reinterpret_cast<const uint2*>(row)[at] : make_uint2(0, 0);
  const float2 first = widen_two(raw.x, half), second = widen_two(raw.y, half);
  return make_float4(first.x, first.y, second.x, second.y);
}

// The tokens that a block multiplies, a bit each: those of the entries of its units of GEMM1. All lanes.
__device__ __forceinline__ uint32_t tokens_of_block(const Args& args, const Fixed& fixed) {
  if (args.p.tokens == 1) {
    return 1;
  }
  const Work work = fixed.work[0];
  const int first = work.entry, last = first + quotient(work.row_tile + work.count - 1, args.inverse_row_tiles[0]);
  uint32_t tokens = 0;
#pragma unroll 1
  for (int start = 0; start < args.slots; start += 32) {
    const int slot = start + lane_of_warp(), entry = slot < args.slots ? static_cast<int>(fixed.place[slot]) : -1;
    const bool mine = work.count > 0 && entry >= first && entry <= last;   // kForeign is -1
    tokens |= __reduce_or_sync(0xffffffffu, mine ? 1u << quotient(slot, args.inverse_top_k) : 0);
  }
  return tokens;
}

// The `number`-th of the bits that are set. All lanes.
__device__ __forceinline__ int bit_of(uint32_t bits, int number) {
  const int lane = lane_of_warp();
  const bool is_it = (bits >> lane & 1) != 0 && __popc(bits & ((1u << lane) - 1)) == number;
  return __ffs(__ballot_sync(0xffffffffu, is_it)) - 1;
}

// So many rows of tokens, where they lie: row_of(number) is a row's place, and that of its largest magnitude. All
// workers: a warp has two groups at a time. from_half: tokens are float16.
template <bool kGroups, bool kHalf, class RowOf>
__device__ __forceinline__ void round_rows(const Args& args, uint8_t* x, int rows, bool from_half, uint32_t* maxima,
                                           RowOf row_of) {
  const Groups groups = groups_of(args.k_tiles[0]);
  const int all = rows * groups.count;
  const HowToRound how = how_to_round<kGroups>(args, 0, 0);
  const bool finds = !kGroups && how.dynamic && !how.mx;
#pragma unroll 1
  for (int pass = finds ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int first = threadIdx.x / 32; first < all; first += 2 * kWarps) {
      GroupPlace places[2];
      float4 v[2];
      uint32_t amax[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        places[i] = place_of(groups, first + i * kWarps);
        places[i].row = row_of(places[i].row);
        v[i] = {};
        if (i == 0 || first + i * kWarps < all) {
          v[i] = load_four(x + places[i].row * args.x_stride, places[i].group, groups.fours, from_half);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool exists = i == 0 || first + i * kWarps < all;
        amax[i] = kGroups || pass == 0 ? amax_of_warp(v[i]) : exists ? maxima[places[i].row] : 0;
        if (pass == 0 && exists && lane_of_warp() == 0) {
          atomicMax(maxima + places[i].row, amax[i]);
        }
      }
      if (pass == 0) {
        continue;
      }
      const RoundedFours rounded = round_fours<kHalf>(how, v[0], amax[0], v[1], amax[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 0 || first + i * kWarps < all) {
          store_group<kGroups>(x + places[i].row * args.x_stride, args.fp8.scales_at[0], places[i].group, groups.fours,
                               rounded.values[i], rounded.factors[i]);
        }
      }
    }
    sync_workers();
  }
}

// The tokens of this block.
template <bool kGroups, bool kHalf, Kind kKind>
__device__ __forceinline__ void round_tokens(const Args& args, Fixed& fixed, uint8_t* x) {
  const uint32_t tokens = tokens_of_block(args, fixed);
  round_rows<kGroups, kHalf>(args, x, __popc(tokens), Case<kKind>::half(args.p), fixed.amax,
                             [=](int row) { return bit_of(tokens, row); });
}

// The rows of an entry that were copied for it, the `run`-th operand of GEMM1. Maxima have three places, so that those
// of the next operand are cleared when nobody reads or writes them.
template <class Fixed>
__device__ __forceinline__ void round_gathered(const Args& args, Fixed& fixed, int count, int run, uint8_t* rows) {
  static_assert(kMaxima * kGatheredColumns <= kMaxTokensPacked, "there is room");
  if (threadIdx.x < kGatheredColumns) {
    fixed.amax[(run + 1) % kMaxima * kGatheredColumns + threadIdx.x] = 0;
  }
  round_rows<false, false>(args, rows, count, false, fixed.amax + run % kMaxima * kGatheredColumns,
                           [=](int row) { return min(row, count - 1); });
}

}  // namespace moeq::sm90::few
