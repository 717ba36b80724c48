// Decode of very few tokens: latency is everything.
//
// One thread block per multiprocessor, all of them resident. The weights that a block multiplies are an equal and fixed
// share, known as soon as the ids are, so that its copies of both GEMMs' weights are under way from the start. Blocks
// exchange through memory without barriers (decode_exchange.cuh): GEMM1's row tiles, finished or as sums where rounding
// needs more of them, and GEMM2's sums.
//
// Every warp has one task: 16 multiply (decode_few_gemm.cuh), one copies (decode_few_feed.cuh), seven help
// (decode_few_help.cuh). What is not needed before the first copy is done beside it, not before: barriers, tokens,
// router weights, alphas.
#pragma once
#include <cuda_fp16.h>

#include "decode_few_feed.cuh"
#include "decode_few_fp8_gemm.cuh"
#include "decode_few_gemm.cuh"
#include "decode_few_help.cuh"
#include "decode_few_prepare.cuh"
#include "decode_few_shared.cuh"
#include "../decode/decode_exchange.cuh"

namespace moeq::sm90::few {

__device__ __forceinline__ void store_two(const Problem& p, int64_t at, float a, float b) {
  if (p.out_type == OutType::kBfloat16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + at) = __floats2bfloat162_rn(a, b);
  } else if (p.out_type == OutType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(a, b);
  } else {
    *reinterpret_cast<__half2*>(static_cast<__half*>(p.out) + at) = __floats2half2_rn(a, b);
  }
}

// Two rows of a slot: weight * (alpha2 * sums + bias), on the lane of the slot's first part; 0 on the others'.
template <Kind kKind, class Fixed>
__device__ __forceinline__ float2 find_output(const Args& args, const Fixed& fixed, int token, int pair, int item,
                                              uint32_t epoch) {
  const Problem& p = args.p;
  const int bits = fixed.work[1].part_bits, parts = 1 << bits, part = item & (parts - 1);
  const int slot = token * p.top_k + (item >> bits), per_slot = args.row_tiles[1] * (kTileRows / 2);
  const bool ours = item < p.top_k << bits && fixed.place[slot] != kForeign;
  Pair found = {};
  if (ours) {
    const Pair* from = sent_pairs(args, epoch) + (args.outputs + (part * args.slots + slot) * per_slot + pair);
    await(found, from, epoch);
  }
  float2 y = {found.a(), found.b()};
  for (int step = 1; step < parts; step *= 2) {
    y.x += __shfl_xor_sync(0xffffffffu, y.x, step);
    y.y += __shfl_xor_sync(0xffffffffu, y.y, step);
  }
  if (!ours || part != 0) {
    return {0.0f, 0.0f};
  }
  const float alpha = fixed.output_alphas[slot], weight = fixed.weights[slot];
  y.x *= alpha, y.y *= alpha;
  if (Case<kKind>::bias2(p)) {
    const float* of = p.w2_bias + static_cast<int64_t>(fixed.entries[fixed.place[slot]].expert) * p.hidden + 2 * pair;
    y.x += of[0], y.y += of[1];
  }
  return {y.x * weight, y.y * weight};
}

__device__ __forceinline__ int place_in_combine() {
  const int warp = threadIdx.x / 32, last = kFirstHelper + kHelpers - 1;
  return 32 * (warp > kCopier ? last - warp : last - 1 - warp) + lane_of_warp();
}

// out[token] = sum over its slots, ascending, of weight * (alpha2 * sums + bias), in float32. Eight lanes have two rows
// of a token; each looks for the sums of every eighth part of a slot, and all add up what they have found. All warps
// but the one that copies, the last first: helpers have the least to do.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void combine(const Args& args, const Fixed& fixed) {
  constexpr int kLanes = 8;
  const Problem& p = args.p;
  const int per_token = p.hidden / 2, all = p.tokens * per_token;
  const int each = quotient(all + gridDim.x - 1, args.inverse_grid);
  const int items = p.top_k << fixed.work[1].part_bits, thread = place_in_combine();
  const int begin = blockIdx.x * each, end = min(begin + each, all);
