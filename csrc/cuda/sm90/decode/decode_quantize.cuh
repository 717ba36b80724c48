// Operands that are not what the caller or GEMM1 left: weighed by the router, or quantized to NVFP4. Every thread block
// makes an equal piece. Values are written, not codes: a code times its block's scale is exact in bfloat16.
#pragma once
#include "../../nvfp4_block.cuh"
#include "decode_shared.cuh"

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

// The gscale of a row that the warp reads.
template <typename Load>
__device__ __forceinline__ float dynamic_gscale(int blocks, Load load) {
  float amax = 0.0f;
  for (int block = threadIdx.x % 32; block < blocks; block += 32) {
    float values[16];
    load(block, values);
    amax = max_magnitude(amax, block_amax(values));
  }
  const uint32_t of_row = __reduce_max_sync(0xffffffffu, bits_of(amax));  // of magnitudes: the order is the same
  return nvfp4_dynamic_gscale(of_row);
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

// `load(row, block, values)` and `gscale_of(row)`; gscale 0: not quantized. `factor` gets a dynamic scale's inverse.
template <bool kDynamic, typename Load, typename Gscale>
__device__ inline void make_rows(Fixed& fixed, Piece piece, int depth, __nv_bfloat16* to, float* factor, Load load,
                                 Gscale gscale_of) {
  const int blocks = depth / 16, warp = threadIdx.x / 32;
  for (int first = piece.begin / blocks; first * blocks < piece.end; first += kGscales) {
    const int begin = max(piece.begin, first * blocks), end = min(piece.end, (first + kGscales) * blocks);
    if (kDynamic) {
      for (int row = first + warp; row * blocks < end; row += kThreads / 32) {
        const float gscale = dynamic_gscale(blocks, [&](int block, float (&values)[16]) { load(row, block, values); });
        if (threadIdx.x % 32 == 0) {
          fixed.gscales[row - first] = gscale;
          if (row * blocks >= begin) {
            __stcg(factor + row, reciprocal(gscale));
          }
        }
      }
      sync_workers();
    }
    for (int at = begin + threadIdx.x; at < end; at += kThreads) {
      const int row = at / blocks, block = at % blocks;
      const float gscale = kDynamic ? fixed.gscales[row - first] : gscale_of(row);
      float values[16];
      load(row, block, values);
      if (gscale != 0.0f) {
        quantize_block(values, gscale);
      }
      store_block(to + static_cast<int64_t>(row) * depth + block * 16, values);
    }
    if (kDynamic) {
      sync_workers();
    }
  }
  fence_async_proxy();
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
  const auto gscale = [&](int64_t row) {
    return p.a1 == ActScale::kNone     ? 0.0f
           : p.a1 == ActScale::kTensor ? p.a1_gscale[0]
                                       : p.a1_gscale[expert_or_first(p, row)];
  };
  const Piece piece = piece_of(args.operand_rows * (p.hidden / 16), args.private_operand);
  if (p.a1 == ActScale::kToken) {
    make_rows<true>(fixed, piece, p.hidden, operand_of(args), args.operand_factor, load, gscale);
  } else {
    make_rows<false>(fixed, piece, p.hidden, operand_of(args), args.operand_factor, load, gscale);
  }
}

// GEMM2's operand from the float32 intermediate: with a scale of its own a row must be complete before it is quantized.
__device__ __noinline__ inline void quantize_hidden(const Args& args, Fixed& fixed) {
  const Problem& p = args.p;
  const auto load = [&](int64_t row, int block, float (&values)[16]) {
    const float4* from = reinterpret_cast<const float4*>(args.wide + row * p.inter + block * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = __ldcg(from + i);
      values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
  };
  const Piece piece = piece_of(args.slots * (p.inter / 16), false);
  make_rows<true>(fixed, piece, p.inter, args.h, args.h_factor, load, [](int) { return 0.0f; });
}

}  // namespace moeq::sm90::decode
