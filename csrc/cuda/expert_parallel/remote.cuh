// What goes before and after experts that read tokens, and write partial rows, in the memory of the other GPUs by
// themselves (csrc/cuda/sm90/problem/tiled_problem.h): rows cross the link once each way and are not copied beside it.
//
// Each rank has a heap that all map. Before the experts a rank puts its tokens into its own heap and their places and
// weights into everybody's, as the experts want them: token t of rank r is row t * ranks + r. After them it adds the
// partial rows that the others have put into its heap. Both tell and await as the other exchanges do, a round each, so
// that nothing is written over what someone still reads: a rank that has told of round n + 1 has come to the end of
// round n, and a heap's tokens, places and partial rows have addresses of their own, whatever the sizes of a call.
#pragma once
#include "combine.cuh"
#include "placing.cuh"

namespace moeq::ep {

constexpr int kRemoteThreads = 512;  // of a block

struct Heaps {
  int64_t addresses[kMostRanks];
  int64_t places_at, weights_at, parts_at;  // bytes; tokens are at the beginning

  template <class T>
  __device__ __forceinline__ T* at(int rank, int64_t bytes) const {
    return reinterpret_cast<T*>(addresses[rank] + bytes);
  }
};

struct StageArgs {
  const uint4* tokens;
  int64_t vectors;  // of this rank's tokens
  const int32_t* ids;  // [tokens, top_k]
  const float* weights;
  int32_t* places;  // [tokens, top_k]: theirs, for what comes after the experts
  int count, max_tokens, top_k;
  Heaps heaps;
  Ranks ranks;
  Placing placing;
};

// Places and weights of a slot of this rank's tokens, or of no token, to everybody.
__device__ __forceinline__ void give_slot(const StageArgs& args, int64_t slot) {
  const Ranks& ranks = args.ranks;
  const int64_t token = slot / args.top_k;
  const bool real = token < args.count;
  const int32_t place = real ? place_of(args.placing, args.ids[slot], token) : -1;
  const float weight = real ? args.weights[slot] : 0.0f;
  const int64_t at = (token * ranks.size + ranks.rank) * args.top_k + slot % args.top_k;
  if (real) {
    args.places[slot] = place;
  }
  for (int turn = 0; turn < ranks.size; ++turn) {
    const int peer = (ranks.rank + turn) % ranks.size;
    args.heaps.at<int32_t>(peer, args.heaps.places_at)[at] = place;
    args.heaps.at<float>(peer, args.heaps.weights_at)[at] = weight;
  }
}

__global__ void __launch_bounds__(kRemoteThreads) stage_kernel(const __grid_constant__ StageArgs args) {
  constexpr int kAtOnce = 4;
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ uint32_t told[kMostRanks];
  const Ranks& ranks = args.ranks;
  uint32_t* rounds = &ranks.buffer(ranks.rank)->rounds[kDispatch][blockIdx.x];
  const uint32_t round = *rounds + 1;
  const int64_t threads = int64_t{gridDim.x} * kRemoteThreads;
  const int64_t first = int64_t{blockIdx.x} * kRemoteThreads + threadIdx.x;
  for (int64_t slot = first; slot < int64_t{args.max_tokens} * args.top_k; slot += threads) {
    give_slot(args, slot);
  }
  uint4* staged = args.heaps.at<uint4>(ranks.rank, 0);
  for (int64_t vector = first; vector < args.vectors; vector += threads * kAtOnce) {
    uint4 loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (vector + i * threads < args.vectors) {
        loaded[i] = args.tokens[vector + i * threads];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (vector + i * threads < args.vectors) {
        staged[vector + i * threads] = loaded[i];
      }
    }
  }
  tell(ranks, kDispatch, round, 0);
  await(ranks, kDispatch, round, told);
  if (threadIdx.x == 0) {
    *rounds = round;
  }
}

struct SumArgs {
  const int32_t* places;  // [tokens, top_k] of this rank's tokens
  void* out;  // [tokens, hidden_size]
  Out out_type;
  int tokens, max_tokens, top_k;
  int row_vectors;  // of a partial row
  int ends[kMostRanks];  // the places before it, and behind that of the rank before, are a rank's
  Heaps heaps;
  Ranks ranks;
};

__device__ __forceinline__ uint32_t or_of_warp(uint32_t mine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    mine |= __shfl_xor_sync(0xffffffffu, mine, lanes);
  }
  return mine;
}

