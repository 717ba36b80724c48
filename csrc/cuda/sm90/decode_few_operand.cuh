// The operands of both GEMMs in shared memory: the tokens, quantized where asked for, and the intermediate, which a block
// makes of GEMM1's sums for the rows that it multiplies.
#pragma once
#include "decode_few_shared.cuh"
#include "decode_exchange.cuh"
#include "decode_hidden.cuh"

namespace moeq::sm90::few {

using decode::activate_once;

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

// Two neighbouring values of the intermediate.
struct Two {
  float a, b;
};

__device__ __forceinline__ float activate_few(const Problem& p, float gate, float up) {
  return p.activation <= Activation::kSwigluoai ? swiglu(p, gate, up) : activate_once(p, gate, up);
}

// Columns 2 * pair and one more of a slot. GEMM1's sums come from one or two parts.
__device__ __forceinline__ Two hidden_pair(const Args& args, const Fixed& fixed, const Entry& entry, int entry_number,
                                           int slot, int token, int pair, bool rehearse) {
  const Problem& p = args.p;
  const int per_slot = args.row_tiles[0] * (kTileRows / 2);
  const bool two = fixed.work[0].parts == 2;
  const Pair* first = reinterpret_cast<const Pair*>(exchange) + static_cast<int64_t>(slot) * per_slot +
                      (p.gated ? pair / 4 * 8 + pair % 4 : pair);
  const Pair* second = first + static_cast<int64_t>(args.slots) * per_slot;
  const int up_at = p.gated ? 4 : 0;
  const uint32_t epoch = fixed.epoch;
  Pair gate = look(first), up = look(first + up_at), gate2 = {}, up2 = {};
  if (two) {
    gate2 = look(second);
    up2 = look(second + up_at);
  }
  if (!rehearse) {
    await(gate, first, epoch);
    await(up, first + up_at, epoch);
  }
  float g[2] = {gate.a(), gate.b()}, u[2] = {up.a(), up.b()};
  if (two) {
    if (!rehearse) {
      await(gate2, second, epoch);
      await(up2, second + up_at, epoch);
    }
    g[0] += gate2.a(), g[1] += gate2.b(), u[0] += up2.a(), u[1] += up2.b();
  }
  const float factor = p.a1 == ActScale::kToken ? fixed.x_factor[token] * args.scale : args.scale;
  const float2 alphas = fixed.alphas[entry_number];
  const float alpha1 = alphas.x * factor, alpha2 = alphas.y * factor;
  float bias[4] = {};
  if (p.w13_bias != nullptr) {
    const float* of = p.w13_bias + static_cast<int64_t>(entry.expert) * (p.gated ? 2 : 1) * p.inter + 2 * pair;
    bias[0] = of[0], bias[1] = of[1];
    if (p.gated) {
      bias[2] = of[p.inter], bias[3] = of[p.inter + 1];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    g[i] = g[i] * alpha1 + bias[i];
    u[i] = p.gated ? u[i] * alpha2 + bias[2 + i] : g[i];
  }
  return {activate_few(p, g[0], u[0]), activate_few(p, g[1], u[1])};
}

// A block of 16 columns lies on eight neighbouring lanes, or, `apart`, on lanes n to n + 3 and n + 8 to n + 11.
__device__ __forceinline__ Two quantize_pair(Two v, float gscale, bool apart) {
  float amax = max_magnitude(v.a, v.b);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    amax = max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  }
  amax = max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, apart ? 8 : 4));
  const BlockScale block = nvfp4_block_scale(amax, gscale);
  const float scale = decode::e4m3_value(block.code);
  return {decode::quantize_value(v.a, block.quantize_by, scale), decode::quantize_value(v.b, block.quantize_by, scale)};
}

// The rows of an entry's slots from GEMM1's sums, K from `begin` tiles on. Every warp has one slot's columns at a time.
__device__ __forceinline__ void gather_sums(const Args& args, Fixed& fixed, int entry_number, int begin, int tiles,
                                            uint8_t* h, int thread, bool rehearse) {
  const Problem& p = args.p;
  const Entry entry = fixed.entries[entry_number];
  const int pairs = tiles * (kTileK / 2), all = entry.count * pairs;
  const bool dynamic = p.a2 == ActScale::kToken;
#pragma unroll 1
  for (int pass = dynamic && !rehearse ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int at = thread; at < all; at += kThreads) {
      const int column = at / pairs, in_part = at - column * pairs, pair = begin * (kTileK / 2) + in_part;
      const int slot = fixed.slots[entry.first + column];
      Two v = {0.0f, 0.0f};
      if (2 * pair < p.inter) {
        v = hidden_pair(args, fixed, entry, entry_number, slot, slot / p.top_k, pair, rehearse);
      }
      if (pass == 0) {
        const uint32_t amax = __reduce_max_sync(0xffffffffu, __float_as_uint(max_magnitude(v.a, v.b)));
        if (threadIdx.x % 32 == 0) {
          atomicMax(&fixed.amax[column], amax);
        }
        continue;
      }
      if (p.a2 != ActScale::kNone) {
        float gscale;
        if (dynamic) {
          const uint32_t amax = fixed.amax[column];
          gscale = amax == 0 ? 1.0f : divide(kNvfp4Range, __uint_as_float(amax));
          if (!rehearse) {
            fixed.h_factor[column] = reciprocal(gscale);
          }
        } else {
          gscale = p.a2_gscale[p.a2 == ActScale::kExpert ? entry.expert : 0];
        }
        v = quantize_pair(v, gscale, false);
      }
      if (!rehearse) {
        *reinterpret_cast<__nv_bfloat162*>(h + column * args.h_stride + in_part * 4) = __floats2bfloat162_rn(v.a, v.b);
      }
    }
    if (!rehearse && dynamic) {
      sync_workers();
    }
  }
  if (dynamic && !rehearse && threadIdx.x < kColumns) {
    fixed.amax[threadIdx.x] = 0;   // the next gathering comes after another barrier
  }
}

