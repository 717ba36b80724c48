// The intermediate: GEMM2's operand in shared memory, made by the helping warps for every entry and part of K that the
// block multiplies, of what GEMM1's blocks have finished or of their sums.
#pragma once
#include "decode_few_shared.cuh"
#include "../decode/decode_epilogue.cuh"
#include "../decode/decode_exchange.cuh"
#include "../decode/decode_quantize.cuh"
#include "../device/scans.cuh"
#include "../numerics/act_rounding.cuh"

namespace moeq::sm90::few {

// Two neighbouring values of an operand.
struct Two {
  float a, b;
};

// The largest magnitude of a block of 16 values, on eight neighbouring lanes, or, `apart`, on lanes n to n + 3
// and n + 8 to n + 11. All lanes.
__device__ __forceinline__ float amax_of_block(Two v, bool apart) {
  const float amax = amax_of_lanes<1, 4>(max_magnitude(v.a, v.b));
  return max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, apart ? 8 : 4));
}

// Not inlined: fetched once for the tokens and for the intermediate.
__device__ __noinline__ inline Two quantize_pair(Two v, float gscale, bool apart) {
  const BlockScale block = nvfp4_block_scale(amax_of_block(v, apart), gscale);
  return {decode::quantize_value(v.a, block), decode::quantize_value(v.b, block)};
}

// All workers: float16 tokens, each of which lies in the first of its two rows, become two bfloat16. Eight values by a
// thread at a time.
__device__ __forceinline__ void split_tokens(const Args& args, uint8_t* x) {
  const int per_token = args.p.hidden / 8, all = args.p.tokens * per_token;
#pragma unroll 1
  for (int at = threadIdx.x; at < all; at += kThreads) {
    const int token = quotient(at, args.inverse_pairs * 4.0f), eight = at - token * per_token;
    uint8_t* row = x + 2 * token * args.x_stride + 16 * eight;
    const uint4 raw = *reinterpret_cast<const uint4*>(row);
    const TwoParts a = parts_of(raw.x), b = parts_of(raw.y), c = parts_of(raw.z), d = parts_of(raw.w);
    *reinterpret_cast<uint4*>(row) = make_uint4(a.first, b.first, c.first, d.first);
    *reinterpret_cast<uint4*>(row + args.x_stride) = make_uint4(a.rest, b.rest, c.rest, d.rest);
  }
  sync_workers();
}

// A block of 16 values by each thread: less work in all, but fewer threads have some.
__device__ __forceinline__ void quantize_many_tokens(const Args& args, bool half, uint8_t* x) {
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
      const float2 two = widen_two(word, half);
      values[2 * i] = two.x;
      values[2 * i + 1] = two.y;
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
    quantize_many_tokens(args, Case<kKind>::half(p), x);
    return;
  }
