// What a block does before it multiplies: barriers, slots sorted, tokens on their way, the launch counted.
#pragma once
#include "decode_few_feed.cuh"
#include "decode_few_shared.cuh"
#include "../device/scans.cuh"

namespace moeq::sm90::few {

// -1 if it is not one of ours. Any id may come.
__device__ __forceinline__ int local_expert(const Problem& p, int id) {
  const uint32_t local = static_cast<uint32_t>(id) - static_cast<uint32_t>(p.expert_offset);
  return local < static_cast<uint32_t>(p.experts) ? static_cast<int>(local) : -1;
}

// One token: each of its slots is an entry. A lane each of one warp. `work` is the share number `lane` if all experts
// are ours, worked out before they were known.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void sort_one(const Args& args, Fixed& fixed, Work work, int expert) {
  const int lane = lane_of_warp();
  const uint32_t ours = __ballot_sync(0xffffffffu, expert >= 0);
  const int entry = __popc(ours & ((1u << lane) - 1));
  fixed.place[lane] = expert < 0 ? kForeign : entry;
  if (expert >= 0) {
    fixed.entries[entry] = {expert, entry, 1};
    fixed.slots[entry] = lane;
  }
  const bool all = __popc(ours) == args.slots;
  if (lane < 2) {
    fixed.work[lane] = all ? work : share_of<kKind>(args, lane, __popc(ours));
  }
  if (Case<kKind>::kShared && lane == kSharedUnit) {
    fixed.work[kSharedUnit] = work;
    fixed.work[kSharedUnit].count *= all;
  }
}

// Up to 32 slots of several tokens, a lane each of one warp. Entries come in the order of their first slots; returns
// how many. Not inlined, like the following: more code between what every launch runs is slower. It gets values, as the
// parameters of a kernel by reference are read from memory, 700 cycles each.
template <class Fixed>
__device__ __noinline__ inline int sort_few(Fixed& fixed, int columns, int expert) {
  const int lane = lane_of_warp();
  const Chunk chunk = chunk_of(expert, columns);
  if (chunk.opens) {
    fixed.entries[chunk.opened_number] = {expert, chunk.opened_first, chunk.count};
  }
  fixed.place[lane] = expert < 0 ? kForeign : chunk.number;
  if (expert >= 0) {
    fixed.slots[chunk.first + chunk.column] = lane;
  }
  return chunk.chunks;
}

// A bit for each slot: those that chose an expert.
template <int kSlots>
struct alignas(16) SlotBits {
  uint32_t words[kSlots / 32];
};

// Of all experts. They lie where sums will.
template <int kSlots>
__device__ __forceinline__ SlotBits<kSlots>* slots_of_experts(const Args& args, uint8_t* base) {
  return reinterpret_cast<SlotBits<kSlots>*>(base + args.sums_offset);
}

// All workers, before they meet.
template <int kSlots>
__device__ __forceinline__ void clear_slots_of_experts(const Args& args, uint8_t* base) {
#pragma unroll 1
  for (int expert = threadIdx.x; expert < args.p.experts; expert += kThreads) {
    slots_of_experts<kSlots>(args, base)[expert] = {};
  }
}

// A slot among those of its expert: how many come before it, how many there are, and which one opens its entry.
struct Rank {
  int rank, total, opener;
};

template <int kSlots>
__device__ __forceinline__ Rank rank_of(const SlotBits<kSlots>& slots, int slot, int columns) {
  constexpr int kWords = kSlots / 32;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(slots.words + i);
    words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
  }
  Rank r = {0, 0, slot};
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t below = slot >= 32 * (w + 1) ? 0xffffffffu : slot < 32 * w ? 0u : (1u << slot % 32) - 1;
    r.rank += __popc(words[w] & below);
    r.total += __popc(words[w]);
  }
  int left = r.rank & -columns;   // only a token that chose an expert twice makes more entries than one
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
    for (uint32_t word = words[w]; word != 0 && left >= 0; word &= word - 1) {
      r.opener = 32 * w + __ffs(word) - 1;
      --left;
    }
  }
  return r;
}

