// How long a kernel waits for another rank, and what it says when it does no longer.
#pragma once
#include <cstdio>

#include "buffer.cuh"

// As the host's <assert.h> declares it, but also where NDEBUG is set.
extern "C" __host__ __device__ void __assert_fail(const char* assertion, const char* file, unsigned int line,
                                                  const char* function) noexcept __attribute__((__noreturn__));

namespace moeq::ep {

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ const char* absence_of(int rank) {
  switch (rank) {
    case 0:
      return "rank 0 came in time";
    case 1:
      return "rank 1 came in time";
    case 2:
      return "rank 2 came in time";
    case 3:
      return "rank 3 came in time";
    case 4:
      return "rank 4 came in time";
    case 5:
      return "rank 5 came in time";
    case 6:
      return "rank 6 came in time";
    default:
      return "rank 7 came in time";
  }
}

// Ends the process's use of the GPU, after a line that says who did not come. A process that is aborted may lose that
// line, which goes to its stdout; the assertion's goes to stderr at once. One thread says so for each rank that is
// missing, and the others wait for the end: a line of every thread would be thousands.
__device__ __noinline__ inline void give_up(const Ranks& ranks, Phase phase, int peer, uint32_t round, uint64_t ns) {
  if (atomicExch(&ranks.buffer(ranks.rank)->missing[peer], 1) != 0) {
    return;
  }
  printf("torch_moe_ops: expert parallel: rank %d has waited %.1f s for rank %d in %s (block %d, round %u)\n",
         ranks.rank, static_cast<double>(ns) * 1e-9, peer, phase == kDispatch ? "dispatch" : "combine",
         static_cast<int>(blockIdx.x), round);
  __assert_fail(absence_of(peer), "torch_moe_ops", __LINE__, phase == kDispatch ? "ep_dispatch" : "ep_combine");
}

// Of one wait.
class Patience {
 public:
  // After a look that was in vain.
  __device__ __forceinline__ void wait(const Ranks& ranks, Phase phase, int peer, uint32_t round) {
    if (++looks_ % kLooks != 0) {
      return;
    }
    const uint64_t now = nanoseconds();
    start_ = start_ == 0 ? now : start_;
    if (now - start_ > ranks.limit_ns) {
      give_up(ranks, phase, peer, round, now - start_);
    }
  }

 private:
  static constexpr uint32_t kLooks = 64;  // between looks at the clock
  uint32_t looks_ = 0;
  uint64_t start_ = 0;
};

}  // namespace moeq::ep
