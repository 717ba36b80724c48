// Operands that are not what the caller or GEMM1 left: weighed by the router, or quantized to NVFP4 or rounded to e4m3.
// Every thread block makes an equal piece. Values are written, not codes: a code times its block's scale is exact in
// bfloat16, and so is the value of an e4m3 code.
#pragma once
#include "../../nvfp4_block.cuh"
#include "decode_shared.cuh"
#include "../numerics/act_rounding.cuh"

namespace moeq::sm90::decode {

// The e2m1 value nearest to a magnitude, ties to the even code; a NaN becomes 6. Adding 1.5 * 2^23 steps and taking
// them away rounds to a multiple of the step, which is 0.5, 1 or 2.
__device__ __forceinline__ float round_to_e2m1(float magnitude) {
  const float shift = magnitude < 2.0f ? 0x1.8p22f : magnitude < 4.0f ? 0x1.8p23f : 0x1.8p24f;
  return fminf(magnitude + shift - shift, kE2m1Max);
}

__device__ __forceinline__ float block_amax(const float (&values)[16]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    amax = max_magnitude(amax, values[i]);
  }
  return amax;
}

__device__ __forceinline__ void store_block(__nv_bfloat16* to, const float (&values)[16]) {
  uint4 words[2];
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(words);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  }
  reinterpret_cast<uint4*>(to)[0] = words[0];
  reinterpret_cast<uint4*>(to)[1] = words[1];
}

// A value of a block of 16, rounded to its code and back.
__device__ __forceinline__ float quantize_value(float value, const BlockScale& block) {
  const float rounded = multiply(round_to_e2m1(fabsf(multiply(value, block.quantize_by))), block.value);
  return signbit(value) ? -rounded : rounded;
}

__device__ __forceinline__ void quantize_block(float (&values)[16], float gscale) {
  const BlockScale block = nvfp4_block_scale(block_amax(values), gscale);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    values[i] = quantize_value(values[i], block);
  }
}

// The largest magnitude of a row that the warp reads, as bits.
template <typename Load>
__device__ __forceinline__ uint32_t amax_of_row(int blocks, Load load) {
  float amax = 0.0f;
  for (int block = threadIdx.x % 32; block < blocks; block += 32) {
    float values[16];
    load(block, values);
    amax = max_magnitude(amax, block_amax(values));
  }
  return __reduce_max_sync(0xffffffffu, bits_of(amax));  // of magnitudes: the order is the same
}

// Blocks of 16 that this thread block makes of `all`.
struct Piece {
  int begin, end;
};

__device__ __forceinline__ Piece piece_of(int all, bool alone) {
  if (alone) {
    return {0, all};
  }
  const int each = (all + gridDim.x - 1) / gridDim.x;
  return {min(static_cast<int>(blockIdx.x) * each, all), min(static_cast<int>(blockIdx.x + 1) * each, all)};
}

// `load(row, block, values)`; `round(row, block, scale, values)`. Where the scale is a row's own, `scale_from(row,
// amax)` makes it of the largest magnitude, as bits.
template <bool kDynamic, typename Load, typename ScaleFrom, typename Round>
__device__ inline void make_rows(Fixed& fixed, Piece piece, int depth, __nv_bfloat16* to, Load load,
                                 ScaleFrom scale_from, Round round) {
  const int blocks = depth / 16, warp = threadIdx.x / 32;
  for (int first = piece.begin / blocks; first * blocks < piece.end; first += kGscales) {
    const int begin = max(piece.begin, first * blocks), end = min(piece.end, (first + kGscales) * blocks);
    if (kDynamic) {
      for (int row = first + warp; row * blocks < end; row += kThreads / 32) {
        const uint32_t amax = amax_of_row(blocks, [&](int block, float (&values)[16]) { load(row, block, values); });
        if (threadIdx.x % 32 == 0) {
          fixed.gscales[row - first] = scale_from(row, amax);
        }
      }
      sync_workers();
    }
    for (int at = begin + threadIdx.x; at < end; at += kThreads) {
      const int row = at / blocks, block = at % blocks;
      float values[16];
      load(row, block, values);
      round(row, block, kDynamic ? fixed.gscales[row - first] : 0.0f, values);
      store_block(to + static_cast<int64_t>(row) * depth + block * 16, values);
    }
    if (kDynamic) {
      sync_workers();
    }
  }
  fence_async_proxy();
}

// How an operand's rows are rounded, and where what their sums lack then is written: [rows], or null.
struct RowRounding {
  ActFormat format;
  ActScale scale;
  const float* gscale;
  float* factor;
};

// Of a row that this thread block shares with its neighbours each of them writes the factor: the same.
__device__ __forceinline__ float dynamic_scale(const RowRounding& how, int64_t row, uint32_t amax) {
  const bool nvfp4 = how.format == ActFormat::kNvfp4;
  const float scale = nvfp4 ? nvfp4_dynamic_gscale(amax) : dynamic_rounding(amax).factor;
  __stcg(how.factor + row, nvfp4 ? reciprocal(scale) : scale);
  return scale;
}