// Whether GEMM1's blocks finish the intermediate: they have whole sums, and need no more than a block of 16 to round them.
__device__ __forceinline__ bool finishes_hidden(const Args& args, const Fixed& fixed) {
  return fixed.work[0].parts == 1 && args.p.a1 != ActScale::kToken && args.p.a2 != ActScale::kToken;
}

// The same where GEMM1's blocks have finished the intermediate: copies it.
__device__ __forceinline__ void gather_finished(const Args& args, Fixed& fixed, int entry_number, int begin, int tiles,
                                                uint8_t* h, int thread, bool rehearse) {
  constexpr int kAtOnce = 4;
  const Problem& p = args.p;
  const Entry entry = fixed.entries[entry_number];
  const int quads = tiles * (kTileK / 4), all = entry.count * quads, real = p.inter / 4;
  const uint32_t epoch = fixed.epoch;
#pragma unroll 1
  for (int start = thread; start < all; start += kAtOnce * kThreads) {
    const Pair* from[kAtOnce];
    uint2* to[kAtOnce];
    Pair pairs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = start + i * kThreads;
      const int column = at / quads, in_part = at - column * quads, quad = begin * (kTileK / 4) + in_part;
      to[i] = at < all ? reinterpret_cast<uint2*>(h + column * args.h_stride + in_part * 8) : nullptr;
      from[i] = nullptr;
      pairs[i] = {};
      if (at < all && quad < real) {
        from[i] = reinterpret_cast<const Pair*>(exchange) +
                  static_cast<int64_t>(fixed.slots[entry.first + column]) * args.row_tiles[0] * (kTileRows / 2) + quad;
        pairs[i] = look(from[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (from[i] != nullptr && !rehearse) {
        await(pairs[i], from[i], epoch);
      }
      if (to[i] != nullptr && !rehearse) {
        *to[i] = make_uint2(static_cast<uint32_t>(pairs[i].first), static_cast<uint32_t>(pairs[i].second));
      }
    }
  }
}

// GEMM2's operand for an entry and a part of K, in shared memory. All workers; or, to rehearse, some other threads: then
// nothing is waited for or written.
__device__ __noinline__ void gather_hidden(const Args& args, Fixed& fixed, const Work& work, int k_tiles, uint8_t* h,
                                           int thread, bool rehearse) {
  const int begin = work.part * work.part_tiles, tiles = min(work.part_tiles, k_tiles - begin);
  if (!rehearse) {
    sync_workers();   // nobody multiplies what was there any more
  }
  if (finishes_hidden(args, fixed)) {
    gather_finished(args, fixed, work.entry, begin, tiles, h, thread, rehearse);
  } else {
    gather_sums(args, fixed, work.entry, begin, tiles, h, thread, rehearse);
  }
  if (!rehearse) {
    sync_workers();
  }
}

// A warp's row pairs of a whole unit of GEMM1 -> two values of the intermediate: on every lane where not gated, else on
// those that hold gate rows.
__device__ __forceinline__ void send_hidden(const Args& args, const Fixed& fixed, const Entry& entry, int entry_number,
                                            int slot, int row_tile, float2 sums) {
  const Problem& p = args.p;
  const int lane = threadIdx.x % 32;
  const bool is_up = p.gated && lane % 8 >= 4;
  const int pair = p.gated ? row_tile * (kTileRows / 4) + lane / 8 * 4 + lane % 4 : row_tile * (kTileRows / 2) + lane;
  const float2 alphas = fixed.alphas[entry_number];
  const float alpha = (is_up ? alphas.y : alphas.x) * args.scale;
  float2 v = {sums.x * alpha, sums.y * alpha};
  const bool inside = 2 * pair < p.inter;
  if (p.w13_bias != nullptr && inside) {
    const float* of = p.w13_bias + static_cast<int64_t>(entry.expert) * (p.gated ? 2 : 1) * p.inter + 2 * pair + (is_up ? p.inter : 0);
    v.x += of[0], v.y += of[1];
  }
  float2 up = v;
  if (p.gated) {
    up.x = __shfl_xor_sync(0xffffffffu, v.x, 4);
    up.y = __shfl_xor_sync(0xffffffffu, v.y, 4);
  }
  Two h = {activate_few(p, v.x, up.x), activate_few(p, v.y, up.y)};
  if (p.a2 != ActScale::kNone) {
    h = quantize_pair(h, p.a2_gscale[p.a2 == ActScale::kExpert ? entry.expert : 0], p.gated);
  }
  if (inside && !is_up) {
    const int64_t line = static_cast<int64_t>(slot) * args.row_tiles[0] * kTileRows;
    send_rounded(line + pair, h.a, h.b, fixed.epoch);
  }
}

}  // namespace moeq::sm90::few
