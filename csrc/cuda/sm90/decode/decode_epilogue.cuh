// From sums to results: the intermediate (scales, bias, activation, rounding), and the sum over a token's slots.
#pragma once
#include <cuda_fp16.h>

#include "decode_multiply.cuh"
#include "decode_quantize.cuh"
#include "../device/scans.cuh"
#include "../numerics/activations.cuh"

namespace moeq::sm90::decode {

// Not inlined: its eleven ways would be copied for each of a thread's values, and code must be fetched, too.
__device__ __noinline__ inline float activate_once(const Problem& p, float gate, float up) {
  return activate(p, gate, up);
}

// Of an expert, loaded long before it is needed; with what the accumulators lack.
struct Alphas {
  float first, second;
};

__device__ __forceinline__ Alphas load_alphas(const Args& args, int expert) {
  const Problem& p = args.p;
  const float scale = args.accumulator_scale;
  if (p.g1_alphas == nullptr) {
    return {scale, scale};
  }
  const float* alphas = p.g1_alphas + static_cast<int64_t>(expert) * p.alphas13;
  return {__ldg(alphas) * scale, __ldg(alphas + p.alphas13 - 1) * scale};
}

// A thread's values of the intermediate: of column `at` (and at + 8, where not gated) for two tokens of each group.
template <int kGroups>
struct Hidden {
  float v[kGroups][2][2];
};

template <int kGroups>
__device__ __forceinline__ void activate_sums(const Args& args, const Shared& s, const RowTile<kGroups>& tile_row,
                                              Alphas alphas, int at, const Sums<kGroups>& sums,
                                              Hidden<kGroups>& hidden) {
  const Problem& p = args.p;
  float bias[2] = {0.0f, 0.0f};
  if (p.w13_bias != nullptr) {
    const float* of = p.w13_bias + static_cast<int64_t>(tile_row.what.expert) * (p.gated ? 2 : 1) * p.inter + at;
    bias[0] = of[0];
    bias[1] = of[p.gated ? p.inter : 8];
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = min(i * kGroupTokens + static_cast<int>(threadIdx.x) % 4 * 2 + j, tile_row.what.count - 1);
      const int slot = s.slots[tile_row.what.first + column];
      const float factor = args.sums_factor == nullptr ? 1.0f : __ldcg(args.sums_factor + slot / args.slots_of_factor);
      const float first = sums.v[i][j] * (alphas.first * factor) + bias[0];
      const float second = sums.v[i][j + 2] * (alphas.second * factor) + bias[1];
      hidden.v[i][j][0] = activate_once(p, first, p.gated ? second : first);
      hidden.v[i][j][1] = p.gated ? 0.0f : activate_once(p, second, second);
    }
  }
}

// Rounds the values to NVFP4 with the scale of their block of 16 columns. Where gated, a warp has eight columns and the
// warp beside it the other eight.
template <int kGroups>
__device__ inline void quantize_values(const Args& args, const Shared& s, int expert, Hidden<kGroups>& hidden) {
  const Problem& p = args.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float gscale = p.a2_gscale[p.a2 == ActScale::kExpert ? expert : 0];
  float amax[kGroups][2];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float largest = amax_of_lanes<4, 32>(max_magnitude(hidden.v[i][j][0], hidden.v[i][j][1]));
      amax[i][j] = largest;
      if (lane < 4) {
        s.fixed->pair_amax[warp][i * kGroupTokens + lane * 2 + j] = largest;
      }
    }
  }
  if (p.gated) {
    sync_pair(warp / 2);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        amax[i][j] = max_magnitude(amax[i][j], s.fixed->pair_amax[warp ^ 1][i * kGroupTokens + lane % 4 * 2 + j]);
      }
    }
    sync_pair(warp / 2);   // before the next ones are written
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const BlockScale block = nvfp4_block_scale(amax[i][j], gscale);
      hidden.v[i][j][0] = quantize_value(hidden.v[i][j][0], block);
      hidden.v[i][j][1] = quantize_value(hidden.v[i][j][1], block);
    }
  }
}

// GEMM1's sums -> the intermediate.
template <int kGroups>
__device__ inline void finish_hidden(const Args& args, const Shared& s, const RowTile<kGroups>& tile_row, Alphas alphas,
                                     const Sums<kGroups>& sums) {
  const Problem& p = args.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int at = p.gated ? tile_row.row_tile * (kTileRows / 2) + 8 * warp + lane / 4
                         : tile_row.row_tile * kTileRows + 16 * warp + lane / 4;
  if (at >= p.inter) {
    return;   // with it the whole block of 16
  }
  Hidden<kGroups> hidden;
  activate_sums(args, s, tile_row, alphas, at, sums, hidden);
  if (p.a2 != ActScale::kNone && args.wide == nullptr) {
    quantize_values(args, s, tile_row.what.expert, hidden);
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = i * kGroupTokens + lane % 4 * 2 + j;
      if (column < tile_row.what.count) {
        const int64_t to = static_cast<int64_t>(s.slots[tile_row.what.first + column]) * p.inter + at;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (half == 0 || !p.gated) {
            if (args.wide != nullptr) {
              __stcg(args.wide + to + 8 * half, hidden.v[i][j][half]);
            } else {
              args.h[to + 8 * half] = __float2bfloat16_rn(hidden.v[i][j][half]);
            }
          }
        }
      }
    }
  }
}

// The last step: out[token] = sum over its slots, ascending, of weight * (alpha2 * sums + bias), in float32.

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