__device__ __forceinline__ void round_dynamic(const RowRounding& how, float scale, float (&values)[16]) {
  if (how.format == ActFormat::kNvfp4) {
    quantize_block(values, scale);
  } else {
    round_to_e4m3(values, {scale, 1.0f, scale, true});
  }
}

__device__ __forceinline__ void round_given(const RowRounding& how, int64_t row, int block, int expert,
                                            float (&values)[16]) {
  if (how.scale == ActScale::kNone) {
    return;
  }
  const float gscale = how.gscale[expert];
  if (how.format == ActFormat::kNvfp4) {
    return quantize_block(values, gscale);
  }
  const Rounding rounding = given_rounding(gscale);
  if (block == 0) {
    __stcg(how.factor + row, rounding.factor);
  }
  round_to_e4m3(values, rounding);
}

// `expert_of(row)`: whose scale it is; 0 where all have one.
template <typename Load, typename ExpertOf>
__device__ __forceinline__ void round_rows(Fixed& fixed, Piece piece, int depth, __nv_bfloat16* to,
                                           const RowRounding& how, Load load, ExpertOf expert_of) {
  const auto scale_from = [&](int64_t row, uint32_t amax) { return dynamic_scale(how, row, amax); };
  if (how.format == ActFormat::kMxfp8 && how.scale != ActScale::kNone) {
    make_rows<false>(fixed, piece, depth, to, load, scale_from,
                     [&](int64_t row, int block, float, float (&values)[16]) {
                       float others[16];  // a block of mxfp8 has 32
                       load(row, block ^ 1, others);
                       round_to_e4m3(values, mx_rounding(max_magnitude(block_amax(values), block_amax(others))));
                     });
  } else if (how.scale == ActScale::kToken) {
    make_rows<true>(fixed, piece, depth, to, load, scale_from,
                    [&](int64_t, int, float scale, float (&values)[16]) { round_dynamic(how, scale, values); });
  } else {
    make_rows<false>(fixed, piece, depth, to, load, scale_from,
                     [&](int64_t row, int block, float, float (&values)[16]) {
                       round_given(how, row, block, expert_of(row), values);
                     });
  }
}

__device__ __forceinline__ void load_hidden_states(const Args& args, int64_t row, int block, float (&values)[16]) {
  const Problem& p = args.p;
  const int64_t token = operand_by_slot(p) ? row / p.top_k : row;
  const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(p.x) + token * p.hidden + block * 16;
  const uint4* from = reinterpret_cast<const uint4*>(x);
  const float weight = p.weight_on_input ? p.topk_weights[token] : 1.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 raw = __ldg(from + i);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[8 * i + 2 * j] = __uint_as_float(words[j] << 16);
      values[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    }
  }
  if (p.weight_on_input) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      values[i] = __bfloat162float(__float2bfloat16_rn(multiply(values[i], weight)));
    }
  }
}

// A foreign slot's row may hold anything: nobody reads it.
__device__ __forceinline__ int expert_or_first(const Problem& p, int64_t slot) { return max(local_expert(p, slot), 0); }

// GEMM1's operand, where it is not x as it is.
__device__ __noinline__ inline void make_operand(const Args& args, Fixed& fixed) {
  const Problem& p = args.p;
  const auto load = [&](int64_t row, int block, float (&values)[16]) { load_hidden_states(args, row, block, values); };
  const auto expert_of = [&](int64_t row) { return operand_by_slot(p) ? expert_or_first(p, row) : 0; };
  const Piece piece = piece_of(args.operand_rows * (p.hidden / 16), args.private_operand);
  const RowRounding how = {args.act_format, p.a1, p.a1_gscale, args.operand_factor};
  round_rows(fixed, piece, p.hidden, operand_of(args), how, load, expert_of);
}

// GEMM2's operand from the float32 intermediate, where it is rounded once it is complete: with a scale of its own a row
// has to be.
__device__ __noinline__ inline void round_hidden(const Args& args, Fixed& fixed) {
  const Problem& p = args.p;
  const auto load = [&](int64_t row, int block, float (&values)[16]) {
    const float4* from = reinterpret_cast<const float4*>(args.wide + row * p.inter + block * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = __ldcg(from + i);
      values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
  };
  const auto expert_of = [&](int64_t row) { return p.a2 == ActScale::kExpert ? expert_or_first(p, row) : 0; };
  const Piece piece = piece_of(args.slots * (p.inter / 16), false);
  const RowRounding how = {args.act_format, p.a2, p.a2_gscale, args.h_factor};
  round_rows(fixed, piece, p.inter, args.h, how, load, expert_of);
}

}  // namespace moeq::sm90::decode
