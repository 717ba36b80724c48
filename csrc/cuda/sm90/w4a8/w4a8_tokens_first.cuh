// Tiles of many tokens of fp8_block: tokens are the first factor of the products, 64 a warpgroup, and weights the
// second one, 256 rows in two halves. So a thread has two tokens' sums, and each step of 128 in K multiplies them by
// two numbers of each half (gate or up), where tokens as the second factor take a product for each sum.
//
// A block of GEMM1 makes 128 neighbours of the intermediate, which share a scale: they are rounded where they are made.
// A tile of at most 64 tokens, and what is left, is shared otherwise: each warpgroup has one half. What is left of an
// expert's tokens beyond a multiple of 64, if it is at most 16, is a second factor: as a first one it would be 64.
#pragma once
#include "w4a8_epilogue.cuh"
#include "../device/scans.cuh"
#include "../numerics/act_rounding.cuh"

namespace moeq::sm90::w4a8 {

constexpr int kHalfRows = 128;  // of one instruction

// What a warpgroup multiplies: 64 tokens from `token` on, by one or both halves of the rows, from `half` on; and the
// rest, from `rest` on, by half `warpgroup`.
struct Share {
  int token, half, rest, warpgroup;
};

// [tile of 64 rows][4 * j + 2 * h + b]: row 16 * warp + lane / 4 + 8 * h, token 8 * j + lane % 4 * 2 + b.
struct RestSums {
  float v[2][kRestTokens / 2];
};

// Of a thread, after the last step.
__device__ __forceinline__ RestSums rest_sums(const GemmShared<TokensFirst>& shared) {
  RestSums sums;
#pragma unroll
  for (int i = 0; i < kRestTokens / 4; i++) {
    const float4 four = shared.rest[i][threadIdx.x];
    float* to = &sums.v[i / 2][4 * (i % 2)];
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
  return sums;
}

// [half][4 * j + 2 * h + b]: token 16 * warp + lane / 4 + 8 * h, row 8 * j + lane % 4 * 2 + b.
template <int halves>
struct TokenSums {
  float v[halves][kHalfRows / 2];
};

// As BlockScales, of two blocks `apart` from each other, in two registers less: the next 32 steps' are asked for in L1.
class TwoScales {
 public:
  __device__ __forceinline__ TwoScales(const float* at, int apart, int many) : at_(at), apart_(apart), steps_(many) {
    load(0);
  }

  // Before those of step k, one k after another.
  __device__ __forceinline__ void begin(int k) {
    if (k % 32 == 0 && k > 0) load(k);
    const int next = k + 16 + threadIdx.x % 32;
    if (k % 32 == 16 && next < steps_) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(at_ + next));
      asm volatile("prefetch.global.L1 [%0];" ::"l"(at_ + apart_ + next));
    }
  }
  // Of all lanes together.
  __device__ __forceinline__ float2 both(int k) const { return make_float2(of(mine_.x, k), of(mine_.y, k)); }
  __device__ __forceinline__ float2 one(int k, int which) const {
    const float scale = of(which == 0 ? mine_.x : mine_.y, k);
    return make_float2(scale, scale);
  }

 private:
  __device__ __forceinline__ static float of(float mine, int k) { return __shfl_sync(0xffffffffu, mine, k % 32); }
  __device__ __forceinline__ void load(int first) {
    const int k = first + threadIdx.x % 32;
    mine_ = k < steps_ ? make_float2(__ldg(at_ + k), __ldg(at_ + apart_ + k)) : make_float2(0.0f, 0.0f);
  }

  const float* at_;
  int apart_, steps_;
  float2 mine_;
};

// Scales of gate and up, or of the halves.
template <bool gated>
__device__ __forceinline__ TwoScales scales_of(const GemmArgs& args, const Work& work, const Share& share) {
  const WeightScales& s = args.weight_scales;
  const float* expert = s.data + work.expert * s.expert;
  if (gated) {
    return TwoScales(expert + work.row_block * s.row, s.half, args.k_tiles);
  }
  const int first = work.row_block * 2 + share.half, last = (args.row_tiles - 1) / 2;
  return TwoScales(expert + min(first, last) * s.row, first < last ? s.row : 0, args.k_tiles);
}

