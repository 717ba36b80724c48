// Tokens and intermediate, rounded to e4m3 in shared memory: values of the codes as bfloat16, and behind a row its
// scale, or those of its groups of 128.
#pragma once
#include <cuda_fp16.h>

#include "decode_few_hidden.cuh"
#include "w4a8_round.cuh"

namespace moeq::sm90::few {

constexpr int kGroupK = 128;   // a warp's, four values of each lane

// The bfloat16 values of four e4m3 codes.
__device__ __forceinline__ uint2 values_of_codes(uint32_t codes) {
  uint32_t low, high;
  asm("{ .reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(low), "=r"(high)
      : "r"(codes));
  const float2 a = __half22float2(reinterpret_cast<const __half2&>(low));
  const float2 b = __half22float2(reinterpret_cast<const __half2&>(high));
  const __nv_bfloat162 first = __floats2bfloat162_rn(a.x, a.y), second = __floats2bfloat162_rn(b.x, b.y);
  return make_uint2(reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second));
}

__device__ __forceinline__ float amax_of_four(const float4& v) {
  return max_magnitude(max_magnitude(v.x, v.y), max_magnitude(v.z, v.w));
}

// Of a whole warp's; magnitudes have the order of their bits, NaN above all.
__device__ __forceinline__ uint32_t amax_of_warp(const float4& v) {
  return __reduce_max_sync(0xffffffffu, __float_as_uint(amax_of_four(v)));
}

// What values are divided by (`divide`) or multiplied with, and what products of their codes are multiplied with.
struct Rounding {
  float by, scale;
  bool divide;
};

__device__ __forceinline__ Rounding dynamic_rounding(uint32_t amax) {
  const float scale = w4a8::scale_of(__uint_as_float(amax));
  return {scale, scale, true};
}

__device__ __forceinline__ Rounding given_rounding(float gscale) { return {gscale, reciprocal(gscale), false}; }

// Not inlined: fetched once for the tokens and for the intermediate.
__device__ __noinline__ inline uint2 round_four(float4 v, Rounding rounding) {
  const uint32_t codes = w4a8::with_scaling(rounding.by, rounding.divide, [&](auto scaled) {
    return w4a8::encode4(scaled(v.x), scaled(v.y), scaled(v.z), scaled(v.w));
  });
  return values_of_codes(codes);
}

// A warp's group `group` of a row: four values of each lane, and the scale, if this group has one or is the row's
// first.
template <bool kGroups>
__device__ __forceinline__ void store_group(uint8_t* row, int scales_at, int group, const float4& v,
                                            const Rounding& rounding) {
  const int lane = lane_of_warp();
  reinterpret_cast<uint2*>(row)[group * (kGroupK / 4) + lane] = round_four(v, rounding);
  if (lane == 0 && (kGroups || group == 0)) {
    reinterpret_cast<float*>(row + scales_at)[kGroups ? group : 0] = rounding.scale;
  }
}

__device__ __forceinline__ float4 load_four(const uint8_t* row, int group) {
  const uint2 raw = reinterpret_cast<const uint2*>(row)[group * (kGroupK / 4) + lane_of_warp()];
  return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
                     __uint_as_float(raw.y & 0xffff0000u));
}

// The tokens, where they lie. All workers.
template <bool kGroups>
__device__ __forceinline__ void round_tokens(const Args& args, Fixed& fixed, uint8_t* x) {
  const int groups = args.k_tiles[0] / 2, all = args.p.tokens * groups;
  const bool dynamic = args.fp8.rounding[0] == ActScale::kToken, finds = !kGroups && dynamic;
#pragma unroll 1
  for (int pass = finds ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int at = threadIdx.x / 32; at < all; at += kWarps) {
      const int token = at / groups, group = at - token * groups;
      uint8_t* row = x + token * args.x_stride;
      const float4 v = load_four(row, group);
      const uint32_t amax = kGroups || pass == 0 ? amax_of_warp(v) : fixed.amax[token];
      if (pass == 0) {
        if (lane_of_warp() == 0) {
          atomicMax(&fixed.amax[token], amax);
        }
        continue;
      }
      const Rounding rounding = dynamic ? dynamic_rounding(amax) : given_rounding(args.fp8.gscale[0][0]);
      store_group<kGroups>(row, args.fp8.scales_at[0], group, v, rounding);
    }
    sync_workers();
  }
}

// Four columns of the intermediate as GEMM1's blocks have activated them; they may not be there yet.
struct FourColumns {
  Pair first, second;

  __device__ __forceinline__ float4 values() const { return make_float4(first.a(), first.b(), second.a(), second.b()); }
};

__device__ __forceinline__ const Pair* four_columns(const Args& args, uint32_t epoch, int slot, int group) {
  const int per_slot = args.row_tiles[0] * (kTileRows / 2);
  return sent_pairs(args, epoch) + (slot * per_slot + group * (kGroupK / 2) + 2 * lane_of_warp());
}

// The rows of one entry and part of K, by all helpers, each of which has groups of 128 values: their largest magnitudes
// (`finds`) or their values.
template <bool kGroups>
__device__ __forceinline__ void make_groups(const Args& args, Fixed& fixed, const Work& work, const Entry& entry,
                                            bool finds, uint8_t* h) {
  constexpr int kAtOnce = 2;
  const int begin = work.part * work.part_tiles / 2, end = min(begin + work.part_tiles / 2, args.k_tiles[1] / 2);
  const int groups = end - begin, all = entry.count * groups, helper = threadIdx.x / 32 - kFirstHelper;
  const bool dynamic = args.fp8.rounding[1] == ActScale::kToken;
  const uint32_t epoch = fixed.epoch;
#pragma unroll 1
  for (int start = helper; start < all; start += kAtOnce * kHelpers) {
    FourColumns columns[kAtOnce];
    const Pair* from[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = min(start + i * kHelpers, all - 1), column = at / groups;
      from[i] = four_columns(args, epoch, fixed.slots[entry.first + column], begin + at - column * groups);
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
      const float4 v = columns[i].values();
      const uint32_t amax = kGroups || finds ? amax_of_warp(v) : fixed.h_amax[column];
      if (finds) {
        if (lane_of_warp() == 0) {
          atomicMax(&fixed.h_amax[column], amax);
        }
        continue;
      }
      const float* gscale = args.fp8.gscale[1];
      const Rounding rounding =
          dynamic ? dynamic_rounding(amax)
                  : given_rounding(gscale[args.fp8.rounding[1] == ActScale::kExpert ? entry.expert : 0]);
      store_group<kGroups>(h + column * args.h_stride, args.fp8.scales_at[1], at - column * groups, v, rounding);
    }
  }
}

template <bool kGroups>
__device__ __forceinline__ void make_rounded_rows(const Args& args, Fixed& fixed, const Work& work, uint8_t* h) {
  const Entry entry = fixed.entries[work.entry];
  const bool finds = !kGroups && args.fp8.rounding[1] == ActScale::kToken;
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
