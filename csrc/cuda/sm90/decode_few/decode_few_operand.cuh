// The tokens in shared memory, rounded to NVFP4 where that is asked for.
#pragma once
#include "decode_few_shared.cuh"
#include "../decode/decode_quantize.cuh"

namespace moeq::sm90::few {

// Two neighbouring values of an operand.
struct Two {
  float a, b;
};

// The largest magnitude of a block of 16 values, on eight neighbouring lanes, or, `apart`, on lanes n to n + 3
// and n + 8 to n + 11. All lanes.
__device__ __forceinline__ float amax_of_block(Two v, bool apart) {
  float amax = max_magnitude(v.a, v.b);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    amax = max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  }
  return max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, apart ? 8 : 4));
}

// Not inlined: fetched once for the tokens and for the intermediate.
__device__ __noinline__ inline Two quantize_pair(Two v, float gscale, bool apart) {
  const BlockScale block = nvfp4_block_scale(amax_of_block(v, apart), gscale);
  return {decode::quantize_value(v.a, block), decode::quantize_value(v.b, block)};
}

// A block of 16 values by each thread: less work in all, but fewer threads have some.
__device__ __forceinline__ void quantize_many_tokens(const Args& args, uint8_t* x) {
  const int all = args.p.tokens * (args.p.hidden / 16);
  const float gscale = args.p.a1_gscale[0];
#pragma unroll 1
  for (int at = threadIdx.x; at < all; at += kThreads) {
    const int token = quotient(at, args.inverse_pairs * 8.0f), block = at - token * (args.p.hidden / 16);
    uint4* to = reinterpret_cast<uint4*>(x + token * args.x_stride) + 2 * block;
    const uint4 raw[2] = {to[0], to[1]};
    float values[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 four = raw[i / 4];
      const uint32_t word = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
      values[2 * i] = __uint_as_float(word << 16);
      values[2 * i + 1] = __uint_as_float(word & 0xffff0000u);
    }
    decode::quantize_block(values, gscale);
    decode::store_block(reinterpret_cast<__nv_bfloat16*>(to), values);
  }
  sync_workers();
}

// All workers. Eight neighbouring threads have a block of 16 values.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void quantize_tokens(const Args& args, Fixed& fixed, uint8_t* x) {
  const Problem& p = args.p;
  const int per_token = p.hidden / 2, all = p.tokens * per_token;
  const bool dynamic = Case<kKind>::dynamic_tokens(p);
  constexpr int kManyTokens = 3;
  if (!dynamic && p.tokens >= kManyTokens) {
    quantize_many_tokens(args, x);
    return;
  }
#pragma unroll 1
  for (int pass = dynamic ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 32; first < all; first += kThreads) {   // whole warps
      const int at = min(first + static_cast<int>(threadIdx.x) % 32, all - 1), token = quotient(at, args.inverse_pairs);
      uint32_t* pair = reinterpret_cast<uint32_t*>(x + token * args.x_stride) + (at - token * per_token);
      const uint32_t word = *pair;
      const Two v = {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
      if (pass == 0) {
        atomicMax(&fixed.amax[token], __float_as_uint(amax_of_block(v, false)));
        continue;
      }
      float gscale;
      if (dynamic) {
        gscale = nvfp4_dynamic_gscale(fixed.amax[token]);
        fixed.x_factor[token] = reciprocal(gscale);
      } else {
        gscale = p.a1_gscale[0];
      }
      const Two q = quantize_pair(v, gscale, false);
      if (first + static_cast<int>(threadIdx.x) % 32 < all) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(q.a, q.b);
        *pair = *reinterpret_cast<const uint32_t*>(&both);
      }
    }
    sync_workers();
  }
  if (dynamic) {
    if (threadIdx.x < kColumns) {
      fixed.amax[threadIdx.x] = 0;
    }
    named_arrive(kFactorsKnown, kThreads + kHelperThreads);   // helpers need factors, and find maxima themselves
  }
}

}  // namespace moeq::sm90::few
