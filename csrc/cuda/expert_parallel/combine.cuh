// The sums of all ranks' partial rows of this rank's tokens, in float32 in ascending rank order, rounded once.
//
// A block writes its range of the partial rows of every other rank's tokens into that rank's Buffer, from which that
// rank adds them: partial rows cross the link once and are not staged where they are made. Many rows go with flags, few
// rows as words that carry their round.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../load16.cuh"
#include "flags.cuh"
#include "words.cuh"

namespace moeq::ep {

enum class Out : int { kFloat32, kBfloat16, kFloat16 };

struct CombineArgs {
  const uint4* partial;  // [size * max_tokens, hidden_size]
  void* out;  // [tokens, hidden_size]
  int64_t elements;  // of it
  Out out_type;
  Ranks ranks;
  Share share;  // vectors: of the rows of one rank
};

template <Out type>
__device__ __forceinline__ uint32_t narrow(float value) {
  if constexpr (type == Out::kBfloat16) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  } else {
    return __half_as_ushort(__float2half_rn(value));
  }
}

template <Out type, int count>
__device__ __forceinline__ void store_narrow(void* out, int64_t element, const float (&values)[count]) {
  uint32_t words[count / 2];
#pragma unroll
  for (int i = 0; i < count / 2; ++i) {
    words[i] = narrow<type>(values[2 * i]) | narrow<type>(values[2 * i + 1]) << 16;
  }
  auto* target = static_cast<uint16_t*>(out) + element;
  if constexpr (count == 8) {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  }
}

// args: out and out_type.
template <class Args, int count>
__device__ __forceinline__ void store_sum(const Args& args, int64_t element, const float (&values)[count]) {
  if (args.out_type == Out::kBfloat16) {
    return store_narrow<Out::kBfloat16>(args.out, element, values);
  }
  if (args.out_type == Out::kFloat16) {
    return store_narrow<Out::kFloat16>(args.out, element, values);
  }
  auto* target = reinterpret_cast<float4*>(static_cast<float*>(args.out) + element);
#pragma unroll
  for (int i = 0; i < count / 4; ++i) {
    target[i] = make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
  }
}

// The sum of a vector of each rank, in ascending order.
template <class Element, int most_ranks>
__device__ __forceinline__ void store_sum_of(const CombineArgs& args, int64_t vector,
                                             const uint4 (&loaded)[most_ranks]) {
  constexpr int kCount = Element::kPerLoad;
  float sum[kCount];
  Element::widen(loaded[0], sum);
#pragma unroll
  for (int rank = 1; rank < most_ranks; ++rank) {
    if (rank < args.ranks.size) {
      float values[kCount];
      Element::widen(loaded[rank], values);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sum[i] += values[i];
      }
    }
  }
  store_sum(args, vector * kCount, sum);
}

// What a step of a block has from each of up to `most_ranks` ranks.
template <int most_ranks>
struct Step : OfThread<kPartsVectors / most_ranks> {
  static constexpr int kVectors = kPartsVectors / most_ranks;
  using OfThread<kVectors>::OfThread;
};

// Other ranks' partial rows of a step, into their Buffers; then they are told.
template <int most_ranks>
__device__ __forceinline__ void send(const CombineArgs& args, int step, uint32_t round) {
  using S = Step<most_ranks>;
  const Ranks& ranks = args.ranks;
  const S mine(args.share, step);
  for (int turn = 1; turn < ranks.size; ++turn) {
    const int peer = (ranks.rank + turn) % ranks.size;
    const uint4* given = args.partial + peer * args.share.vectors;
    uint4* parts = ranks.buffer(peer)->parts[round % kSlots][blockIdx.x] + ranks.rank * S::kVectors;
    uint4 loaded[S::kCount];
    mine.for_each([&](int j, int64_t vector) { loaded[j] = given[vector]; });
    mine.for_each([&](int j, int64_t) { parts[j * kBlockThreads + threadIdx.x] = loaded[j]; });
  }
  tell(ranks, kCombine, round, 0);
}

template <class Element, int most_ranks>
__device__ __forceinline__ void add(const CombineArgs& args, int step, uint32_t round) {
  using S = Step<most_ranks>;
  constexpr int kCount = Element::kPerLoad;
  const Ranks& ranks = args.ranks;
  const int64_t end = args.share.end();
  const int64_t first = args.share.begin() + static_cast<int64_t>(step) * S::kVectors + threadIdx.x;
  const uint4* own = args.partial + ranks.rank * args.share.vectors;
  const uint4* parts = ranks.buffer(ranks.rank)->parts[round % kSlots][blockIdx.x];
#pragma unroll
  for (int j = 0; j < S::kCount; ++j) {
    const int64_t vector = first + j * kBlockThreads;
    if (vector >= end || vector * kCount >= args.elements) {
      continue;
    }
    uint4 loaded[most_ranks];
#pragma unroll
    for (int rank = 0; rank < most_ranks; ++rank) {
      if (rank < ranks.size) {  // others' past the L1, which does not see what other GPUs write
        loaded[rank] =
            rank == ranks.rank ? own[vector] : __ldcg(parts + rank * S::kVectors + j * kBlockThreads + threadIdx.x);
      }
    }
    store_sum_of<Element>(args, vector, loaded);
  }
}

template <class Element, int most_ranks>
__global__ void __launch_bounds__(kBlockThreads) combine_kernel(const __grid_constant__ CombineArgs args) {
  __shared__ uint32_t told[kMostRanks];
  const Ranks& ranks = args.ranks;
  uint32_t* rounds = &ranks.buffer(ranks.rank)->rounds[kCombine][blockIdx.x];
  const uint32_t start = *rounds + 1;
  send<most_ranks>(args, 0, start);
  for (int step = 0; step < args.share.steps; ++step) {
    const uint32_t round = start + step;
    if (step + 1 < args.share.steps) {
      send<most_ranks>(args, step + 1, round + 1);
    }
    await(ranks, kCombine, round, told);
    add<Element, most_ranks>(args, step, round);
  }
  if (threadIdx.x == 0) {
    *rounds = start + args.share.steps - 1;
  }
}

template <class Element, int most_ranks>
__global__ void __launch_bounds__(kWordThreads) combine_words_kernel(const __grid_constant__ CombineArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Ranks& ranks = args.ranks;
  const WordRound round(ranks, kCombine);
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kWordThreads + threadIdx.x;
  const bool inside = vector < args.share.vectors;
  uint4 parts[most_ranks] = {};
#pragma unroll
  for (int rank = 0; rank < most_ranks; ++rank) {
    if (inside && rank < ranks.size) {
      parts[rank] = args.partial[rank * args.share.vectors + vector];
    }
  }
#pragma unroll
  for (int rank = 0; rank < most_ranks; ++rank) {
    if (rank < ranks.size && rank != ranks.rank) {
      round.give(rank, parts[rank], inside);
    }
  }
  if (inside) {
    round.take(parts);
    if (vector * Element::kPerLoad < args.elements) {
      store_sum_of<Element>(args, vector, parts);
    }
  }
  round.end();
}

}  // namespace moeq::ep
