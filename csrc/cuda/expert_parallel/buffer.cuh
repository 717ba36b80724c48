// The memory through which the ranks of one host exchange rows: a Buffer on each, mapped by all.
//
// Many rows go with flags. A launch has up to kBlocks thread blocks. Block b of a rank exchanges with blocks b of the
// others alone, step by step, and each step is a round of its own. In a round, a block
//   1. writes what the others want (dispatch: into its own Buffer; combine: into theirs), then its flag at each of
//   them,
//   2. waits for the flags of all, and reads.
// It writes for round n + 1 before it waits in round n, so that the link does not idle between steps. What it writes
// over is kSlots = 4 rounds old: every other block has read it, because it has told round n - 1 after its reads of
// round n - 3, and this block has seen that flag. The same holds from one launch to the next.
//
// Few rows go as words that carry their round (words.cuh).
//
// Rounds are counted on the device and go on from launch to launch, so replays of a CUDA graph need no host. Ranks must
// launch the same exchanges in the same order, one after the other: they agree in grid and steps.
#pragma once
#include <cstdint>

namespace moeq::ep {

constexpr int kMostRanks = 8;
constexpr int kBlocks = 128;  // all at the same time on a GPU of 64 multiprocessors
constexpr int kBlockThreads = 512;
constexpr uint32_t kSlots = 4;
constexpr int kStepVectors = 2048;  // 16 bytes each, of a block, a step and a rank's rows
constexpr int kPartsVectors = 4096;  // ... and the partial rows from all ranks

constexpr int kWordBlocks = 128;
constexpr int kWordThreads = 128;  // a vector of 16 bytes each
constexpr uint32_t kWordSlots = 2;

enum Phase : int { kDispatch = 0, kCombine = 1, kPhases = 2 };

// Half of a vector: two words of {round << 32 | 4 bytes}.
struct alignas(16) Words {
  uint64_t first, second;
};

// What warps read and write begins at a line of 128 bytes: 512 bytes elsewhere are five lines on the link instead of
// four.
struct Buffer {
  uint32_t rounds[kPhases][kBlocks];  // so far; of this rank's blocks alone
  uint32_t word_rounds[kWordBlocks];
  int missing[kMostRanks];  // whether one of this rank's threads has said that a rank does not come
  alignas(128) uint64_t flags[kPhases][kSlots][kMostRanks][kBlocks];
  alignas(128) uint4 rows[kSlots][kBlocks][kStepVectors];  // dispatch: what this rank gives
  alignas(128) uint4 parts[kSlots][kBlocks][kPartsVectors];  // combine: what this rank gets
  // What this rank gets, by halves of vectors.
  alignas(128) Words words[kWordSlots][kMostRanks][kWordBlocks][2][kWordThreads];
};

// The ranks as a kernel sees them.
struct Ranks {
  int64_t buffers[kMostRanks];  // addresses of their Buffers, in this rank's address space
  int rank;
  int size;
  uint64_t limit_ns;  // of a wait

  __device__ __forceinline__ Buffer* buffer(int of_rank) const { return reinterpret_cast<Buffer*>(buffers[of_rank]); }
};

// What a block does of `vectors` vectors: a range of its own, in steps.
struct Share {
  int64_t vectors;
  int64_t of_block;
  int steps;

  Share(int64_t all_vectors, int step_vectors) : vectors(all_vectors) {
    of_block = (all_vectors + blocks() - 1) / blocks();
    steps = static_cast<int>((of_block + step_vectors - 1) / step_vectors);
  }

  // As few as leave each thread something to do.
  unsigned blocks() const {
    const int64_t wanted = (vectors + kBlockThreads - 1) / kBlockThreads;
    return static_cast<unsigned>(wanted < kBlocks ? wanted : kBlocks);
  }

  __device__ __forceinline__ int64_t begin() const { return blockIdx.x * of_block; }

  __device__ __forceinline__ int64_t end() const {
    const int64_t after = begin() + of_block;
    return after < vectors ? after : vectors;
  }
};

// The vectors of a thread in a step of kVectors.
template <int kVectors>
struct OfThread {
  static constexpr int kCount = kVectors / kBlockThreads;
  static_assert(kCount * kBlockThreads == kVectors);
  int64_t end;
  int64_t first;

  __device__ __forceinline__ OfThread(const Share& share, int step)
      : end(share.end()), first(share.begin() + static_cast<int64_t>(step) * kVectors + threadIdx.x) {}

  // Calls each(j, vector) for the j-th of them, j < kCount.
  template <class Each>
  __device__ __forceinline__ void for_each(Each each) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int64_t vector = first + j * kBlockThreads;
      if (vector < end) {
        each(j, vector);
      }
    }
  }
};

}  // namespace moeq::ep