#pragma unroll 1
  for (int pass = dynamic ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 32; first < all; first += kThreads) {   // whole warps
      const int at = min(first + static_cast<int>(threadIdx.x) % 32, all - 1), token = quotient(at, args.inverse_pairs);
      uint32_t* pair = reinterpret_cast<uint32_t*>(x + token * args.x_stride) + (at - token * per_token);
      const float2 two = widen_two(*pair, Case<kKind>::half(p));
      const Two v = {two.x, two.y};
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

// The intermediate: GEMM2's operand in shared memory, made by the helping warps for every entry and part of K that the
// block multiplies, of what GEMM1's blocks have finished or of their sums.
using decode::activate_once;

template <Kind kKind>
__device__ __forceinline__ float activate_few(const Problem& p, float gate, float up) {
  const bool usual = kKind != Kind::kGeneral || p.activation <= Activation::kSwigluoai;
  return usual ? swiglu(p, gate, up) : activate_once(p, gate, up);
}

// An entry and part of K whose operand is being made, and one of the entry's slots.
struct Row {
  int entry, expert, column, slot;
};

// GEMM1's sums of two columns of the intermediate: of gate rows and of up rows.
struct SentSums {
  Pair gate, up;
};

// They may not be there yet.
template <Kind kKind>
__device__ __forceinline__ SentSums look_for_sums(const Args& args, uint32_t epoch, const Row& row, int pair) {
  const int place = Case<kKind>::gated(args.p) ? pair + (pair & ~3) : pair;   // gate and up alternate in fours
  const Pair* from = sent_pairs(args, epoch) + (row.slot * args.row_tiles[0] * (kTileRows / 2) + place);
  return {look(from), look(from + (Case<kKind>::gated(args.p) ? 4 : 0))};
}

template <Kind kKind, class Fixed>
__device__ __forceinline__ Two hidden_pair(const Args& args, const Fixed& fixed, const Row& row, int pair,
                                           SentSums& sums) {
  const Problem& p = args.p;
  const uint32_t epoch = fixed.epoch;
  BoundedWait wait;
  while (!(sums.gate.has(epoch) && sums.up.has(epoch))) {
    sums = look_for_sums<kKind>(args, epoch, row, pair);
    check_wait(wait);
  }
  float g[2] = {sums.gate.a(), sums.gate.b()}, u[2] = {sums.up.a(), sums.up.b()};
  float factor = args.scale;
  if (Case<kKind>::dynamic_tokens(p)) {
    factor *= fixed.x_factor[quotient(row.slot, args.inverse_top_k)];
  }
  const float2 alphas = fixed.alphas[row.entry];
  const float alpha1 = alphas.x * factor, alpha2 = alphas.y * factor;
  float bias[4] = {};
  if (Case<kKind>::bias13(p)) {
    const int64_t rows = (Case<kKind>::gated(p) ? 2 : 1) * static_cast<int64_t>(p.inter);
    const float* of = p.w13_bias + row.expert * rows + 2 * pair;
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

// The scale by which a row is quantized; a dynamic one also says what the products lack.
template <Kind kKind, class Fixed>
__device__ __forceinline__ float hidden_gscale(const Args& args, Fixed& fixed, const Row& row, int buffer) {
  const Problem& p = args.p;
  if (!Case<kKind>::dynamic_hidden(p)) {
    return p.a2_gscale[p.a2 == ActScale::kExpert ? row.expert : 0];
  }
  const int column = row.column & (kColumns - 1);  // beyond the entry's rows lanes come along that write nothing else
  const float gscale = nvfp4_dynamic_gscale(fixed.amax[column]);
  fixed.h_factor[buffer][column] = reciprocal(gscale);
  return gscale;
}

// Whether GEMM1's blocks finish the intermediate: rounding needs no more than blocks of 16.
template <Kind kKind>
__device__ __forceinline__ bool finishes_hidden(const Problem& p) {
  return !Case<kKind>::dynamic_tokens(p) && !Case<kKind>::dynamic_hidden(p);
}

// A place in the rows that are being made: a slot's column of the intermediate.
struct HiddenPlace {
  Row row;
  int in_part, pair;  // of columns
  bool inside, real;  // the buffer; the intermediate
};

template <class Fixed>
__device__ __forceinline__ HiddenPlace place_of(const Args& args, const Fixed& fixed, const Work& work,
                                                const Entry& entry, int at, int per_place) {
  const int columns = work.part_tiles * (kTileK / per_place);
  const int row = quotient(at, args.inverse_part_pairs[work.part_bits] * (per_place * 0.5f));
  HiddenPlace place;
  place.in_part = at - row * columns;
  place.pair = work.part * columns + place.in_part;
  place.inside = row < entry.count && place.pair * per_place < args.k_tiles[1] * kTileK;
  place.real = row < entry.count && place.pair * per_place < args.p.inter;
  place.row = {work.entry, entry.expert, row, place.inside ? fixed.slots[entry.first + row] : 0};
  return place;
}

// An entry's rows of a part of K, from GEMM1's sums: their largest magnitudes (`finds`) or their values. Each thread
// makes some pairs at a time, so that all are on their way at once; whole warps come, as eight lanes have a block.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void make_from_sums(const Args& args, Fixed& fixed, const Work& work, const Entry& entry,
                                               int buffer, bool finds, uint8_t* h) {
  constexpr int kAtOnce = 2;
  const Problem& p = args.p;
  const int all = entry.count * work.part_tiles * (kTileK / 2), thread = threadIdx.x - 32 * kFirstHelper;
#pragma unroll 1
  for (int start = thread; start - thread < all; start += kAtOnce * kHelperThreads) {
    SentSums sums[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const HiddenPlace place = place_of(args, fixed, work, entry, start + i * kHelperThreads, 2);
      if (place.real) {
        sums[i] = look_for_sums<kKind>(args, fixed.epoch, place.row, place.pair);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const HiddenPlace place = place_of(args, fixed, work, entry, start + i * kHelperThreads, 2);
      Two v = {0.0f, 0.0f};
      if (place.real) {
        v = hidden_pair<kKind>(args, fixed, place.row, place.pair, sums[i]);
      }
      if (finds) {
        atomicMax(&fixed.amax[place.row.column & (kColumns - 1)], __float_as_uint(max_magnitude(v.a, v.b)));
        continue;
      }
      if (Case<kKind>::quantizes_hidden(p)) {
        v = quantize_pair(v, hidden_gscale<kKind>(args, fixed, place.row, buffer), false);
      }
      if (place.inside) {
        uint8_t* row = h + place.row.column * args.h_stride;
        const __nv_bfloat162 both = __floats2bfloat162_rn(v.a, v.b);
        reinterpret_cast<uint32_t*>(row)[place.in_part] = reinterpret_cast<const uint32_t&>(both);
      }
    }
  }
}

// Four columns of 16 bits to where the operand has them.
template <Kind kKind>
__device__ __forceinline__ void store_four(const Args& args, uint8_t* h, const HiddenPlace& place, uint2 four) {
  if (Case<kKind>::splits(args.p)) {
    uint8_t* row = h + 2 * place.row.column * args.h_stride;
    const TwoParts a = parts_of(four.x), b = parts_of(four.y);
    reinterpret_cast<uint2*>(row)[place.in_part] = make_uint2(a.first, b.first);
    reinterpret_cast<uint2*>(row + args.h_stride)[place.in_part] = make_uint2(a.rest, b.rest);
  } else {
    reinterpret_cast<uint2*>(h + place.row.column * args.h_stride)[place.in_part] = four;
  }
}

// The same where GEMM1's blocks have finished the intermediate: copies it, four columns at a time.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void make_from_finished(const Args& args, Fixed& fixed, const Work& work, const Entry& entry,
                                                   uint8_t* h) {
  constexpr int kAtOnce = 4;
  const int all = entry.count * work.part_tiles * (kTileK / 4), thread = threadIdx.x - 32 * kFirstHelper;
  const int per_slot = args.row_tiles[0] * hidden_pairs_of_tile(kKind);
  const uint32_t epoch = fixed.epoch;
#pragma unroll 1
  for (int start = thread; start < all; start += kAtOnce * kHelperThreads) {
    const Pair* from[kAtOnce];
    Pair pairs[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const HiddenPlace place = place_of(args, fixed, work, entry, start + i * kHelperThreads, 4);
      pairs[i] = {};
      from[i] = nullptr;
      if (place.real) {
        from[i] = sent_pairs(args, epoch) + (place.row.slot * per_slot + place.pair);
        pairs[i] = look(from[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const HiddenPlace place = place_of(args, fixed, work, entry, start + i * kHelperThreads, 4);
      if (from[i] != nullptr) {
        await(pairs[i], from[i], epoch);
      }
      if (place.inside) {
        const uint2 four = make_uint2(static_cast<uint32_t>(pairs[i].first), static_cast<uint32_t>(pairs[i].second));
        store_four<kKind>(args, h, place, four);
      }
    }
  }
}

// The rows of one entry and part of K. All helpers.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void make_rows(const Args& args, Fixed& fixed, const Work& work, int buffer, uint8_t* h) {
  const Entry entry = fixed.entries[work.entry];
  if (finishes_hidden<kKind>(args.p)) {
    make_from_finished<kKind>(args, fixed, work, entry, h);
    return;
  }
  const bool dynamic = Case<kKind>::dynamic_hidden(args.p);
#pragma unroll 1
  for (int pass = dynamic ? 0 : 1; pass < 2; ++pass) {
    make_from_sums<kKind>(args, fixed, work, entry, buffer, pass == 0, h);
    if (dynamic) {
      sync_helpers();
    }
  }
  if (dynamic) {
    if (threadIdx.x % kHelperThreads < kColumns) {
      fixed.amax[threadIdx.x % kHelperThreads] = 0;
    }
    sync_helpers();
  }
}

}  // namespace moeq::sm90::few