// The ranks that have a place of a token's slots first, first + step, ...: a bit each.
__device__ __forceinline__ uint32_t ranks_of_slots(const SumArgs& args, int token, int first, int step) {
  uint32_t found = 0;
  for (int j = first; j < args.top_k; j += step) {
    const int place = args.places[static_cast<int64_t>(token) * args.top_k + j];
    int start = 0;
#pragma unroll
    for (int rank = 0; rank < kMostRanks; ++rank) {
      if (rank < args.ranks.size) {
        found |= static_cast<uint32_t>(place >= start && place < args.ends[rank]) << rank;
        start = args.ends[rank];
      }
    }
  }
  return found;
}

// The ranks that have given a partial row of a token. By a whole warp.
__device__ __forceinline__ uint32_t ranks_of_token(const SumArgs& args, int token) {
  return or_of_warp(ranks_of_slots(args, token, threadIdx.x % 32, 32));
}

// One vector of a token: the sum of the ranks that gave it, in ascending order.
template <class Element, int most_ranks, int at_once>
__device__ __forceinline__ void add_parts(const SumArgs& args, int token, int first, uint32_t given) {
  constexpr int kCount = Element::kPerLoad;
  const uint4* parts =
      args.heaps.at<const uint4>(args.ranks.rank, args.heaps.parts_at) + static_cast<int64_t>(token) * args.row_vectors;
  const int64_t of_rank = static_cast<int64_t>(args.max_tokens) * args.row_vectors;
  uint4 loaded[at_once][most_ranks];
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
#pragma unroll
    for (int rank = 0; rank < most_ranks; ++rank) {
      if (first + 32 * i < args.row_vectors && (given >> rank & 1)) {
        loaded[i][rank] = __ldcg(parts + rank * of_rank + first + 32 * i);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < at_once; ++i) {
    const int vector = first + 32 * i;
    if (vector >= args.row_vectors) {
      continue;
    }
    float sum[kCount] = {};
#pragma unroll
    for (int rank = 0; rank < most_ranks; ++rank) {
      if (given >> rank & 1) {
        float values[kCount];
        Element::widen(loaded[i][rank], values);
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          sum[c] += values[c];
        }
      }
    }
    store_sum(args, (static_cast<int64_t>(token) * args.row_vectors + vector) * kCount, sum);
  }
}

// A warp adds pieces of rows.
template <class Element, int most_ranks>
__global__ void __launch_bounds__(kRemoteThreads) sum_kernel(const __grid_constant__ SumArgs args) {
  constexpr int kAtOnce = most_ranks > 4 ? 1 : 2;  // as registers allow
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ uint32_t told[kMostRanks];
  const Ranks& ranks = args.ranks;
  uint32_t* rounds = &ranks.buffer(ranks.rank)->rounds[kCombine][blockIdx.x];
  const uint32_t round = *rounds + 1;
  tell(ranks, kCombine, round, 0);
  await(ranks, kCombine, round, told);
  const int pieces = (args.row_vectors + 32 * kAtOnce - 1) / (32 * kAtOnce);
  const int64_t warps = int64_t{gridDim.x} * (kRemoteThreads / 32);
  const int64_t all = int64_t{args.tokens} * pieces;
  for (int64_t piece = (int64_t{blockIdx.x} * kRemoteThreads + threadIdx.x) / 32; piece < all; piece += warps) {
    const int token = static_cast<int>(piece / pieces);
    const int first = static_cast<int>(piece % pieces) * 32 * kAtOnce + static_cast<int>(threadIdx.x % 32);
    add_parts<Element, most_ranks, kAtOnce>(args, token, first, ranks_of_token(args, token));
  }
  if (threadIdx.x == 0) {
    *rounds = round;
  }
}

}  // namespace moeq::ep
