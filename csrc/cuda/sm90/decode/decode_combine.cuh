// The last step: out[token] = sum over its slots, ascending, of weight * (alpha2 * sums + bias), in float32.
#pragma once
#include "decode_gemm.cuh"

#include <cuda_fp16.h>

namespace moeq::sm90::decode {

// `at` is a multiple of 4.
__device__ __forceinline__ void store_output(const Problem& p, int64_t at, const float (&v)[4]) {
  if (p.out_type == OutType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(v[0], v[1], v[2], v[3]);
  } else if (p.out_type == OutType::kBfloat16) {
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v[0], v[1]), __floats2bfloat162_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.out) + at) = *reinterpret_cast<uint2*>(pairs);
  } else {
    __half2 pairs[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(static_cast<__half*>(p.out) + at) = *reinterpret_cast<uint2*>(pairs);
  }
}

// Four rows of a token at a time. kPlain: without bias and dynamic scales, for code that is not there is not fetched.
template <bool kPlain>
__device__ __forceinline__ void combine_rows(const Args& args, const Shared& s) {
  constexpr int kAtOnce = 8;
  const Problem& p = args.p;
  const uint32_t quads = static_cast<uint32_t>(p.hidden) / 4, all = static_cast<uint32_t>(p.tokens) * quads;
  for (uint32_t at = blockIdx.x + gridDim.x * threadIdx.x; at < all; at += gridDim.x * kThreads) {
    const int token = at / quads, row = at % quads * 4;
    float sum[4] = {};
    for (int j = 0; j < p.top_k; j += kAtOnce) {
      const int first = token * p.top_k + j, count = min(p.top_k - j, kAtOnce);
      float4 y[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool mine = i < count && s.place[first + i] != kForeign;
        const float* from = args.y + static_cast<int64_t>(mine ? first + i : first) * p.hidden + row;
        y[i] = mine ? __ldcg(reinterpret_cast<const float4*>(from)) : float4{};
      }
      for (int part = 1; part < args.output_parts; ++part) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i < count && s.place[first + i] != kForeign) {
            const int64_t slot = static_cast<int64_t>(part) * args.slots + first + i;
            const float4 more = __ldcg(reinterpret_cast<const float4*>(args.y + slot * p.hidden + row));
            y[i].x += more.x, y[i].y += more.y, y[i].z += more.z, y[i].w += more.w;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int slot = first + i;
        if (i >= count || s.place[slot] == kForeign) {
          continue;
        }
        const Share share = s.shares[slot];
        float factor = 1.0f;
        float4 bias = {};
        if (!kPlain) {
          factor = args.h_factor == nullptr ? 1.0f : __ldcg(args.h_factor + slot);
          if (p.w2_bias != nullptr) {
            const float* of = p.w2_bias + static_cast<int64_t>(s.entries[s.place[slot] >> 8].expert) * p.hidden + row;
            bias = {of[0], of[1], of[2], of[3]};
          }
        }
        const float alpha = share.alpha * factor;
        sum[0] = fmaf(share.weight, fmaf(y[i].x, alpha, bias.x), sum[0]);
        sum[1] = fmaf(share.weight, fmaf(y[i].y, alpha, bias.y), sum[1]);
        sum[2] = fmaf(share.weight, fmaf(y[i].z, alpha, bias.z), sum[2]);
        sum[3] = fmaf(share.weight, fmaf(y[i].w, alpha, bias.w), sum[3]);
      }
    }
    store_output(p, static_cast<int64_t>(token) * p.hidden + row, sum);
  }
}

__device__ inline void combine(const Args& args, const Shared& s) {
  if (args.h_factor == nullptr && args.p.w2_bias == nullptr) {
    combine_rows<true>(args, s);
  } else {
    combine_rows<false>(args, s);
  }
}

}  // namespace moeq::sm90::decode
