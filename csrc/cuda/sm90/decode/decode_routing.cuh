// The routing, which every thread block works out for itself: slots sorted by expert, and the entries that they make.
#pragma once
#include "../device/scans.cuh"
#include "decode_shared.cuh"

namespace moeq::sm90::decode {

// What the whole block's threads add up before each; `total` is everybody's sum.
__device__ __forceinline__ uint32_t exclusive_scan(Fixed& fixed, uint32_t value, uint32_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, sum, step);
    sum += lane >= step ? below : 0;
  }
  if (lane == 31) {
    fixed.warp_sums[warp] = sum;
  }
  sync_workers();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    const uint32_t other = fixed.warp_sums[w];
    before += w < warp ? other : 0;
    total += other;
  }
  return before + sum - value;
}

// Up to 32 slots, a lane of warp 0 each. Entries come in the order of their first slots.
template <int kColumns>
__device__ inline void route_few(const Args& args, const Shared& s) {
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const Problem& p = args.p;
    const int expert = lane < args.slots ? local_expert(p, lane) : -1;
    const Chunk chunk = chunk_of(expert, kColumns);
    if (chunk.opens) {
      s.entries[chunk.opened_number] = {static_cast<uint16_t>(expert), static_cast<uint16_t>(chunk.opened_first),
                                        static_cast<uint16_t>(chunk.count), 0};
    }
    if (lane < args.slots) {
      s.place[lane] = expert < 0 ? kForeign : static_cast<uint32_t>(chunk.number << 8 | chunk.column);
      if (expert >= 0) {
        s.slots[chunk.first + chunk.column] = static_cast<uint16_t>(lane);
      }
    }
    const int widest = __reduce_max_sync(0xffffffffu, chunk.count);
    if (lane == 0) {
      s.fixed->entries = chunk.chunks;
      s.fixed->widest = widest;
    }
  }
  sync_workers();
}

// Any number of slots. Scratch: the ring, [experts] counts, then cursors, then the slots in arrival order.
template <int kColumns>
__device__ inline void route_many(const Args& args, const Shared& s) {
  const Problem& p = args.p;
  uint32_t* counts = reinterpret_cast<uint32_t*>(s.ring);
  uint32_t* bases = counts + p.experts;
  uint16_t* arrived = reinterpret_cast<uint16_t*>(bases + p.experts);
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    counts[e] = 0;
  }
  sync_workers();
  for (int slot = threadIdx.x; slot < args.slots; slot += kThreads) {
    const int expert = local_expert(p, slot);
    s.place[slot] = expert;   // -1 is kForeign
    if (expert >= 0) {
      atomicAdd(&counts[expert], 1u);
    }
  }
  sync_workers();
  const int each = (p.experts + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, p.experts), end = min(begin + each, p.experts);
  uint32_t mine = 0;  // entries << 16 | slots
  for (int e = begin; e < end; ++e) {
    mine += (counts[e] + kColumns - 1) / kColumns << 16 | counts[e];
  }
  uint32_t total;
  uint32_t before = exclusive_scan(*s.fixed, mine, total);
  int widest = 0;
  for (int e = begin; e < end; ++e) {
    const uint32_t count = counts[e];
    bases[e] = before;
    counts[e] = 0;
    widest = max(widest, min(static_cast<int>(count), kColumns));
    for (uint32_t done = 0; done < count; done += kColumns) {
      s.entries[(before >> 16) + done / kColumns] = {
          static_cast<uint16_t>(e), static_cast<uint16_t>((before & 0xffff) + done),
          static_cast<uint16_t>(min(count - done, static_cast<uint32_t>(kColumns))), 0};
    }
    before += (count + kColumns - 1) / kColumns << 16 | count;
  }
  widest = __reduce_max_sync(0xffffffffu, widest);
  if (threadIdx.x == 0) {
    s.fixed->entries = total >> 16;
    s.fixed->widest = 0;
  }
  sync_workers();
  if (threadIdx.x % 32 == 0) {
    atomicMax(&s.fixed->widest, widest);
  }
  for (int slot = threadIdx.x; slot < args.slots; slot += kThreads) {
    const uint32_t expert = s.place[slot];
    if (expert != kForeign) {
      arrived[(bases[expert] & 0xffff) + atomicAdd(&counts[expert], 1u)] = static_cast<uint16_t>(slot);
    }
  }
  sync_workers();
  // Every block must come to the same order: ascending.
  for (int slot = threadIdx.x; slot < args.slots; slot += kThreads) {
    const uint32_t expert = s.place[slot];
    if (expert == kForeign) {
      continue;
    }
    const uint32_t base = bases[expert] & 0xffff, count = counts[expert];
    uint32_t rank = 0;
    for (uint32_t i = 0; i < count; ++i) {
      rank += arrived[base + i] < slot;
    }
    s.slots[base + rank] = static_cast<uint16_t>(slot);
    s.place[slot] = ((bases[expert] >> 16) + rank / kColumns) << 8 | rank % kColumns;
  }
  sync_workers();
}

// All workers' threads; the ring is scratch memory meanwhile.
template <int kColumns>   // tokens of an entry at most
__device__ __forceinline__ void route(const Args& args, const Shared& s) {
  if (args.slots <= 32) {
    route_few<kColumns>(args, s);
  } else {
    route_many<kColumns>(args, s);
  }
}

}  // namespace moeq::sm90::decode