// The rest's products of a step. never: see multiply_128.
template <class Policy>
__device__ __forceinline__ void start_rest(float (&part)[kRestTokens], GemmShared<Policy>& shared, int slot,
                                           const Share& share, int never) {
  const uint64_t tokens = swizzled_operand(shared_address(shared.tokens[slot]) + share.rest * kTileK);
  const uint64_t weights = swizzled_operand(shared_address(shared.weights[slot]) + share.warpgroup * 2 * kFp8Bytes);
  multiply_two_16(part, weights, weights + kFp8Bytes / 16, tokens, never);
}

// What they become, of step k. half: of the scales. Returns a word of each load of tokens' scales.
template <bool gated, class Policy>
__device__ __forceinline__ uint32_t add_rest(const float (&part)[kRestTokens], GemmShared<Policy>& shared, int slot,
                                             const Share& share, const TwoScales& scales, int half, int k) {
  const float2 weight = gated ? scales.both(k) : scales.one(k, half);
  float scale[2][kRestTokens / 4];  // [row][token]
#pragma unroll
  for (int j = 0; j < kRestTokens / 8; j++) {
    const float2 group =
        *reinterpret_cast<const float2*>(&shared.groups[slot][share.rest + 8 * j + threadIdx.x % 4 * 2]);
    scale[0][2 * j] = __fmul_rn(weight.x, group.x);
    scale[0][2 * j + 1] = __fmul_rn(weight.x, group.y);
    scale[1][2 * j] = gated ? __fmul_rn(weight.y, group.x) : scale[0][2 * j];
    scale[1][2 * j + 1] = gated ? __fmul_rn(weight.y, group.y) : scale[0][2 * j + 1];
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kRestTokens / 4; i++) {
    float4& sums = shared.rest[i][threadIdx.x];
    float4 sum = sums;
    const int t = 2 * (i % 2);
    sum.x = __fmaf_rn(part[4 * i], scale[0][t], sum.x);
    sum.y = __fmaf_rn(part[4 * i + 1], scale[0][t + 1], sum.y);
    sum.z = __fmaf_rn(part[4 * i + 2], scale[1][t], sum.z);
    sum.w = __fmaf_rn(part[4 * i + 3], scale[1][t + 1], sum.w);
    sums = sum;
  }
  return __float_as_uint(scale[0][0]) | __float_as_uint(scale[0][2]);
}

// A word of each load of a thread's two tokens' scales, from what they became.
__device__ __forceinline__ uint32_t loaded_of(const float (&scale)[2]) {
  return __float_as_uint(scale[0]) | __float_as_uint(scale[1]);
}

template <bool gated, bool rest, int halves, class Policy>
__device__ __forceinline__ void multiply(TokenSums<halves>& sums, GemmShared<Policy>& shared,
                                         Ring<Policy::kStages>& ring, const Share& share, const Steps& steps,
                                         const GemmArgs& args, const Work& work) {
  float part[kHalfRows / 2] = {};
  TwoScales scales = scales_of<gated>(args, work, share);
  const int token = share.token + 16 * (steps.thread / 32) + steps.thread % 32 / 4;
  for (int k = 0; k < steps.many; k++) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    const uint64_t tokens = swizzled_operand(shared_address(shared.tokens[ring.slot]) + share.token * kTileK);
    const uint64_t weights = swizzled_operand(shared_address(shared.weights[ring.slot]) + share.half * 2 * kFp8Bytes);
    float scale[2][2];  // [gate or up, or half][of the thread's tokens]
    float rest_part[kRestTokens] = {};
#pragma unroll
    for (int i = 0; i < halves; i++) {
      multiply_128(part, tokens, weights + i * (2 * kFp8Bytes / 16), steps.many);
      if (i == 0) {
        scales.begin(k);
        const float2 weight = scales.both(k);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float group = shared.groups[ring.slot][token + 8 * h];
          scale[0][h] = __fmul_rn(weight.x, group);
          scale[1][h] = __fmul_rn(weight.y, group);
        }
      }
      wgmma_wait<0>();
      if (!rest && i == halves - 1) release(shared, ring.slot, steps.thread, loaded_of(scale[0]));
      if (rest && i == halves - 1) start_rest(rest_part, shared, ring.slot, share, steps.many);
#pragma unroll
      for (int j = 0; j < kHalfRows / 8; j++) {
#pragma unroll
        for (int at = 4 * j; at < 4 * j + 4; at++) {
          sums.v[i][at] = __fmaf_rn(part[at], scale[gated ? j % 2 : i][at / 2 % 2], sums.v[i][at]);
        }
      }
    }
    if constexpr (rest) {
      const int half = halves == 1 ? 0 : share.warpgroup;
      const uint32_t loaded = add_rest<gated>(rest_part, shared, ring.slot, share, scales, half, k);
      release(shared, ring.slot, steps.thread, loaded | loaded_of(scale[0]));
    }
    ring.advance();
  }
}

