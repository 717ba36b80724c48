// What a block does before it multiplies: barriers, slots sorted, tokens on their way, the launch counted.
#pragma once
#include "decode_few_feed.cuh"
#include "decode_few_sort.cuh"

namespace moeq::sm90::few {

// The parameters that will be read, asked for at once: of this warp alone, or one line by each warp.
template <class Parameters>
__device__ __forceinline__ void touch_parameters(const Parameters& args, int line) {
  constexpr int kLine = 64 / sizeof(int);
  const int word = line * kLine;
  if (word < static_cast<int>(sizeof(Parameters) / sizeof(int))) {
    asm volatile("" ::"r"(reinterpret_cast<const int*>(&args)[word]));
  }
}

// Beyond the tokens' ends: zeros up to whole tiles.
template <class Fixed>
__device__ __forceinline__ void clear_padding(const Args& args, Fixed& fixed, uint8_t* base) {
  const int tail = args.k_tiles[0] * kTileK - args.p.hidden;
  if (static_cast<int>(threadIdx.x) < tail) {
#pragma unroll 1
    for (int token = 0; token < args.rows; ++token) {
      uint8_t* row = base + args.x_offset + token * args.x_stride;
      reinterpret_cast<__nv_bfloat16*>(row)[args.p.hidden + threadIdx.x] = __float2bfloat16_rn(0.0f);
    }
  }
  if (threadIdx.x < kMaxTokensPacked) {
    fixed.amax[threadIdx.x] = 0;
  }
  if (threadIdx.x < kMaxima * kColumns) {
    fixed.h_amax[threadIdx.x / kColumns][threadIdx.x % kColumns] = 0;
  }
}

// By the warp that copies: nothing is under way before it knows the experts. `id` is a lane's, where ids are given.
// Where they are waited for, it goes through the same code before, with others (decode_few_product.cuh says why).
template <Kind kKind, bool kRehearses, class Fixed>
__device__ __forceinline__ void sort_slots(const Args& args, Fixed& fixed, const Work& work, int id) {
  const int lane = lane_of_warp();
#pragma unroll 1
  for (bool rehearses = kRehearses;; rehearses = false) {
    if (!rehearses && args.p.router.logits != nullptr) {
      named_barrier(kIdsKnown, 32 * args.p.tokens + 32);
      id = fixed.ids[lane];
    }
    const int expert = lane < args.slots ? local_expert(args.p, rehearses ? lane : id) : -1;
    if (args.columns == 1) {
      sort_one<kKind>(args, fixed, work, expert);
    } else {
      const int entries = sort_few(fixed, args.columns, expert);
      if (lane < 2) {
        fixed.work[lane] = share_of<kKind>(args, lane, entries);
      }
    }
    if (!rehearses) return;
  }
}

// By the warps that multiply. The first four sort, where slots are many; the next ones route a token each.
constexpr int kFirstRouter = 4;
static_assert(32 * kFirstRouter == kMaxSlots && kFirstRouter + kMaxTokens <= kWarps, "a warp has one task");

template <class Fixed>
__device__ __forceinline__ void prepare_slots(const Args& args, Fixed& fixed, uint8_t* base, bool few_slots) {
  const int thread = threadIdx.x, router = thread / 32 - kFirstRouter;
  const bool routes = args.p.router.logits != nullptr, sorts = !few_slots && thread < Fixed::kSlots;
  int id = -1;
  if (sorts && !routes && thread < args.slots) {
    id = args.p.topk_ids[thread];   // on its way meanwhile
  }
  if (!few_slots) {
    clear_slots_of_experts<Fixed::kSlots>(args, base);
    sync_workers();
  }
  if (!kGathers<Fixed> && routes && router >= 0 && router < args.p.tokens) {
    keep_router(args, fixed);   // each for itself: all write the same
    route_one(fixed, router, 32 * args.p.tokens + (few_slots ? 32 : Fixed::kSlots));
  }
  if (sorts) {
    if (!kGathers<Fixed> && routes) {
      named_barrier(kIdsKnown, 32 * args.p.tokens + Fixed::kSlots);
      id = fixed.ids[thread];
    }
    const int expert = thread < args.slots ? local_expert(args.p, id) : -1;
    const int entries = sort_many(fixed, slots_of_experts<Fixed::kSlots>(args, base), args.columns, expert);
    if (thread < 2) {
      fixed.work[thread] = share_of<kGathers<Fixed> ? Kind::kGathered : Kind::kPlain>(args, thread, entries);
    }
  }
}

// Ids or logits that are given. The members are those of OwnLogits (decode_few_product.cuh), too.
struct GivenRouting {
  static constexpr bool kRehearses = false;   // whether warps that wait for ids go through what follows before
  const Args& args;
  template <class Fixed>
  __device__ __forceinline__ void prepare(Fixed& fixed, uint8_t* base, bool few_slots) const {
    clear_padding(args, fixed, base);
    prepare_slots(args, fixed, base, few_slots);
  }
  template <class Fixed>
  __device__ __forceinline__ void copy(Fixed& fixed, uint8_t* base) const {
    if constexpr (!kGathers<Fixed>) {   // else the copying warp does, of those that are multiplied
      copy_tokens(args, fixed, base);
    }
  }
  __device__ __forceinline__ void touch(int line) const { touch_parameters(args, line); }
  template <class Fixed>
  __device__ __forceinline__ void rehearse(Fixed&) const {}
  template <class Fixed>
  static __device__ __forceinline__ void counted(const Fixed&) {}
};

// By all but the warp that copies.
template <class Routing, class Fixed>
__device__ __forceinline__ void prepare_block(const Args& args, const Routing& routing, Fixed& fixed, uint8_t* base,
                                              bool few_slots) {
  const int warp = threadIdx.x / 32;
  if (warp < kWarps) {
    init_barriers(fixed);
    named_arrive(kBarriersMade, kThreads + 32);
  }
  routing.touch(warp);
  if (warp == kFirstHelper) {
    routing.copy(fixed, base);
  } else if (warp == kFirstHelper + 1) {
    if (lane_of_warp() == 0) {
      count_launch(args, fixed);
    }
    routing.counted(fixed);
  } else if (Routing::kRehearses && warp == kFirstHelper + 2) {
    routing.rehearse(fixed);
  } else if (warp < kWarps) {
    routing.prepare(fixed, base, few_slots);
  }
}

}  // namespace moeq::sm90::few
