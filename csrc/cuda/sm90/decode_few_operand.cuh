// The tokens in shared memory, rounded to NVFP4 where that is asked for.
#pragma once
#include "decode_few_shared.cuh"
#include "decode_quantize.cuh"

namespace moeq::sm90::few {

__device__ __noinline__ inline void quantize_tokens(const Args& args, Fixed& fixed, uint8_t* x) {
  const Problem& p = args.p;
  const int blocks = p.hidden / 16, all = p.tokens * blocks;
  const auto load = [&](int at, float (&values)[16]) {
    const uint4* from = reinterpret_cast<const uint4*>(x + at / blocks * args.x_stride + at % blocks * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 raw = from[i];
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[8 * i + 2 * j] = __uint_as_float(words[j] << 16);
        values[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
      }
    }
  };
  float values[16];
  if (p.a1 == ActScale::kToken) {
    for (int at = threadIdx.x; at < all; at += kThreads) {
      load(at, values);
      atomicMax(&fixed.amax[at / blocks], __float_as_uint(decode::block_amax(values)));
    }
    sync_workers();
  }
  for (int at = threadIdx.x; at < all; at += kThreads) {
    const int token = at / blocks;
    float gscale;
    if (p.a1 == ActScale::kToken) {
      const uint32_t amax = fixed.amax[token];
      gscale = amax == 0 ? 1.0f : divide(kNvfp4Range, __uint_as_float(amax));
      fixed.x_factor[token] = reciprocal(gscale);
    } else {
      gscale = p.a1_gscale[0];
    }
    load(at, values);
    decode::quantize_block(values, gscale);
    decode::store_block(reinterpret_cast<__nv_bfloat16*>(x + token * args.x_stride + at % blocks * 32), values);
  }
  sync_workers();
  if (threadIdx.x < kMaxTokens) {
    fixed.amax[threadIdx.x] = 0;
  }
}

}  // namespace moeq::sm90::few