// What becomes of a row's sum, by its place in the block: scaled and biased, where there is anything of the kind.
template <bool plain>
struct Finished {
  const WeightRows<TokensFirst::kBlockTiles>& rows;
  __device__ __forceinline__ float operator()(float sum, int at) const {
    return plain ? sum : __fmaf_rn(sum, rows.scale[at], rows.bias[at]);
  }
};

// The activated values of a thread's tokens: of eight rows of gate and of up, two: v[i][8 * q + 2 * h + b].
template <bool plain, int halves>
__device__ __forceinline__ void activate_sums(TokenSums<halves>& sums, const Problem& p,
                                              const Finished<plain>& finished, int half, bool silu_alone) {
#pragma unroll
  for (int i = 0; i < halves; i++) {
#pragma unroll
    for (int at = 0; at < kHalfRows / 2; at++) {
      if (at % 8 >= 4) continue;
      const int row = (half + i) * kHalfRows + at / 4 * 8 + threadIdx.x % 4 * 2 + at % 2;
      const float gate = finished(sums.v[i][at], row), up = finished(sums.v[i][at + 4], row + 8);
      sums.v[i][at] = silu_alone ? __fmul_rn(silu(gate), up) : swiglu(p, gate, up);
    }
  }
}

// Over a group of 128: a thread's values, those of the lanes that have the token, and the other warpgroup's if it has
// the other half.
template <int halves>
__device__ __forceinline__ float2 group_maxima(const TokenSums<halves>& sums, float* exchange, int warpgroup) {
  float2 most = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < halves; i++) {
#pragma unroll
    for (int at = 0; at < kHalfRows / 2; at += 8) {
      most.x = max_magnitude(max_magnitude(most.x, sums.v[i][at]), sums.v[i][at + 1]);
      most.y = max_magnitude(max_magnitude(most.y, sums.v[i][at + 2]), sums.v[i][at + 3]);
    }
  }
  most = make_float2(amax_of_lanes<1, 4>(most.x), amax_of_lanes<1, 4>(most.y));
  if constexpr (halves == 1) {
    const int token = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0) {
      exchange[warpgroup * kPartTokens + token] = most.x;
      exchange[warpgroup * kPartTokens + token + 8] = most.y;
    }
    named_barrier(1, kConsumerThreads<TokensFirst>);
    most.x = max_magnitude(most.x, exchange[(1 - warpgroup) * kPartTokens + token]);
    most.y = max_magnitude(most.y, exchange[(1 - warpgroup) * kPartTokens + token + 8]);
  }
  return most;
}

// Codes of a token's values of a half: [0]: q even, [1]: q odd, two pairs of neighbours a word.
struct HalfCodes {
  uint32_t words[2][2];
};