#pragma unroll 1
  for (int group = begin + (thread / 32) * (32 / kLanes); group < end; group += (kThreads + kHelperThreads) / kLanes) {
    const int at = group + thread % 32 / kLanes, pair_of_all = min(at, end - 1);
    const int token = quotient(pair_of_all, args.inverse_pairs), pair = pair_of_all - token * per_token;
    float2 sum = {0.0f, 0.0f};
#pragma unroll 1
    for (int round = 0; round < items; round += kLanes) {
      const float2 mine = find_output<kKind>(args, fixed, token, pair, round + thread % kLanes, fixed.epoch);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        sum.x += __shfl_sync(0xffffffffu, mine.x, i, kLanes);
        sum.y += __shfl_sync(0xffffffffu, mine.y, i, kLanes);
      }
    }
    if (thread % kLanes == 0 && at < end) {
      store_two(p, static_cast<int64_t>(token) * p.hidden + 2 * pair, sum.x, sum.y);
    }
  }
}

// The same of more tokens, most of whose slots may be another rank's, and whose units are not parted: two lanes have
// two rows of a token, each looks for the sums of four of its slots at once.
template <class Fixed>
__device__ __forceinline__ void combine_gathered(const Args& args, const Fixed& fixed) {
  constexpr int kLanes = 2, kAtOnce = 4;
  const Problem& p = args.p;
  const int per_token = p.hidden / 2, all = p.tokens * per_token, per_slot = args.row_tiles[1] * (kTileRows / 2);
  const int each = quotient(all + gridDim.x - 1, args.inverse_grid), thread = place_in_combine();
  const int begin = blockIdx.x * each, end = min(begin + each, all);
#pragma unroll 1
  for (int group = begin + (thread / 32) * (32 / kLanes); group < end; group += (kThreads + kHelperThreads) / kLanes) {
    const int at = group + thread % 32 / kLanes, pair_of_all = min(at, end - 1);
    const int token = quotient(pair_of_all, args.inverse_pairs), pair = pair_of_all - token * per_token;
    float2 sum = {0.0f, 0.0f};
#pragma unroll 1
    for (int round = 0; round < p.top_k; round += kLanes * kAtOnce) {
      const Pair* from[kAtOnce];
      Pair found[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = round + i * kLanes + thread % kLanes, slot = token * p.top_k + item;
        const bool ours = item < p.top_k && fixed.place[slot] != kForeign;
        from[i] = nullptr;
        found[i] = {};
        if (ours) {
          from[i] = sent_pairs(args, fixed.epoch) + (args.outputs + slot * per_slot + pair);
          found[i] = look(from[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float2 y = {0.0f, 0.0f};
        if (from[i] != nullptr) {
          const int slot = token * p.top_k + round + i * kLanes + thread % kLanes;
          await(found[i], from[i], fixed.epoch);
          const float alpha = fixed.output_alphas[slot], weight = fixed.weights[slot];
          y = {found[i].a() * alpha * weight, found[i].b() * alpha * weight};
        }
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          sum.x += __shfl_sync(0xffffffffu, y.x, lane, kLanes);
          sum.y += __shfl_sync(0xffffffffu, y.y, lane, kLanes);
        }
      }
    }
    if (thread % kLanes == 0 && at < end) {
      store_two(p, static_cast<int64_t>(token) * p.hidden + 2 * pair, sum.x, sum.y);
    }
  }
}

// Of slots and entries, loaded while the first weights are under way. Helpers.
template <class Fixed>
__device__ __forceinline__ void load_shares(const Args& args, Fixed& fixed) {
  const Problem& p = args.p;
  constexpr int kRounds = (Fixed::kSlots + kHelperThreads - 1) / kHelperThreads;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int slot = threadIdx.x - 32 * kFirstHelper + round * kHelperThreads;
    if (slot >= args.slots || fixed.place[slot] == kForeign) {
      continue;
    }
    const int expert = fixed.entries[fixed.place[slot]].expert;
    fixed.weights[slot] = p.topk_weights[slot];
    fixed.output_alphas[slot] = (p.g2_alphas == nullptr ? 1.0f : p.g2_alphas[expert]) * args.scale;
    float2 alphas = {1.0f, 1.0f};
    if (p.g1_alphas != nullptr) {
      const float* of = p.g1_alphas + static_cast<int64_t>(expert) * p.alphas13;
      alphas = {of[0], of[p.alphas13 - 1]};
    }
    fixed.alphas[fixed.place[slot]] = alphas;  // the same from all slots of an entry
  }
}

template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void work(const Args& args, Fixed& fixed, uint8_t* base) {
  if constexpr (!kGathers<Fixed>) {
    barrier_wait(shared_address(&fixed.tokens), 0);
  }
  if constexpr (kRoundsToE4m3<Format> && kGathers<Fixed>) {
    // Rows are rounded when they are there.
  } else if constexpr (kRoundsToE4m3<Format>) {
    round_tokens<kRoundsGroups<Format>, kInHalf<Format>, kKind>(args, fixed, base + args.x_offset);
  } else if (Case<kKind>::quantizes_tokens(args.p)) {
    quantize_tokens<kKind>(args, fixed, base + args.x_offset);
  } else if (Case<kKind>::splits(args.p)) {
    split_tokens(args, base + args.x_offset);
  }
  Turn turn = {0, 0, 0};
  int number = 0;
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    run_gemm<Format, kKind>(args, fixed, base, gemm, turn, number);
  }
}

