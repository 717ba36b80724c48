// The warp that loads: everything is contiguous, so a stage is a handful of bulk copies. And the one that tells the
// others when a piece of work is stored.
#pragma once
#include "w4a8_shared.cuh"

namespace moeq::sm90::w4a8 {

// All items of GEMM1, then all of GEMM2. Items of an expert: for each block of weight rows one after another all its
// tiles, so that weights come from the cache from the second tile on.
__device__ __forceinline__ Work find_work(const GemmArgs& args, int tiles_total, int item) {
  Work work{};
  work.expert = -1;
  const int firsts = args.launches == Launches::kSecond ? 0 : tiles_total * row_blocks(args.first);
  work.second = item >= firsts;
  if (work.second && args.launches == Launches::kFirst) return work;
  if (work.second) item -= firsts;
  const int blocks = row_blocks(work.second ? args.second : args.first);
  if (item >= tiles_total * blocks) return work;
  const TokenTile tile = args.schedule.tiles[item / blocks];
  const int within = item - tile.first * blocks;
  const int first_token = within % tile.tiles * tile.width;
  work.expert = tile.expert;
  work.row_block = within / tile.tiles;
  work.width = tile.width;
  work.rows = min(tile.width, tile.count - first_token);
  work.first_row = tile.start + first_token;
  work.start = tile.start;
  work.padded = round_up(tile.count, 8);
  work.count = tile.count;
  return work;
}

// What one lane copies into each stage: lane 0 the tokens, 1 and 2 the row tiles' weights, 3 and 4 their scales, or 3
// the scales of the tokens.
struct Stream {
  const void* from;
  int stride, bytes;
  uint32_t to, to_stride;
};

template <class Policy>
constexpr int kStreams = 1 + kBlockTiles + (Policy::kTileScales > 0 ? kBlockTiles : Policy::kGroups ? 1 : 0);

template <class Policy>
__device__ __forceinline__ Stream stream_of_tokens(const Gemm& gemm, GemmShared<Policy>& shared, const Work& work,
                                                   bool groups) {
  const int local = work.first_row - work.start, many = min(work.width, work.padded - local);
  const int64_t at = int64_t{work.start} * gemm.k_tiles + local;
  if (Policy::kGroups && groups) {
    return {gemm.factor + at, work.padded * 4, many * 4, shared_address(shared.groups), kMaxWidth * 4};
  }
  return {gemm.operand + at * kTileK, work.padded * kTileK, many * kTileK, shared_address(shared.tokens), kTokenBytes};
}

template <class Policy>
__device__ __forceinline__ Stream stream_of(const Gemm& gemm, GemmShared<Policy>& shared, const Work& work, int lane) {
  if (lane == 0 || (Policy::kGroups && lane > kBlockTiles)) return stream_of_tokens(gemm, shared, work, lane > 0);
  const int tile = (lane - 1) % kBlockTiles;
  const int64_t row_tile = int64_t{work.expert} * gemm.row_tiles +
                           min(work.row_block * kBlockTiles + tile, gemm.row_tiles - 1);
  if (lane <= kBlockTiles) {
    return {gemm.weights + row_tile * gemm.k_tiles * Policy::kTileBytes, Policy::kTileBytes, Policy::kTileBytes,
            shared_address(shared.weights) + tile * Policy::kTileBytes, kBlockTiles * Policy::kTileBytes};
  }
  return {gemm.scales + row_tile * (gemm.k_tiles * Policy::kTileScales + kTileRows), Policy::kTileScales,
          Policy::kTileScales, shared_address(shared.scales) + tile * Policy::kTileScales,
          kBlockTiles * Policy::kTileScales};
}

// Also what its tokens' results are multiplied by, and where they go.
template <class Policy>
__device__ __forceinline__ void publish(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work, int slot) {
  const uint32_t full = shared_address(&shared.work_full[slot]);
  shared.work[slot] = work;
  if (work.expert < 0) {
    barrier_arrive(full);
    return;
  }
  const int bytes = round_up(work.rows, 8) * 4;
  barrier_expect(full, (Policy::kGroups ? 1 : 2) * bytes);
  copy_bulk(shared_address(shared.slots[slot]), args.schedule.slot_of_row + work.first_row, bytes, full);
  if (Policy::kGroups) return;
  const float* factor = work.second ? args.second.factor : args.first.factor;
  copy_bulk(shared_address(shared.factor[slot]), factor + work.first_row, bytes, full);
}

// Of a whole warp: until as many have arrived as there are.
__device__ __forceinline__ void wait_for_count(const int* count, int all) {
  if (threadIdx.x % 32 == 0) {
    while (load_acquire(count) < all) __nanosleep(100);
  }
  __syncwarp();
}

template <class Policy>
__device__ __forceinline__ void copy_stages(const Gemm& gemm, GemmShared<Policy>& shared, const Work& work,
                                            Ring<Policy::kStages>& ring) {
  const int lane = threadIdx.x % 32;
  Stream stream = stream_of(gemm, shared, work, lane < kStreams<Policy> ? lane : 0);
  const int token_bytes = __shfl_sync(0xffffffffu, stream.bytes, 0);
  const int bytes = token_bytes + kBlockTiles * (Policy::kTileBytes + Policy::kTileScales) +
                    (Policy::kGroups ? token_bytes / kTileK * 4 : 0);
  for (int k = 0; k < gemm.k_tiles; k++) {
    barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
    const uint32_t full = shared_address(&shared.full[ring.slot]);
    if (lane == 0) barrier_expect(full, bytes);
    if (lane < kStreams<Policy>) copy_bulk(stream.to + ring.slot * stream.to_stride, stream.from, stream.bytes, full);
    stream.from = static_cast<const uint8_t*>(stream.from) + stream.stride;
    ring.advance();
  }
}

// One warp.
template <class Policy>
__device__ __forceinline__ void produce(const GemmArgs& args, GemmShared<Policy>& shared) {
  const int tiles_total = *args.schedule.tiles_total, lane = threadIdx.x % 32;
  Ring<kWorkSlots> work_ring;
  Ring<Policy::kStages> ring;
  int* next_item = args.schedule.next_item + (args.launches == Launches::kSecond ? 1 : 0);
  int item = lane == 0 ? atomicAdd(next_item, 1) : 0;
  while (true) {
    const Work work = find_work(args, tiles_total, __shfl_sync(0xffffffffu, item, 0));
    if (work.second && work.expert >= 0 && args.launches == Launches::kBoth) {
      wait_for_count(args.schedule.quantized + work.expert, work.count);
      fence_async_proxy();   // bulk copies read what other threads have stored
    }
    barrier_wait(shared_address(&shared.work_empty[work_ring.slot]), work_ring.parity ^ 1);
    if (lane == 0) publish(args, shared, work, work_ring.slot);
    work_ring.advance();
    if (work.expert < 0) break;
    if (lane == 0) item = atomicAdd(next_item, 1);   // its latency passes while the tile is loaded
    copy_stages(work.second ? args.second : args.first, shared, work, ring);
  }
}

// One warp: frees the slots of work, and counts GEMM1's items of each expert. The consumers need not wait until what
// they stored has arrived.
template <class Policy>
__device__ __forceinline__ void report_stored(const GemmArgs& args, GemmShared<Policy>& shared) {
  Ring<kWorkSlots> ring;
  while (true) {
    barrier_wait_idle(shared_address(&shared.work_full[ring.slot]), ring.parity);
    const Work& work = shared.work[ring.slot];
    const int expert = work.expert;
    const bool second = work.second;
    if (expert < 0) break;
    barrier_wait_idle(shared_address(&shared.work_stored[ring.slot]), ring.parity);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(shared_address(&shared.work_empty[ring.slot]));
      if (!second && args.launches == Launches::kBoth) add_release(args.schedule.finished + expert, 1);
    }
    ring.advance();
  }
}

}  // namespace moeq::sm90::w4a8
