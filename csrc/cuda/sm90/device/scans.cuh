// What threads of a block or of a warp find out together: prefix sums, largest magnitudes, and who has what others
// have.
#pragma once
#include <cstdint>

#include "../../rounding.cuh"

namespace moeq::sm90 {

// Two sums at a time, of `threads` threads, all of the block. `total` becomes everybody's sums; warp_sums: shared, one
// for each warp, used once.
template <int threads>
__device__ int2 prefix_sums(int2 value, int2* warp_sums, int2& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, sum.x, step), y = __shfl_up_sync(0xffffffffu, sum.y, step);
    if (lane >= step) {
      sum.x += x;
      sum.y += y;
    }
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int2 before{0, 0}, all{0, 0};
#pragma unroll
  for (int i = 0; i < threads / 32; i++) {
    const int2 of_warp = warp_sums[i];
    before.x += i < warp ? of_warp.x : 0;
    before.y += i < warp ? of_warp.y : 0;
    all.x += of_warp.x;
    all.y += of_warp.y;
  }
  total = all;
  return {before.x + sum.x - value.x, before.y + sum.y - value.y};
}

// The largest magnitude of lanes that differ in the bits of their numbers from `first` to below `end`, powers of two.
template <int first, int end>
__device__ __forceinline__ float amax_of_lanes(float value) {
#pragma unroll
  for (int step = first; step < end; step *= 2) {
    value = max_magnitude(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

// Of the whole block; `shared` has one place a warp, and may be written again after a barrier.
__device__ __forceinline__ float amax_of_threads(float value, float* shared) {
  value = amax_of_lanes<1, 32>(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int i = 1; i < blockDim.x / 32; i++) value = max_magnitude(value, shared[i]);
  return value;
}

// Up to 32 slots, a lane of one warp each, in chunks of one expert: what both decode kernels multiply at a time.

// Of a lane's slot. Chunks come in the order of their first slots, and the slots of a chunk lie together.
struct Chunk {
  int number, first;   // the chunk, and where its slots begin
  int column;          // of the slot within the chunk
  bool opens;          // this lane opens a chunk
  int count;           // of its slots, else 0
  int opened_first;    // where those of the chunk that this lane opens begin
  int opened_number;
  int chunks;          // of all lanes
};

// expert: -1 for none; those lanes are in no chunk. columns: slots of a chunk at most, a power of two. All
// lanes of a warp.
__device__ __forceinline__ Chunk chunk_of(int expert, int columns) {
  const int lane = threadIdx.x % 32, last = columns - 1;
  const uint32_t same = __match_any_sync(0xffffffffu, expert);
  const uint32_t below = (1u << lane) - 1;
  const int rank = __popc(same & below);
  const bool opens = expert >= 0 && (rank & last) == 0;
  const uint32_t openers = __ballot_sync(0xffffffffu, opens);
  Chunk chunk;
  chunk.opens = opens;
  chunk.count = opens ? min(__popc(same) - rank, columns) : 0;
  int first = chunk.count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, first, step);
    first += lane >= step ? other : 0;
  }
  chunk.opened_first = first - chunk.count;
  chunk.opened_number = __popc(openers & below);
  // The lane that opened this one's chunk: the one of rank `opening` among `same`.
  const int opening = rank & ~last;
  const int opener = expert < 0 ? lane : opening == 0 ? __ffs(same) - 1 : __fns(same, 0, opening + 1);
  chunk.number = __shfl_sync(0xffffffffu, chunk.opened_number, opener);
  chunk.first = __shfl_sync(0xffffffffu, chunk.opened_first, opener);
  chunk.column = rank & last;
  chunk.chunks = __popc(openers);
  return chunk;
}

}  // namespace moeq::sm90