template <class Scaled>
__device__ __forceinline__ HalfCodes encode_half(const float (&v)[kHalfRows / 2], int h, Scaled scaled) {
  HalfCodes codes;
#pragma unroll
  for (int at = 0; at < 4; at++) {
    const int odd = at / 2, q = 4 * (at % 2) + odd;
    const float* first = &v[8 * q + 2 * h];
    const float* second = &v[8 * (q + 2) + 2 * h];
    codes.words[odd][at % 2] = encode4(scaled(first[0]), scaled(first[1]), scaled(second[0]), scaled(second[1]));
  }
  return codes;
}

// A lane has two of each four bytes of a piece, its neighbour the others: one gets the pieces of even q, one the
// others.
__device__ __forceinline__ uint4 whole_piece(const HalfCodes& codes) {
  const bool odd = threadIdx.x % 2;
  uint32_t words[4];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const uint32_t mine = odd ? codes.words[1][m] : codes.words[0][m];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? codes.words[0][m] : codes.words[1][m], 1);
    const uint32_t low = odd ? got : mine, high = odd ? mine : got;
    words[2 * m] = __byte_perm(low, high, 0x5410);
    words[2 * m + 1] = __byte_perm(low, high, 0x7632);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <int halves>
struct TokenCodes {
  HalfCodes half[halves];
};

// The rows' 128 values, as codes in GEMM2's operand, and their scale.
template <int halves>
__device__ __forceinline__ void store_codes(const GemmArgs& args, const Work& work, const Share& share,
                                            const TokenSums<halves>& sums, float2 most) {
  const int lane = threadIdx.x % 32, groups = args.row_tiles / TokensFirst::kBlockTiles;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int token = share.token + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * h;
    const int local = work.first_row - work.start + token;
    const int64_t row = int64_t{work.start} * groups + int64_t{work.row_block} * work.padded + local;
    const float by = scale_of(h == 0 ? most.x : most.y);
    const TokenCodes<halves> codes = with_scaling(by, true, [&](auto scaled) {
      TokenCodes<halves> made;
#pragma unroll
      for (int i = 0; i < halves; i++) made.half[i] = encode_half(sums.v[i], h, scaled);
      return made;
    });
#pragma unroll
    for (int i = 0; i < halves; i++) {
      const uint4 piece = whole_piece(codes.half[i]);
      const int q = 4 * (share.half + i) + 2 * (lane % 2) + lane % 4 / 2;
      if (token < work.rows) {
        *reinterpret_cast<uint4*>(args.codes + row * kTileK + (q ^ local % 8) * 16) = piece;
      }
    }
    if (lane % 4 == 0 && share.half == 0 && token < work.rows) args.code_factor[row] = by;
  }
}

// Of 16 rows a thread has four neighbours of the output.
template <bool plain, int halves>
__device__ __forceinline__ void store_output(const GemmArgs& args, const GemmShared<TokensFirst>& shared,
                                             const Work& work, const Share& share, const TokenSums<halves>& sums,
                                             const Finished<plain>& finished, int slot) {
  const int hidden = args.problem.hidden, lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int token = share.token + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * h;
    if (token >= work.rows) continue;
    const int64_t row = int64_t{shared.slots[slot][token]} * hidden;
#pragma unroll
    for (int i = 0; i < halves; i++) {
#pragma unroll
      for (int j = 0; j < kHalfRows / 8; j += 2) {
        const int in_block = (share.half + i) * kHalfRows + 8 * j;
        const int column = work.row_block * 2 * kHalfRows + in_block + lane % 4 * 4, at = in_block + lane % 4 * 2;
        const float* low = &sums.v[i][4 * j + 2 * h];
        const float* high = low + 4;
        const float values[4] = {finished(low[0], at), finished(high[0], at + 8), finished(low[1], at + 1),
                                 finished(high[1], at + 9)};
        if (column >= hidden) continue;
        if (args.y_wide) {
          *reinterpret_cast<float4*>(static_cast<float*>(args.y) + row + column) =
              make_float4(values[0], values[1], values[2], values[3]);
        } else {
          const __nv_bfloat162 first = __floats2bfloat162_rn(values[0], values[1]);
          const __nv_bfloat162 second = __floats2bfloat162_rn(values[2], values[3]);
          *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.y) + row + column) =
              make_uint2(*reinterpret_cast<const uint32_t*>(&first), *reinterpret_cast<const uint32_t*>(&second));
        }
      }
    }
  }
}

