// How thread blocks hand each other numbers without barriers: every value travels with the number of the launch, in one
// access of 8 bytes, and whoever needs it reads until the number is right. Nothing is ever cleared: numbers only grow.
//
// Launches that take the whole device share one exchange, two values in 16 bytes (value, number, value, number), and
// numbers, of which each block counts its own: all launches have as many blocks. On two streams, blocks of the next
// launch may start where blocks of this one have ended, while others go on. So launches take turns at two halves of the
// exchange, and no block ends before all of its launch have their number: each launch takes all shared memory of all
// multiprocessors, so that a third one cannot start before the first has ended.
//
// Any other launch, of a green context or under MPS, may overlap with others like it. It has an exchange of its own in
// its workspace, zeroed before it, one half, and one number.
#pragma once
#include <cuda_fp16.h>

#include "../device/bounded_wait.cuh"
#include "../decode_few/decode_few.h"

namespace moeq::sm90::few {

constexpr uint32_t kOnlyEpoch = 2;  // of a launch with an exchange of its own: even, for the first half

__device__ __forceinline__ uint32_t epoch_of(const uint32_t* epochs, int block) {
  uint32_t epoch;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(epoch) : "l"(epochs + block) : "memory");
  return epoch;
}

// Launches have odd and even numbers in turn, and none has 0, which is what memory holds that was never written.
__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch) { return epoch == 0xffffffffu ? 2 : epoch + 1; }

__device__ __forceinline__ void set_epoch(uint32_t* epochs, uint32_t epoch) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(epochs + blockIdx.x), "r"(epoch) : "memory");
}

// By one warp, some blocks of each lane at a time.
__device__ __forceinline__ void await_epochs(const uint32_t* epochs, uint32_t epoch) {
  constexpr int kAtOnce = 5;
  BoundedWait wait;
  const int blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int first = threadIdx.x % 32; first < blocks;) {
    int32_t least = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = first + 32 * i < blocks ? first + 32 * i : first;
      least = min(least, static_cast<int32_t>(epoch_of(epochs, block) - epoch));
    }
    first += least < 0 ? 0 : 32 * kAtOnce;
    if (wait.is_over()) {
      give_up("decode_few_kernel", "other thread blocks did not begin within seconds");
    }
  }
}

__device__ __forceinline__ uint4* half_of(const Args& args, uint32_t epoch) {
  return args.exchange + (epoch & 1) * args.half_pairs;
}

__device__ __forceinline__ void send_pair(const Args& args, int64_t at, float a, float b, uint32_t epoch) {
  const uint64_t first = static_cast<uint64_t>(epoch) << 32 | __float_as_uint(a);
  const uint64_t second = static_cast<uint64_t>(epoch) << 32 | __float_as_uint(b);
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(half_of(args, epoch) + at), "l"(first), "l"(second)
               : "memory");
}

// Two values as bfloat16, or float16, in the place of one.
__device__ __forceinline__ void send_rounded(const Args& args, int64_t at, float a, float b, uint32_t epoch,
                                             bool half) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  const __half2 halves = __floats2half2_rn(a, b);
  const uint32_t word = half ? reinterpret_cast<const uint32_t&>(halves) : reinterpret_cast<const uint32_t&>(both);
  const uint64_t item = static_cast<uint64_t>(epoch) << 32 | word;
  uint64_t* to = reinterpret_cast<uint64_t*>(half_of(args, epoch)) + at;
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(item) : "memory");
}

// One word by itself.
__device__ __forceinline__ void send_word(uint64_t* to, uint32_t word, uint32_t epoch) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(static_cast<uint64_t>(epoch) << 32 | word)
               : "memory");
}

__device__ __forceinline__ uint64_t look_at_word(const uint64_t* at) {
  uint64_t item;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(item) : "l"(at) : "memory");
  return item;
}

struct Pair {
  uint64_t first, second;

  __device__ __forceinline__ bool has(uint32_t epoch) const {
    return static_cast<uint32_t>(first >> 32) == epoch && static_cast<uint32_t>(second >> 32) == epoch;
  }
  __device__ __forceinline__ float a() const { return __uint_as_float(static_cast<uint32_t>(first)); }
  __device__ __forceinline__ float b() const { return __uint_as_float(static_cast<uint32_t>(second)); }
};

__device__ __forceinline__ const Pair* sent_pairs(const Args& args, uint32_t epoch) {
  return reinterpret_cast<const Pair*>(half_of(args, epoch));
}

__device__ __forceinline__ Pair look(const Pair* at) {
  Pair pair;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(pair.first), "=l"(pair.second)
               : "l"(at)
               : "memory");
  return pair;
}

// Where blocks disagree about the routing, nobody sends what some of them wait for.
__device__ __forceinline__ void check_wait(BoundedWait& wait) {
  if (wait.is_over()) {
    give_up("decode_few_kernel",
            "other thread blocks did not send their sums within seconds: ids or logits must not change under a launch");
  }
}

__device__ __forceinline__ void await(Pair& pair, const Pair* at, uint32_t epoch) {
  BoundedWait wait;
  while (!pair.has(epoch)) {
    pair = look(at);
    check_wait(wait);
  }
}

}  // namespace moeq::sm90::few
