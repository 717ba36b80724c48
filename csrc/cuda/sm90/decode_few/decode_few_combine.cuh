// The last step of a decode of very few tokens.
#pragma once
#include <cuda_fp16.h>

#include "../decode/decode_exchange.cuh"
#include "decode_few_shared.cuh"

namespace moeq::sm90::few {

__device__ __forceinline__ void store_two(const Problem& p, int64_t at, float a, float b) {
  if (p.out_type == OutType::kBfloat16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + at) = __floats2bfloat162_rn(a, b);
  } else if (p.out_type == OutType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(a, b);
  } else {
    *reinterpret_cast<__half2*>(static_cast<__half*>(p.out) + at) = __floats2half2_rn(a, b);
  }
}

// Two rows of a slot: weight * (alpha2 * sums + bias), on the lane of the slot's first part; 0 on the others'.
template <Kind kKind, class Fixed>
__device__ __forceinline__ float2 find_output(const Args& args, const Fixed& fixed, int token, int pair, int item,
                                              uint32_t epoch) {
  const Problem& p = args.p;
  const int bits = fixed.work[1].part_bits, parts = 1 << bits, part = item & (parts - 1);
  const int slot = token * p.top_k + (item >> bits), per_slot = args.row_tiles[1] * (kTileRows / 2);
  const bool ours = item < p.top_k << bits && fixed.place[slot] != kForeign;
  Pair found = {};
  if (ours) {
    const Pair* from = sent_pairs(args, epoch) + (args.outputs + (part * args.slots + slot) * per_slot + pair);
    await(found, from, epoch);
  }
  float2 y = {found.a(), found.b()};
  for (int step = 1; step < parts; step *= 2) {
    y.x += __shfl_xor_sync(0xffffffffu, y.x, step);
    y.y += __shfl_xor_sync(0xffffffffu, y.y, step);
  }
  if (!ours || part != 0) {
    return {0.0f, 0.0f};
  }
  const float alpha = fixed.output_alphas[slot], weight = fixed.weights[slot];
  y.x *= alpha, y.y *= alpha;
  if (Case<kKind>::bias2(p)) {
    const float* of = p.w2_bias + static_cast<int64_t>(fixed.entries[fixed.place[slot]].expert) * p.hidden + 2 * pair;
    y.x += of[0], y.y += of[1];
  }
  return {y.x * weight, y.y * weight};
}

__device__ __forceinline__ int place_in_combine() {
  const int warp = threadIdx.x / 32, last = kFirstHelper + kHelpers - 1;
  return 32 * (warp > kCopier ? last - warp : last - 1 - warp) + lane_of_warp();
}

// out[token] = sum over its slots, ascending, of weight * (alpha2 * sums + bias), in float32. Eight lanes have two rows
// of a token; each looks for the sums of every eighth part of a slot, and all add up what they have found. All warps
// but the one that copies, the last first: helpers have the least to do.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void combine(const Args& args, const Fixed& fixed) {
  constexpr int kLanes = 8;
  const Problem& p = args.p;
  const int per_token = p.hidden / 2, all = p.tokens * per_token;
  const int each = quotient(all + gridDim.x - 1, args.inverse_grid);
  const int items = p.top_k << fixed.work[1].part_bits, thread = place_in_combine();
  const int begin = blockIdx.x * each, end = min(begin + each, all);
#pragma unroll 1
  for (int group = begin + (thread / 32) * (32 / kLanes); group < end; group += (kThreads + kHelperThreads) / kLanes) {
    const int at = group + thread % 32 / kLanes, pair_of_all = min(at, end - 1);
    const int token = quotient(pair_of_all, args.inverse_pairs), pair = pair_of_all - token * per_token;
    float2 sum = {0.0f, 0.0f};
#pragma unroll 1
    for (int round = 0; round < items; round += kLanes) {
      const float2 mine = find_output<kKind>(args, fixed, token, pair, round + thread % kLanes, fixed.epoch);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        sum.x += __shfl_sync(0xffffffffu, mine.x, i, kLanes);
        sum.y += __shfl_sync(0xffffffffu, mine.y, i, kLanes);
      }
    }
    if (thread % kLanes == 0 && at < end) {
      store_two(p, static_cast<int64_t>(token) * p.hidden + 2 * pair, sum.x, sum.y);
    }
  }
}

// The same of more tokens, most of whose slots may be another rank's, and whose units are not parted: two lanes have
// two rows of a token, each looks for the sums of four of its slots at once.
template <class Fixed>
__device__ __forceinline__ void combine_gathered(const Args& args, const Fixed& fixed) {
  constexpr int kLanes = 2, kAtOnce = 4;
  const Problem& p = args.p;
  const int per_token = p.hidden / 2, all = p.tokens * per_token, per_slot = args.row_tiles[1] * (kTileRows / 2);
  const int each = quotient(all + gridDim.x - 1, args.inverse_grid), thread = place_in_combine();
  const int begin = blockIdx.x * each, end = min(begin + each, all);
#pragma unroll 1
  for (int group = begin + (thread / 32) * (32 / kLanes); group < end; group += (kThreads + kHelperThreads) / kLanes) {
    const int at = group + thread % 32 / kLanes, pair_of_all = min(at, end - 1);
    const int token = quotient(pair_of_all, args.inverse_pairs), pair = pair_of_all - token * per_token;
    float2 sum = {0.0f, 0.0f};
#pragma unroll 1
    for (int round = 0; round < p.top_k; round += kLanes * kAtOnce) {
      const Pair* from[kAtOnce];
      Pair found[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = round + i * kLanes + thread % kLanes, slot = token * p.top_k + item;
        const bool ours = item < p.top_k && fixed.place[slot] != kForeign;
        from[i] = nullptr;
        found[i] = {};
        if (ours) {
          from[i] = sent_pairs(args, fixed.epoch) + (args.outputs + slot * per_slot + pair);
          found[i] = look(from[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float2 y = {0.0f, 0.0f};
        if (from[i] != nullptr) {
          const int slot = token * p.top_k + round + i * kLanes + thread % kLanes;
          await(found[i], from[i], fixed.epoch);
          const float alpha = fixed.output_alphas[slot], weight = fixed.weights[slot];
          y = {found[i].a() * alpha * weight, found[i].b() * alpha * weight};
        }
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          sum.x += __shfl_sync(0xffffffffu, y.x, lane, kLanes);
          sum.y += __shfl_sync(0xffffffffu, y.y, lane, kLanes);
        }
      }
    }
    if (thread % kLanes == 0 && at < end) {
      store_two(p, static_cast<int64_t>(token) * p.hidden + 2 * pair, sum.x, sum.y);
    }
  }
}

}  // namespace moeq::sm90::few
