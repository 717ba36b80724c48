// The routing, which every thread block works out for itself: slots sorted by expert, the entries that they make, and
// the block's share of their weights.
#pragma once
#include "decode_few_shared.cuh"
#include "route.cuh"

namespace moeq::sm90::few {

// Of GEMM `gemm`, by one thread.
__device__ __forceinline__ void take_share(const Args& args, Fixed& fixed, int gemm, int entries) {
  const int parts = entries == 0 ? 1 : args.parts[gemm][entries];
  const int row_tiles = args.row_tiles[gemm];
  const uint32_t units = static_cast<uint32_t>(entries * parts * row_tiles);
  const uint32_t begin = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;
  Work work;
  const uint32_t stripe = begin / row_tiles;
  work.row_tile = begin - stripe * row_tiles;
  work.entry = stripe / parts;
  work.part = stripe - work.entry * parts;
  work.count = end - begin;
  work.parts = parts;
  work.part_tiles = (args.k_tiles[gemm] + parts - 1) / parts;
  const int stages = (work.part_tiles + args.stage_tiles - 1) / args.stage_tiles;
  work.stage_tiles = (work.part_tiles + stages - 1) / stages;
  fixed.work[gemm] = work;
}

// -1 if it is not one of ours. Any id may come.
__device__ __forceinline__ int local_expert(const Problem& p, int id) {
  const uint32_t local = static_cast<uint32_t>(id) - static_cast<uint32_t>(p.expert_offset);
  return local < static_cast<uint32_t>(p.experts) ? static_cast<int>(local) : -1;
}

// Up to 32 slots, a lane each of one warp. Entries come in the order of their first slots.
__device__ __forceinline__ void sort_few(const Args& args, Fixed& fixed, int expert) {
  const int lane = threadIdx.x % 32, last = args.columns - 1;
  const uint32_t same = __match_any_sync(0xffffffffu, expert);
  const uint32_t below = (1u << lane) - 1;
  const int rank = __popc(same & below);
  const bool opens = expert >= 0 && (rank & last) == 0;
  const uint32_t openers = __ballot_sync(0xffffffffu, opens);
  const int count = opens ? min(__popc(same) - rank, args.columns) : 0;
  int first = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, first, step);
    first += lane >= step ? other : 0;
  }
  first -= count;
  const int entry = __popc(openers & below);
  const int opening = rank & ~last;
  const int opener = expert < 0 ? lane : opening == 0 ? __ffs(same) - 1 : __fns(same, 0, opening + 1);
  const int my_entry = __shfl_sync(0xffffffffu, entry, opener);
  const int my_first = __shfl_sync(0xffffffffu, first, opener);
  if (opens) {
    fixed.entries[entry] = {expert, first, count};
  }
  fixed.place[lane] = expert < 0 ? kForeign : my_entry;
  if (expert >= 0) {
    fixed.slots[my_first + (rank & last)] = lane;
  }
  const int entries = __popc(openers);
  if (lane < 2) {
    take_share(args, fixed, lane, entries);
  }
}

// Any number of slots, one of each of the first four warps' threads.
__device__ __noinline__ inline void sort_many(const Args& args, Fixed& fixed) {
  const int slot = threadIdx.x, lane = slot % 32, warp = slot / 32, last = args.columns - 1;
  int expert = -1;
  if (slot < args.slots) {
    expert = local_expert(args.p, args.p.router.logits != nullptr ? fixed.ids[slot] : args.p.topk_ids[slot]);
  }
  fixed.experts[slot] = expert;
  named_barrier(2, kMaxSlots);
  int rank = 0, total = 0, opener = slot;
  for (int other = 0; other < args.slots; other += 4) {
    const int4 four = *reinterpret_cast<const int4*>(&fixed.experts[other]);
    const int experts[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool same = experts[i] == expert, before = same && other + i < slot;
      opener = same && other + i <= slot && (total & last) == 0 ? other + i : opener;
      rank += before;
      total += same;
    }
  }
  const bool opens = expert >= 0 && (rank & last) == 0;
  const uint32_t mine = opens ? 1u << 16 | static_cast<uint32_t>(min(total - rank, args.columns)) : 0;
  uint32_t sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, sum, step);
    sum += lane >= step ? below : 0;
  }
  if (lane == 31) {
    fixed.openers[warp] = sum;
  }
  named_barrier(2, kMaxSlots);
  uint32_t all = 0;
  sum -= mine;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    sum += w < warp ? fixed.openers[w] : 0;
    all += fixed.openers[w];
  }
  fixed.experts[slot] = static_cast<int>(sum);   // an opener's entry << 16 | first
  if (opens) {
    fixed.entries[sum >> 16] = {expert, static_cast<int>(sum & 0xffff), static_cast<int>(mine & 0xffff)};
  }
  named_barrier(2, kMaxSlots);
  const uint32_t of_opener = static_cast<uint32_t>(fixed.experts[opener]);
  fixed.place[slot] = expert < 0 ? kForeign : of_opener >> 16;
  if (expert >= 0) {
    fixed.slots[(of_opener & 0xffff) + (rank & last)] = slot;
  }
  if (slot < 2) {
    take_share(args, fixed, slot, static_cast<int>(all >> 16));
  }
}

// Warps 0 to 15, a token each.
__device__ __noinline__ inline void route_tokens(const Args& args, Fixed& fixed) {
  const Problem& p = args.p;
  const int token = threadIdx.x / 32;
  if (token < p.tokens) {
    route_token(p.router, token, fixed.ids + token * p.top_k, fixed.weights + token * p.top_k);
  }
}

}  // namespace moeq::sm90::few