// The rest in GEMM1: a thread has gate and up of four tokens in two columns of the block, 32 apart.
struct RestValues {
  float v[2][kRestTokens / 4];
};

template <bool plain>
__device__ __forceinline__ RestValues activate_rest(const RestSums& sums, const Problem& p,
                                                    const Finished<plain>& finished, int warpgroup) {
  const bool silu_alone = is_plain(p);
  RestValues values;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = (2 * warpgroup + i) * kTileRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int t = 0; t < kRestTokens / 4; t++) {
      const float* sum = &sums.v[i][4 * (t / 2) + t % 2];
      const float gate = finished(sum[0], row), up = finished(sum[2], row + 8);
      values.v[i][t] = silu_alone ? __fmul_rn(silu(gate), up) : swiglu(p, gate, up);
    }
  }
  return values;
}

__device__ __forceinline__ int rest_token(int t) { return t / 2 * 8 + threadIdx.x % 4 * 2 + t % 2; }

// exchange: [warps][kRestTokens].
__device__ __forceinline__ float4 rest_maxima(const RestValues& values, float* exchange) {
  float most[kRestTokens / 4];
#pragma unroll
  for (int t = 0; t < kRestTokens / 4; t++) {
    most[t] = amax_of_lanes<4, 32>(max_magnitude(max_magnitude(0.0f, values.v[0][t]), values.v[1][t]));
    if (threadIdx.x % 32 < 4) exchange[threadIdx.x / 32 * kRestTokens + rest_token(t)] = most[t];
  }
  named_barrier(1, kConsumerThreads<TokensFirst>);
#pragma unroll
  for (int t = 0; t < kRestTokens / 4; t++) {
    for (int warp = 0; warp < kConsumerThreads<TokensFirst> / 32; warp++) {
      most[t] = max_magnitude(most[t], exchange[warp * kRestTokens + rest_token(t)]);
    }
  }
  return make_float4(most[0], most[1], most[2], most[3]);
}

__device__ __forceinline__ void store_rest_codes(const GemmArgs& args, const Work& work, const Share& share,
                                                 const RestValues& values, float4 maxima) {
  const int groups = args.row_tiles / TokensFirst::kBlockTiles;
  const float most[4] = {maxima.x, maxima.y, maxima.z, maxima.w};
#pragma unroll
  for (int t = 0; t < kRestTokens / 4; t++) {
    const int token = share.rest + rest_token(t), local = work.first_row - work.start + token;
    if (token >= work.rows) continue;
    const int64_t row = int64_t{work.start} * groups + int64_t{work.row_block} * work.padded + local;
    const float by = scale_of(most[t]);
    const uint32_t codes = with_scaling(
        by, true, [&](auto scaled) { return encode4(scaled(values.v[0][t]), scaled(values.v[1][t]), 0.0f, 0.0f); });
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int k = threadIdx.x % 128 / 32 * 8 + threadIdx.x % 32 / 4 + 32 * i;  // of the half's 64
      const int piece = 4 * share.warpgroup + k % 16 / 4;
      args.codes[row * kTileK + (piece ^ local % 8) * 16 + k / 16 * 4 + k % 4] = codes >> 8 * i;
    }
    if (share.warpgroup == 0 && threadIdx.x < 4) args.code_factor[row] = by;
  }
}

