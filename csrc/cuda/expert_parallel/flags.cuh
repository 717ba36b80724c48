// Flags between GPUs: told with release and awaited with acquire, both at system scope, and never for ever.
#pragma once
#include "patience.cuh"

namespace moeq::ep {

__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// To every other rank: this block has done its part of the round. All threads of the block; their writes come before.
// The barrier orders the writes of the block's threads before the fence of those that tell; the fence carries them, and
// the block's reads of earlier rounds, to the whole system.
__device__ __forceinline__ void tell(const Ranks& ranks, Phase phase, uint32_t round, uint32_t value) {
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < ranks.size && peer != ranks.rank) {
    __threadfence_system();
    store_release(&ranks.buffer(peer)->flags[phase][round % kSlots][ranks.rank][blockIdx.x],
                  static_cast<uint64_t>(round) << 32 | value);
  }
}

// Until every other rank has told the round; values[peer], in shared memory, becomes what it told. All threads.
__device__ __forceinline__ void await(const Ranks& ranks, Phase phase, uint32_t round, uint32_t* values) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < ranks.size && peer != ranks.rank) {
    const uint64_t* flag = &ranks.buffer(ranks.rank)->flags[phase][round % kSlots][peer][blockIdx.x];
    Patience patience;
    uint64_t seen = load_acquire(flag);
    while (static_cast<uint32_t>(seen >> 32) != round) {
      patience.wait(ranks, phase, peer, round);
      seen = load_acquire(flag);
    }
    values[peer] = static_cast<uint32_t>(seen);
  }
  __syncthreads();
}

}  // namespace moeq::ep
