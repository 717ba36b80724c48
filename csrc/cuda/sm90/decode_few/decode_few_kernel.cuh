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
#include "decode_few_combine.cuh"
#include "decode_few_feed.cuh"
#include "decode_few_fp8_gemm.cuh"
#include "decode_few_gemm.cuh"
#include "decode_few_help.cuh"
#include "decode_few_packed_gemm.cuh"
#include "decode_few_prepare.cuh"

namespace moeq::sm90::few {

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
    if (p.router.logits == nullptr) {
      fixed.weights[slot] = p.topk_weights[slot];
    }
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
  if constexpr (kRoundsToE4m3<Format>) {
    round_tokens<kRoundsGroups<Format>, kInHalf<Format>>(args, fixed, base + args.x_offset);
  } else if (Case<kKind>::quantizes_tokens(args.p)) {
    quantize_tokens<kKind>(args, fixed, base + args.x_offset);
  }
  Turn turn = {0, 0, 0};
  int number = 0;
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    run_gemm<Format, kKind>(args, fixed, base, gemm, turn, number);
  }
}

// The warp that copies. It asks for ids first, and for weights as soon as it has sorted them.
template <class Format, Kind kKind, class Routing, class Fixed>
__device__ __forceinline__ void copy(const Args& args, Fixed& fixed, uint8_t* base, bool few_slots) {
  const int lane = lane_of_warp();
  int id = -1;
  if (lane < args.slots && args.p.router.logits == nullptr) {
    id = args.p.topk_ids[lane];  // on its way while barriers are made
  }
  touch_parameters(args, lane);
  const Work work = Case<kKind>::kShared ? share_of_whole(args, lane & 3) : share_of<kKind>(args, lane & 1, args.slots);
  named_barrier(kBarriersMade, kThreads + 32);
  if (few_slots) {
    sort_slots<kKind, Routing::kRehearses>(args, fixed, work, id);
    __syncwarp();
    named_arrive(kPrepared, kBlockThreads);
  } else {
    named_barrier(kPrepared, kBlockThreads);
  }
  if (lane == 0) {
    copy_weights<Format, kKind>(args, fixed, base);
  }
}

template <class Format, Kind kKind, class Routing>
__device__ __forceinline__ void run_block(const Args& args, const Routing& routing) {
  extern __shared__ __align__(128) uint8_t base[];
  auto& fixed = *reinterpret_cast<FixedOf<slots_of(kKind)>*>(base);
  const int warp = threadIdx.x / 32;
  const bool few_slots = args.slots <= kFewSlots;
  if (warp == kCopier) {
    copy<Format, kKind, Routing>(args, fixed, base, few_slots);
    return;
  }
  prepare_block(args, routing, fixed, base, few_slots);
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
__global__ void __launch_bounds__(kBlockThreads, 1) decode_few_kernel(const __grid_constant__ Args args) {
  run_block<Format, kKind>(args, GivenRouting{args});
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