// The warp that copies. It asks for ids first, and for weights as soon as it has sorted them.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void copy(const Args& args, Fixed& fixed, uint8_t* base, bool few_slots) {
  const int lane = lane_of_warp();
  touch_parameters(args, lane);
  const Work work = Case<kKind>::kShared ? share_of_whole(args, lane & 3) : share_of<kKind>(args, lane & 1, args.slots);
  wait_for_previous_kernel();
  const int id = lane < args.slots ? args.p.topk_ids[lane] : -1;  // on its way while barriers are made
  named_barrier(kBarriersMade, kThreads + 32);
  if (few_slots) {
    sort_slots<kKind>(args, fixed, work, id);
    __syncwarp();
    named_arrive(kPrepared, kBlockThreads);
  } else {
    named_barrier(kPrepared, kBlockThreads);
  }
  if (lane == 0) {
    copy_weights<Format, kKind>(args, fixed, base);
  }
}

// Whatever lies in front and behind may be under way: a block waits before it reads or writes memory, and lets others
// begin when it has multiplied. Not earlier: a launch that takes all multiprocessors, as this one does, keeps other
// streams' blocks from being placed while it waits for room.
template <class Format, Kind kKind>
__global__ void __launch_bounds__(kBlockThreads, 1) decode_few_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t base[];
  auto& fixed = *reinterpret_cast<FixedOf<slots_of(kKind)>*>(base);
  const int warp = threadIdx.x / 32;
  const bool few_slots = args.slots <= kFewSlots;
  if (warp == kCopier) {
    copy<Format, kKind>(args, fixed, base, few_slots);
    return;
  }
  prepare_block(args, fixed, base, few_slots);
  named_barrier(kPrepared, kBlockThreads);
  if (warp < kWarps) {
    work<Format, kKind>(args, fixed, base);
  } else {
    load_shares(args, fixed);
    if (Case<kKind>::dynamic_tokens(args.p)) {
      named_barrier(kFactorsKnown, kThreads + kHelperThreads);
    }
    sync_helpers();
    help<Format, kKind>(args, fixed, base);
  }
  named_barrier(kMultiplied, kThreads + kHelperThreads);
  allow_next_kernel();
  if (warp == 0 && args.epochs != nullptr) {  // it has nothing to combine, or comes last
    await_epochs(args.epochs, fixed.epoch);
  }
  if constexpr (Case<kKind>::kGathered) {
    combine_gathered(args, fixed);
  } else {
    combine<kKind>(args, fixed);
  }
}

template <class Format, Kind kKind>
const void* kernel() {
  return reinterpret_cast<const void*>(decode_few_kernel<Format, kKind>);
}

template <class Format>
const void* kernel_of(Kind kind) {
  return kind == Kind::kPlain         ? kernel<Format, Kind::kPlain>()
         : kind == Kind::kPlainShared ? kernel<Format, Kind::kPlainShared>()
                                      : kernel<Format, Kind::kGeneral>();
}

}  // namespace moeq::sm90::few
