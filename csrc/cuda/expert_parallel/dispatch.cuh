// Everybody's rows to every rank, in ascending rank order, into ordinary memory.
//
// Many rows: a block copies its range of this rank's rows into the rank's Buffer and, in the same pass, to its place in
// the result; then it reads the same range of every other rank. Reads rather than writes cross the link: so a row is
// staged once whatever the number of ranks, and what the experts read is the caller's, who may keep it.
//
// Few rows: each thread writes its vector into the Buffers of all others, as words that carry their round, and waits
// for theirs.
#pragma once
#include "flags.cuh"
#include "words.cuh"

namespace moeq::ep {

// One tensor of what belongs to a row, [tokens, row_bytes]. Rows of all tensors make one range of vectors of 16 bytes.
struct Segment {
  const uint8_t* given;
  uint8_t* received;  // [size * max_tokens, row_bytes]
  int64_t row_bytes;  // 0: absent
  int64_t part_bytes;  // max_tokens * row_bytes
  int64_t first;  // vector
  uint32_t fill;  // four bytes of rows that stand for no token
};

constexpr int kSegments = 4;

struct DispatchArgs {
  Segment segments[kSegments];
  Ranks ranks;
  Share share;
  uint32_t tokens;
};

__device__ __forceinline__ uint32_t byte_of(const uint4& vector, int i) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  return words[i / 4] >> (8 * (i % 4)) & 0xffu;
}

// The segment of a vector, and its first byte there.
__device__ __forceinline__ const Segment& locate(const DispatchArgs& args, int64_t vector, int64_t& byte) {
  int s = 0;
  while (s + 1 < kSegments && vector >= args.segments[s + 1].first) {
    ++s;
  }
  byte = (vector - args.segments[s].first) * 16;
  return args.segments[s];
}

__device__ __forceinline__ uint4 filling(const Segment& segment) {
  return make_uint4(segment.fill, segment.fill, segment.fill, segment.fill);
}

__device__ __forceinline__ uint4 load_given(const Segment& segment, int64_t byte, uint32_t tokens) {
  const int64_t left = tokens * segment.row_bytes - byte;
  if (left >= 16) {
    return *reinterpret_cast<const uint4*>(segment.given + byte);
  }
  uint32_t words[4] = {segment.fill, segment.fill, segment.fill, segment.fill};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i < left) {
      const int shift = 8 * (i % 4);
      words[i / 4] = (words[i / 4] & ~(0xffu << shift)) | static_cast<uint32_t>(segment.given[byte + i]) << shift;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_received(const Segment& segment, int rank, int64_t byte, const uint4& vector) {
  uint8_t* target = segment.received + rank * segment.part_bytes + byte;
  if (segment.part_bytes % 16 == 0) {
    *reinterpret_cast<uint4*>(target) = vector;
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (byte + i < segment.part_bytes) {
      target[i] = static_cast<uint8_t>(byte_of(vector, i));
    }
  }
}

// What a thread copies in a step, and where that is.
struct Mine : OfThread<kStepVectors> {
  const DispatchArgs& args;

  __device__ __forceinline__ Mine(const DispatchArgs& of, int step) : OfThread(of.share, step), args(of) {}

  // Calls each(j, segment, byte).
  template <class Each>
  __device__ __forceinline__ void for_each_located(Each each) const {
    for_each([&](int j, int64_t vector) {
      int64_t byte;
      const Segment& segment = locate(args, vector, byte);
      each(j, segment, byte);
    });
  }

  // What was loaded of a rank's rows, into the result.
  __device__ __forceinline__ void receive(int rank, const uint4 (&loaded)[kCount]) const {
    for_each_located(
        [&](int j, const Segment& segment, int64_t byte) { store_received(segment, rank, byte, loaded[j]); });
  }
};

// This rank's rows of a step, into its Buffer and its result; then the others are told.
__device__ __forceinline__ void give(const DispatchArgs& args, int step, uint32_t round) {
  const Mine mine(args, step);
  uint4 loaded[Mine::kCount];
  mine.for_each_located(
      [&](int j, const Segment& segment, int64_t byte) { loaded[j] = load_given(segment, byte, args.tokens); });
  uint4* rows = args.ranks.buffer(args.ranks.rank)->rows[round % kSlots][blockIdx.x];
  mine.for_each([&](int j, int64_t) { rows[j * kBlockThreads + threadIdx.x] = loaded[j]; });
  tell(args.ranks, kDispatch, round, args.tokens);
  mine.receive(args.ranks.rank, loaded);  // the others read meanwhile
}

// The rows of a step of another rank, which has `tokens` of them: what stands for no token does not cross the link.
__device__ __forceinline__ void take(const DispatchArgs& args, int step, uint32_t round, int peer, uint32_t tokens) {
  const Mine mine(args, step);
  const uint4* rows = args.ranks.buffer(peer)->rows[round % kSlots][blockIdx.x];
  uint4 loaded[Mine::kCount];
  mine.for_each_located([&](int j, const Segment& segment, int64_t byte) {
    // Past the L1: it does not see what other GPUs write.
    loaded[j] = byte < tokens * segment.row_bytes ? __ldcg(rows + j * kBlockThreads + threadIdx.x) : filling(segment);
  });
  mine.receive(peer, loaded);
}

__global__ void __launch_bounds__(kBlockThreads) dispatch_kernel(const __grid_constant__ DispatchArgs args) {
  __shared__ uint32_t tokens[kMostRanks];
  const Ranks& ranks = args.ranks;
  uint32_t* rounds = &ranks.buffer(ranks.rank)->rounds[kDispatch][blockIdx.x];
  const uint32_t start = *rounds + 1;
  give(args, 0, start);
  for (int step = 0; step < args.share.steps; ++step) {
    const uint32_t round = start + step;
    if (step + 1 < args.share.steps) {
      give(args, step + 1, round + 1);
    }
    __syncthreads();  // before `tokens` is written again
    await(ranks, kDispatch, round, tokens);
    for (int turn = 1; turn < ranks.size; ++turn) {
      const int peer = (ranks.rank + turn) % ranks.size;
      take(args, step, round, peer, tokens[peer]);
    }
  }
  if (threadIdx.x == 0) {
    *rounds = start + args.share.steps - 1;
  }
}

template <int most_ranks>
__global__ void __launch_bounds__(kWordThreads) dispatch_words_kernel(const __grid_constant__ DispatchArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Ranks& ranks = args.ranks;
  const WordRound round(ranks, kDispatch);
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kWordThreads + threadIdx.x;
  const bool inside = vector < args.share.vectors;
  int64_t byte = 0;
  const Segment& segment = locate(args, inside ? vector : 0, byte);
  const uint4 given = inside ? load_given(segment, byte, args.tokens) : filling(segment);
  for (int turn = 1; turn < ranks.size; ++turn) {
    round.give((ranks.rank + turn) % ranks.size, given, inside);
  }
  if (inside) {
    store_received(segment, ranks.rank, byte, given);
    uint4 taken[most_ranks];
    round.take(taken);
#pragma unroll
    for (int rank = 0; rank < most_ranks; ++rank) {
      if (rank < ranks.size && rank != ranks.rank) {
        store_received(segment, rank, byte, taken[rank]);
      }
    }
  }
  round.end();
}

}  // namespace moeq::ep