// Any number of slots, one of each of the first warps' threads.
template <class Fixed>
__device__ __noinline__ inline int sort_many(Fixed& fixed, SlotBits<Fixed::kSlots>* slots_of, int columns, int expert) {
  const int slot = threadIdx.x, lane = slot % 32, warp = slot / 32, last = columns - 1;
  SlotBits<Fixed::kSlots>* of_expert = slots_of + max(expert, 0);
  if (expert >= 0) {
    atomicOr(of_expert->words + warp, 1u << lane);
  }
  named_barrier(kSortersMeet, Fixed::kSlots);
  const Rank ranked = rank_of(*of_expert, slot, columns);
  const int rank = ranked.rank, total = ranked.total, opener = ranked.opener;
  const bool opens = expert >= 0 && (rank & last) == 0;
  const uint32_t mine = opens ? 1u << 16 | static_cast<uint32_t>(min(total - rank, columns)) : 0;
  uint32_t sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, sum, step);
    sum += lane >= step ? below : 0;
  }
  if (lane == 31) {
    fixed.openers[warp] = sum;
  }
  named_barrier(kSortersMeet, Fixed::kSlots);
  uint32_t all = 0;
  sum -= mine;
#pragma unroll
  for (int w = 0; w < Fixed::kSlots / 32; ++w) {
    sum += w < warp ? fixed.openers[w] : 0;
    all += fixed.openers[w];
  }
  fixed.experts[slot] = static_cast<int>(sum);   // an opener's entry << 16 | first
  if (opens) {
    fixed.entries[sum >> 16] = {expert, static_cast<int>(sum & 0xffff), static_cast<int>(mine & 0xffff)};
  }
  named_barrier(kSortersMeet, Fixed::kSlots);
  const uint32_t of_opener = static_cast<uint32_t>(fixed.experts[opener]);
  fixed.place[slot] = expert < 0 ? kForeign : of_opener >> 16;
  if (expert >= 0) {
    fixed.slots[(of_opener & 0xffff) + (rank & last)] = slot;
  }
  return static_cast<int>(all >> 16);
}

// The parameters that will be read, asked for at once: of this warp alone, or one line by each warp.
__device__ __forceinline__ void touch_parameters(const Args& args, int line) {
  constexpr int kLine = 64 / sizeof(int);
  const int word = line * kLine;
  if (word < static_cast<int>(sizeof(Args) / sizeof(int))) {
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

// By the warp that copies: nothing is under way before it knows the experts. `id` is a lane's.
template <Kind kKind, class Fixed>
__device__ __forceinline__ void sort_slots(const Args& args, Fixed& fixed, const Work& work, int id) {
  const int lane = lane_of_warp();
  const int expert = lane < args.slots ? local_expert(args.p, id) : -1;
  if (args.columns == 1) {
    sort_one<kKind>(args, fixed, work, expert);
    return;
  }
  const int entries = sort_few(fixed, args.columns, expert);
  if (lane < 2) {
    fixed.work[lane] = share_of<kKind>(args, lane, entries);
  }
}

// By the warps that multiply, where slots are many: the first ones sort them.
template <class Fixed>
__device__ __forceinline__ void sort_many_slots(const Args& args, Fixed& fixed, uint8_t* base) {
  const int thread = threadIdx.x;
  const bool has_slot = thread < Fixed::kSlots && thread < args.slots;
  const int id = has_slot ? args.p.topk_ids[thread] : -1;   // on its way meanwhile
  clear_slots_of_experts<Fixed::kSlots>(args, base);
  sync_workers();
  if (thread >= Fixed::kSlots) {
    return;
  }
  const int expert = has_slot ? local_expert(args.p, id) : -1;
  const int entries = sort_many(fixed, slots_of_experts<Fixed::kSlots>(args, base), args.columns, expert);
  if (thread < 2) {
    fixed.work[thread] = share_of<kGathers<Fixed> ? Kind::kGathered : Kind::kPlain>(args, thread, entries);
  }
}
static_assert(kMaxSlots <= kThreads && kGatheredSlots <= kThreads, "a thread for each");

// By all but the warp that copies. Only what touches no memory of the device comes before the wait.
template <class Fixed>
__device__ __forceinline__ void prepare_block(const Args& args, Fixed& fixed, uint8_t* base, bool few_slots) {
  const int warp = threadIdx.x / 32;
  if (warp < kWarps) {
    init_barriers(fixed);
    named_arrive(kBarriersMade, kThreads + 32);
  }
  touch_parameters(args, warp);
  wait_for_previous_kernel();
  if (warp < kWarps) {
    clear_padding(args, fixed, base);
    if (!few_slots) {
      sort_many_slots(args, fixed, base);
    }
  } else if (!kGathers<Fixed> && warp == kFirstHelper) {  // else the copying warp does, of those that are multiplied
    copy_tokens(args, fixed, base);
  } else if (warp == kFirstHelper + 1 && lane_of_warp() == 0) {
    count_launch(args, fixed);
  }
}

}  // namespace moeq::sm90::few
