// Words that carry their round: a message of few rows needs no flag, and no fence.
//
// A word is one 64-bit access, 4 bytes of the message beside the round. Who waits for a word reads it until it has the
// round: then its 4 bytes are those of the round as well, whatever the order in which words arrive. There are two
// slots, by round. What a thread writes in round n is over a word of round n - 2, which the other rank has read: its
// kernel of round n - 1 came after that of n - 2 had ended, and this rank's kernel of round n - 1 has ended with words
// of that one, in this very block. So in each round every block takes words of every other rank.
//
// Rounds are 32-bit numbers, and a thread that had nothing to send for 2^32 rounds would leave a word that looks new.
// In the first rounds of every kRenewal, one for each slot, all threads of the block send, the idle ones too.
#pragma once
#include "patience.cuh"

namespace moeq::ep {

constexpr uint32_t kRenewal = 65536;
static_assert(kRenewal % kWordSlots == 0);

// Two accesses of 64 bits each: nothing is assumed of the 128 together.
__device__ __forceinline__ void store_words(Words* target, const Words& words) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(target), "l"(words.first), "l"(words.second)
               : "memory");
}

__device__ __forceinline__ Words load_words(const Words* source) {
  Words words;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words.first), "=l"(words.second)
               : "l"(source)
               : "memory");
  return words;
}

// See csrc/cuda/sm90/launch/launches.h: kernels here are launched so where their code has these instructions.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A block's next round, and this thread's vector in it.
class WordRound {
 public:
  __device__ __forceinline__ WordRound(const Ranks& ranks, Phase phase)
      : ranks_(ranks), phase_(phase), round_(*counter(ranks) + 1) {}

  // To another rank: a vector, or nothing.
  __device__ __forceinline__ void give(int peer, const uint4& vector, bool given) const {
    if (!given && round_ % kRenewal >= kWordSlots) {
      return;
    }
    Words(*words)[kWordThreads] = ranks_.buffer(peer)->words[round_ % kWordSlots][ranks_.rank][blockIdx.x];
    store_words(&words[0][threadIdx.x], {marked(vector.x), marked(vector.y)});
    store_words(&words[1][threadIdx.x], {marked(vector.z), marked(vector.w)});
  }

  // From all other ranks, a vector each: taken[rank].
  template <int most_ranks>
  __device__ __forceinline__ void take(uint4 (&taken)[most_ranks]) const {
    Words halves[most_ranks][2];
#pragma unroll
    for (int rank = 0; rank < most_ranks; ++rank) {  // all of them in flight together
      if (is_other(rank)) {
        halves[rank][0] = load_words(place(rank, 0));
        halves[rank][1] = load_words(place(rank, 1));
      }
    }
#pragma unroll
    for (int rank = 0; rank < most_ranks; ++rank) {
      if (is_other(rank)) {
        Patience patience;
        while (!came(halves[rank][0]) || !came(halves[rank][1])) {
          patience.wait(ranks_, phase_, rank, round_);
          halves[rank][0] = load_words(place(rank, 0));
          halves[rank][1] = load_words(place(rank, 1));
        }
        taken[rank] =
            make_uint4(static_cast<uint32_t>(halves[rank][0].first), static_cast<uint32_t>(halves[rank][0].second),
                       static_cast<uint32_t>(halves[rank][1].first), static_cast<uint32_t>(halves[rank][1].second));
      }
    }
  }

  // All threads of the block, once.
  __device__ __forceinline__ void end() const {
    __syncthreads();  // all have read the counter
    if (threadIdx.x == 0) {
      *counter(ranks_) = round_;
    }
  }

 private:
  __device__ static __forceinline__ uint32_t* counter(const Ranks& ranks) {
    return &ranks.buffer(ranks.rank)->word_rounds[blockIdx.x];
  }

  __device__ __forceinline__ const Words* place(int rank, int half) const {
    return &ranks_.buffer(ranks_.rank)->words[round_ % kWordSlots][rank][blockIdx.x][half][threadIdx.x];
  }

  __device__ __forceinline__ bool is_other(int rank) const { return rank < ranks_.size && rank != ranks_.rank; }

  __device__ __forceinline__ uint64_t marked(uint32_t bytes) const {
    return static_cast<uint64_t>(round_) << 32 | bytes;
  }

  __device__ __forceinline__ bool came(const Words& words) const {
    return static_cast<uint32_t>(words.first >> 32) == round_ && static_cast<uint32_t>(words.second >> 32) == round_;
  }

  const Ranks& ranks_;
  Phase phase_;
  uint32_t round_;
};

}  // namespace moeq::ep
