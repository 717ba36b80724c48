// The intermediate: GEMM2's operand in shared memory. Where a unit of GEMM1 has all of K, its block finishes its part
// of the intermediate and sends that; else the sums are sent, and whoever multiplies with the intermediate adds them
// up, activates and rounds them for itself.
#pragma once
#include "decode_exchange.cuh"
#include "decode_few_operand.cuh"
#include "decode_hidden.cuh"

namespace moeq::sm90::few {

using decode::activate_once;

template <Kind kKind>
__device__ __forceinline__ float activate_few(const Problem& p, float gate, float up) {
  const bool usual = kKind != Kind::kGeneral || p.activation <= Activation::kSwigluoai;
  return usual ? swiglu(p, gate, up) : activate_once(p, gate, up);
}

// Columns 2 * pair and one more of a slot. GEMM1's sums come from one or two parts.
template <Kind kKind>
__device__ __forceinline__ Two hidden_pair(const Args& args, const Fixed& fixed, const Entry& entry, int entry_number,
                                           int slot, int token, int pair) {
  const Problem& p = args.p;
  const int per_slot = args.row_tiles[0] * (kTileRows / 2);
  const bool two = fixed.work[0].parts == 2;
  const uint32_t epoch = fixed.epoch;
  const Pair* first = sent_pairs(epoch) + static_cast<int64_t>(slot) * per_slot +
                      (Case<kKind>::gated(p) ? pair / 4 * 8 + pair % 4 : pair);
  const Pair* second = first + static_cast<int64_t>(args.slots) * per_slot;
  const int up_at = Case<kKind>::gated(p) ? 4 : 0;
  Pair gate = look(first), up = look(first + up_at), gate2 = {}, up2 = {};
  if (two) {
    gate2 = look(second);
    up2 = look(second + up_at);
  }
  await(gate, first, epoch);
  await(up, first + up_at, epoch);
  float g[2] = {gate.a(), gate.b()}, u[2] = {up.a(), up.b()};
  if (two) {
    await(gate2, second, epoch);
    await(up2, second + up_at, epoch);
    g[0] += gate2.a(), g[1] += gate2.b(), u[0] += up2.a(), u[1] += up2.b();
  }
  const float factor = Case<kKind>::dynamic_tokens(p) ? fixed.x_factor[token] * args.scale : args.scale;
  const float2 alphas = fixed.alphas[entry_number];
  const float alpha1 = alphas.x * factor, alpha2 = alphas.y * factor;
  float bias[4] = {};
  if (Case<kKind>::bias13(p)) {
    const int64_t rows = (Case<kKind>::gated(p) ? 2 : 1) * static_cast<int64_t>(p.inter);
    const float* of = p.w13_bias + entry.expert * rows + 2 * pair;
    bias[0] = of[0], bias[1] = of[1];
    if (Case<kKind>::gated(p)) {
      bias[2] = of[p.inter], bias[3] = of[p.inter + 1];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    g[i] = g[i] * alpha1 + bias[i];
    u[i] = Case<kKind>::gated(p) ? u[i] * alpha2 + bias[2 + i] : g[i];
  }
  return {activate_few<kKind>(p, g[0], u[0]), activate_few<kKind>(p, g[1], u[1])};
}

// The rows of an entry's slots from GEMM1's sums, K from `begin` tiles on. Every warp has one slot's columns at a time.
template <Kind kKind>
__device__ __forceinline__ void gather_sums(const Args& args, Fixed& fixed, int entry_number, int begin, int tiles,
                                            uint8_t* h) {
  const Problem& p = args.p;
  const Entry entry = fixed.entries[entry_number];
  const int pairs = tiles * (kTileK / 2), all = entry.count * pairs;
  const bool dynamic = Case<kKind>::dynamic_hidden(p);
#pragma unroll 1
  for (int pass = dynamic ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int at = threadIdx.x; at < all; at += kThreads) {
      const int column = at / pairs, in_part = at - column * pairs, pair = begin * (kTileK / 2) + in_part;
      const int slot = fixed.slots[entry.first + column];
      Two v = {0.0f, 0.0f};
      if (2 * pair < p.inter) {
        v = hidden_pair<kKind>(args, fixed, entry, entry_number, slot, slot / p.top_k, pair);
      }
      if (pass == 0) {
        const uint32_t amax = __reduce_max_sync(0xffffffffu, __float_as_uint(max_magnitude(v.a, v.b)));
        if (threadIdx.x % 32 == 0) {
          atomicMax(&fixed.amax[column], amax);
        }
        continue;
      }
      if (Case<kKind>::quantizes_hidden(p)) {
        float gscale;
        if (dynamic) {
          const uint32_t amax = fixed.amax[column];
          gscale = amax == 0 ? 1.0f : divide(kNvfp4Range, __uint_as_float(amax));
          fixed.h_factor[column] = reciprocal(gscale);
        } else {
          gscale = p.a2_gscale[p.a2 == ActScale::kExpert ? entry.expert : 0];
        }
        v = quantize_pair(v, gscale, false);
      }
      *reinterpret_cast<__nv_bfloat162*>(h + column * args.h_stride + in_part * 4) = __floats2bfloat162_rn(v.a, v.b);
    }
    if (dynamic) {
      sync_workers();
    }
  }
  if (dynamic && threadIdx.x < kColumns) {
    fixed.amax[threadIdx.x] = 0;   // the next gathering comes after another barrier
  }
}

// Whether GEMM1's blocks finish the intermediate: they have whole sums, and rounding needs no more than blocks of 16.
template <Kind kKind>
__device__ __forceinline__ bool finishes_hidden(const Args& args, const Fixed& fixed) {
  return fixed.work[0].parts == 1 && !Case<kKind>::dynamic_tokens(args.p) && !Case<kKind>::dynamic_hidden(args.p);
}

// The same where GEMM1's blocks have finished the intermediate: copies it.
__device__ __forceinline__ void gather_finished(const Args& args, Fixed& fixed, int entry_number, int begin, int tiles,
                                                uint8_t* h) {
  constexpr int kAtOnce = 2;
  const Problem& p = args.p;
  const Entry entry = fixed.entries[entry_number];
  const int quads = tiles * (kTileK / 4), all = entry.count * quads, real = p.inter / 4;
  const uint32_t epoch = fixed.epoch;
#pragma unroll 1
  for (int start = threadIdx.x; start < all; start += kAtOnce * kThreads) {
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
        from[i] = sent_pairs(epoch) +
                  static_cast<int64_t>(fixed.slots[entry.first + column]) * args.row_tiles[0] * (kTileRows / 2) + quad;
        pairs[i] = look(from[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (from[i] != nullptr) {
        await(pairs[i], from[i], epoch);
      }
      if (to[i] != nullptr) {
        *to[i] = make_uint2(static_cast<uint32_t>(pairs[i].first), static_cast<uint32_t>(pairs[i].second));
      }
    }
  }
}

// GEMM2's operand for an entry and a part of K, in shared memory. All workers.
template <Kind kKind>
__device__ __forceinline__ void gather_hidden(const Args& args, Fixed& fixed, const Work& work, int k_tiles,
                                              uint8_t* h) {
  const int begin = work.part * work.part_tiles, tiles = min(work.part_tiles, k_tiles - begin);
  sync_workers();   // nobody multiplies what was there any more
  if (finishes_hidden<kKind>(args, fixed)) {
    gather_finished(args, fixed, work.entry, begin, tiles, h);
  } else {
    gather_sums<kKind>(args, fixed, work.entry, begin, tiles, h);
  }
  sync_workers();
}

// A warp's row pairs of a whole unit of GEMM1 -> two values of the intermediate: on every lane where not gated, else on
// those that hold gate rows.
template <Kind kKind>
__device__ __forceinline__ void send_hidden(const Args& args, const Fixed& fixed, const Entry& entry, int entry_number,
                                            int slot, int row_tile, float2 sums) {
  const Problem& p = args.p;
  const int lane = threadIdx.x % 32;
  const bool is_up = Case<kKind>::gated(p) && lane % 8 >= 4;
  const int pair = Case<kKind>::gated(p) ? row_tile * (kTileRows / 4) + lane / 8 * 4 + lane % 4
                                         : row_tile * (kTileRows / 2) + lane;
  const float2 alphas = fixed.alphas[entry_number];
  const float alpha = (is_up ? alphas.y : alphas.x) * args.scale;
  float2 v = {sums.x * alpha, sums.y * alpha};
  const bool inside = 2 * pair < p.inter;
  if (Case<kKind>::bias13(p) && inside) {
    const int64_t rows = (Case<kKind>::gated(p) ? 2 : 1) * static_cast<int64_t>(p.inter);
    const float* of = p.w13_bias + entry.expert * rows + 2 * pair + (is_up ? p.inter : 0);
    v.x += of[0], v.y += of[1];
  }
  float2 up = v;
  if (Case<kKind>::gated(p)) {
    up.x = __shfl_xor_sync(0xffffffffu, v.x, 4);
    up.y = __shfl_xor_sync(0xffffffffu, v.y, 4);
  }
  Two h = {activate_few<kKind>(p, v.x, up.x), activate_few<kKind>(p, v.y, up.y)};
  if (Case<kKind>::quantizes_hidden(p)) {
    h = quantize_pair(h, p.a2_gscale[p.a2 == ActScale::kExpert ? entry.expert : 0], Case<kKind>::gated(p));
  }
  if (inside && !is_up) {
    const int64_t line = static_cast<int64_t>(slot) * args.row_tiles[0] * kTileRows;
    send_rounded(line + pair, h.a, h.b, fixed.epoch);
  }
}

}  // namespace moeq::sm90::few
