// Flags between GPUs: told with release and awaited with acquire, both at system scope, and never for ever.
#pragma once
#include <cstdio>

#include "buffer.cuh"

// As the host's <assert.h> declares it, but also where NDEBUG is set.
extern "C" __host__ __device__ void __assert_fail(const char* assertion, const char* file, unsigned int line,
                                                  const char* function) noexcept __attribute__((__noreturn__));

namespace moeq::ep {

__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Ends the process's use of the GPU, after a line that says who did not come. A process that is aborted may lose that
// line, which goes to its stdout; the assertion's goes to stderr at once, and has the same in its thread and function.
__device__ __noinline__ inline void give_up [[noreturn]](Phase phase, int rank, int peer, uint32_t round, uint64_t ns) {
  printf("torch_moe_ops: expert parallel: rank %d has waited %.1f s for rank %d in %s (block %d, round %u)\n", rank,
         static_cast<double>(ns) * 1e-9, peer, phase == kDispatch ? "dispatch" : "combine",
         static_cast<int>(blockIdx.x), round);
  __assert_fail("the rank that has this thread's number did not come in time", "torch_moe_ops", __LINE__,
                phase == kDispatch ? "ep_dispatch" : "ep_combine");
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
    const uint64_t start = nanoseconds();
    uint64_t seen = load_acquire(flag);
    while (static_cast<uint32_t>(seen >> 32) != round) {
      const uint64_t waited = nanoseconds() - start;
      if (waited > ranks.limit_ns) {
        give_up(phase, ranks.rank, peer, round, waited);
      }
      seen = load_acquire(flag);
    }
    values[peer] = static_cast<uint32_t>(seen);
  }
  __syncthreads();
}

}  // namespace moeq::ep
