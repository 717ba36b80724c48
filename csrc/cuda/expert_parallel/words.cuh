// Messages of few bytes: half of every 8-byte word is data, the other half the number of the round. Words are written
// and read whole, so that nothing has to be ordered, and a message takes one way over the link and no flag after it.
#pragma once
#include "flags.cuh"

namespace moeq::ep {

__device__ __forceinline__ void store_words(ulonglong2* target, ulonglong2 words) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(target), "l"(words.x), "l"(words.y) : "memory");
}

__device__ __forceinline__ ulonglong2 load_words(const ulonglong2* source) {
  ulonglong2 words;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words.x), "=l"(words.y) : "l"(source) : "memory");
  return words;
}

// Where this thread's vector from `sender` lies in a rank's Buffer.
__device__ __forceinline__ ulonglong2* words_at(Buffer* buffer, Phase phase, uint32_t round, int sender) {
  return &buffer->words[phase][round % kWordSlots][sender][blockIdx.x][2 * threadIdx.x];
}

__device__ __forceinline__ void send_words(ulonglong2* target, const uint4& vector, uint32_t round) {
  const uint64_t mark = static_cast<uint64_t>(round) << 32;
  store_words(target, ulonglong2{mark | vector.x, mark | vector.y});
  store_words(target + 1, ulonglong2{mark | vector.z, mark | vector.w});
}

__device__ __forceinline__ bool is_of(ulonglong2 words, uint32_t round) {
  return static_cast<uint32_t>(words.x >> 32) == round && static_cast<uint32_t>(words.y >> 32) == round;
}

// Waits for this thread's vector from a rank, as long as await() does.
__device__ __forceinline__ uint4 receive_words(const Ranks& ranks, Phase phase, uint32_t round, int peer) {
  const ulonglong2* source = words_at(ranks.buffer(ranks.rank), phase, round, peer);
  ulonglong2 low = load_words(source), high = load_words(source + 1);
  if (!is_of(low, round) || !is_of(high, round)) {
    const uint64_t start = nanoseconds();
    do {
      const uint64_t waited = nanoseconds() - start;
      if (waited > ranks.limit_ns) {
        give_up(phase, ranks.rank, peer, round, waited);
      }
      low = load_words(source);
      high = load_words(source + 1);
    } while (!is_of(low, round) || !is_of(high, round));
  }
  return make_uint4(static_cast<uint32_t>(low.x), static_cast<uint32_t>(low.y), static_cast<uint32_t>(high.x),
                    static_cast<uint32_t>(high.y));
}

}  // namespace moeq::ep
