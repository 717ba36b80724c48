// The last step of a decode of very few tokens.
#pragma once
#include <cuda_fp16.h>

#include "decode_exchange.cuh"
#include "decode_few_shared.cuh"

namespace moeq::sm90::few {

__device__ __forceinline__ void store_two(const Problem& p, int64_t at, float a, float b) {
  if (p.out_type == OutType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(a, b);
  } else if (p.out_type == OutType::kBfloat16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + at) = __floats2bfloat162_rn(a, b);
  } else {
    *reinterpret_cast<__half2*>(static_cast<__half*>(p.out) + at) = __floats2half2_rn(a, b);
  }
}

// out[token] = sum over its slots, ascending, of weight * (alpha2 * sums + bias), in float32. Eight lanes have two rows
// of a token; each looks for the sums of every eighth part of a slot, and all add up what they have found.
template <Kind kKind>
__device__ __forceinline__ void combine(const Args& args, const Fixed& fixed) {
  constexpr int kLanes = 8;
  const Problem& p = args.p;
  const uint32_t epoch = fixed.epoch;
  const int per_token = p.hidden / 2, all = p.tokens * per_token, each = (all + gridDim.x - 1) / gridDim.x;
  const int per_slot = args.row_tiles[1] * (kTileRows / 2), parts = fixed.work[1].parts;
  const int part_bits = __ffs(parts) - 1, items = p.top_k * parts;
  const int begin = blockIdx.x * each, end = min(begin + each, all), mine = threadIdx.x % kLanes;
#pragma unroll 1
  for (int group = begin; group < end; group += kThreads / kLanes) {
    const int at = group + threadIdx.x / kLanes, pair_of_all = min(at, end - 1);
    const int token = pair_of_all / per_token, pair = pair_of_all - token * per_token, first = token * p.top_k;
    float sum[2] = {}, y[2] = {};
#pragma unroll 1
    for (int round = 0; round < items; round += kLanes) {
      const int item = round + mine, slot = first + (item >> part_bits), part = item & (parts - 1);
      Share share = {0.0f, 0.0f};
      float found[2] = {}, bias[2] = {};
      if (item < items && fixed.place[slot] != kForeign) {
        const Pair* from = sent_pairs(epoch) + args.outputs + (part * args.slots + slot) * per_slot + pair;
        Pair v = look(from);
        share = fixed.shares[slot];
        if (Case<kKind>::bias2(p)) {
          const int64_t expert = fixed.entries[fixed.place[slot]].expert;
          bias[0] = p.w2_bias[expert * p.hidden + 2 * pair];
          bias[1] = p.w2_bias[expert * p.hidden + 2 * pair + 1];
        }
        await(v, from, epoch);
        found[0] = v.a(), found[1] = v.b();
      }
#pragma unroll 2
      for (int i = 0; i < kLanes; ++i) {
        const bool opens = ((round + i) & (parts - 1)) == 0, closes = ((round + i + 1) & (parts - 1)) == 0;
        const float alpha = __shfl_sync(0xffffffffu, share.alpha, i, kLanes);
        const float weight = __shfl_sync(0xffffffffu, share.weight, i, kLanes);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float one = __shfl_sync(0xffffffffu, found[row], i, kLanes);
          const float offset = Case<kKind>::kGeneral ? __shfl_sync(0xffffffffu, bias[row], i, kLanes) : 0.0f;
          y[row] = opens ? one : y[row] + one;
          sum[row] = closes ? fmaf(weight, fmaf(y[row], alpha, offset), sum[row]) : sum[row];
        }
      }
    }
    if (mine == 0 && at < end) {
      store_two(p, static_cast<int64_t>(token) * p.hidden + 2 * pair, sum[0], sum[1]);
    }
  }
}

}  // namespace moeq::sm90::few