template <bool plain>
__device__ __forceinline__ void store_rest_output(const GemmArgs& args, const GemmShared<TokensFirst>& shared,
                                                  const Work& work, const Share& share, const RestSums& sums,
                                                  const Finished<plain>& finished, int slot) {
  const int hidden = args.problem.hidden, warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int tile = 2 * share.warpgroup + i, at = tile * kTileRows + 16 * warp + g;
    const int column = work.row_block * 2 * kHalfRows + tile * kTileRows + 16 * warp + 2 * g;
    if (column >= hidden) continue;
#pragma unroll
    for (int t = 0; t < kRestTokens / 4; t++) {
      const int token = share.rest + rest_token(t);
      if (token >= work.rows) continue;
      const int64_t to = int64_t{shared.slots[slot][token]} * hidden + column;
      const float* sum = &sums.v[i][4 * (t / 2) + t % 2];
      const float first = finished(sum[0], at), second = finished(sum[2], at + 8);
      if (args.y_wide) {
        *reinterpret_cast<float2*>(static_cast<float*>(args.y) + to) = make_float2(first, second);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(args.y) + to) =
            __floats2bfloat162_rn(first, second);
      }
    }
  }
}

template <Finish finish, bool plain, bool rest, int halves>
__device__ __forceinline__ void finish_tile(const GemmArgs& args, GemmShared<TokensFirst>& shared, const Work& work,
                                            const Share& share, TokenSums<halves>& sums, int slot) {
  const Finished<plain> finished{shared.rows[slot]};
  if constexpr (finish == Finish::kSwiglu) {
    activate_sums(sums, args.problem, finished, share.half, is_plain(args.problem));
    store_codes(args, work, share, sums, group_maxima(sums, shared.factor[slot], share.warpgroup));
    if constexpr (rest) {
      const RestValues values = activate_rest(rest_sums(shared), args.problem, finished, share.warpgroup);
      store_rest_codes(args, work, share, values, rest_maxima(values, shared.factor[slot] + 2 * kPartTokens));
    }
  } else {
    store_output(args, shared, work, share, sums, finished, slot);
    if constexpr (rest) store_rest_output(args, shared, work, share, rest_sums(shared), finished, slot);
  }
}

template <Finish finish, bool rest, int halves>
__device__ __forceinline__ void make_tokens(const GemmArgs& args, GemmShared<TokensFirst>& shared,
                                            Ring<TokensFirst::kStages>& ring, const Work& work, const Share& share,
                                            const Ring<kWorkSlots>& works) {
  TokenSums<halves> sums = {};
  if constexpr (rest) {
#pragma unroll
    for (int i = 0; i < kRestTokens / 4; i++) shared.rest[i][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const Steps steps{kept(args.k_tiles), kept(threadIdx.x % 128)};
  multiply<finish == Finish::kSwiglu, rest>(sums, shared, ring, share, steps, args, work);
  barrier_wait(shared_address(&shared.rows_full[works.slot]), works.parity);
  const Work again = shared.work[works.slot];  // not in registers meanwhile
  const Problem& p = args.problem;
  constexpr bool first = finish == Finish::kSwiglu;
  const bool plain = (first ? p.g1_alphas : p.g2_alphas) == nullptr && (first ? p.w13_bias : p.w2_bias) == nullptr;
  if (plain) {
    finish_tile<finish, true, rest>(args, shared, again, share, sums, works.slot);
  } else {
    finish_tile<finish, false, rest>(args, shared, again, share, sums, works.slot);
  }
}

template <Finish finish>
__device__ __forceinline__ void make_tile(const GemmArgs& args, GemmShared<TokensFirst>& shared,
                                          Ring<TokensFirst::kStages>& ring, const Work& work, int warpgroup,
                                          const Ring<kWorkSlots>& works) {
  constexpr int kTwo = 2 * kPartTokens;
  if (work.rows > kTwo) {
    make_tokens<finish, true, 2>(args, shared, ring, work, {warpgroup * kPartTokens, 0, kTwo, warpgroup}, works);
  } else if (work.rows > kPartTokens + kRestTokens) {
    make_tokens<finish, false, 2>(args, shared, ring, work, {warpgroup * kPartTokens, 0, kTwo, warpgroup}, works);
  } else if (work.rows > kPartTokens) {
    make_tokens<finish, true, 1>(args, shared, ring, work, {0, warpgroup, kPartTokens, warpgroup}, works);
  } else {
    make_tokens<finish, false, 1>(args, shared, ring, work, {0, warpgroup, kPartTokens, warpgroup}, works);
  }
}

}  // namespace moeq::sm90::w4a8
