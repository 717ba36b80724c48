// The warp that loads: everything is contiguous, so a stage is a handful of bulk copies.
#pragma once
#include "w4a8_shared.cuh"

namespace moeq::sm90::w4a8 {

// Items of an expert: for each block of weight rows one after another all its tiles, so that weights come from the
// cache from the second tile on.
struct Item {
  int index;
  TokenTile tile;   // expert -1: none
};

__device__ __forceinline__ Item load_item(const GemmArgs& args, int index, int blocks, int items) {
  Item item;
  item.index = index;
  item.tile.expert = -1;
  if (index < items) item.tile = args.schedule.tiles[index / blocks];
  return item;
}

__device__ __forceinline__ Work work_of(const Item& item, int blocks) {
  Work work{-1, 0, 0, 0, 0, 0, 0};
  const TokenTile& tile = item.tile;
  if (tile.expert < 0) return work;
  const int within = item.index - tile.first * blocks;
  const int first_token = within % tile.tiles * tile.width;
  work.expert = tile.expert;
  work.row_block = within / tile.tiles;
  work.width = tile.width;
  work.rows = min(tile.width, tile.count - first_token);
  work.first_row = tile.start + first_token;
  work.start = tile.start;
  work.padded = round_up(tile.count, 8);
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
constexpr int kStreams = 1 + kBlockTiles +
                         (Policy::kTileScales > 0 ? kBlockTiles
                          : Policy::kGroups       ? 1
                                                  : 0);

template <class Policy>
__device__ __forceinline__ Stream stream_of_tokens(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work,
                                                   bool groups) {
  const int local = work.first_row - work.start, many = min(work.width, work.padded - local);
  const int64_t at = int64_t{work.start} * args.k_tiles + local;
  if (Policy::kGroups && groups) {
    return {args.factor + at, work.padded * 4, many * 4, shared_address(shared.groups), Policy::kWidth * 4};
  }
  return {args.operand + at * kTileK, work.padded * kTileK, many * kTileK, shared_address(shared.tokens),
          Policy::kWidth * kTileK};
}

template <class Policy>
__device__ __forceinline__ Stream stream_of(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work,
                                            int lane) {
  if (lane == 0 || (Policy::kGroups && lane > kBlockTiles)) return stream_of_tokens(args, shared, work, lane > 0);
  const int tile = (lane - 1) % kBlockTiles;
  const int64_t row_tile =
      int64_t{work.expert} * args.row_tiles + min(work.row_block * kBlockTiles + tile, args.row_tiles - 1);
  if (lane <= kBlockTiles) {
    return {args.weights + row_tile * args.k_tiles * Policy::kTileBytes, Policy::kTileBytes, Policy::kTileBytes,
            shared_address(shared.weights) + tile * Policy::kTileBytes, kBlockTiles * Policy::kTileBytes};
  }
  return {args.scales + row_tile * (args.k_tiles * Policy::kTileScales + kTileRows), Policy::kTileScales,
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
  copy_bulk(shared_address(shared.factor[slot]), args.factor + work.first_row, bytes, full);
}

// Steps of a tile, one after another.
template <class Policy>
struct Copies {
  Stream stream;
  int lane, bytes;

  __device__ __forceinline__ Copies(const GemmArgs& args, GemmShared<Policy>& shared, const Work& work)
      : lane(threadIdx.x % 32) {
    stream = stream_of(args, shared, work, lane < kStreams<Policy> ? lane : 0);
    const int token_bytes = __shfl_sync(0xffffffffu, stream.bytes, 0);
    bytes = token_bytes + kBlockTiles * (Policy::kTileBytes + Policy::kTileScales) +
            (Policy::kGroups ? token_bytes / kTileK * 4 : 0);
  }

  __device__ __forceinline__ void issue(GemmShared<Policy>& shared, Ring<Policy::kStages>& ring, int steps) {
    for (int k = 0; k < steps; k++) {
      barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
      const uint32_t full = shared_address(&shared.full[ring.slot]);
      if (lane == 0) barrier_expect(full, bytes);
      if (lane < kStreams<Policy>) copy_bulk(stream.to + ring.slot * stream.to_stride, stream.from, stream.bytes, full);
      stream.from = static_cast<const uint8_t*>(stream.from) + stream.stride;
      ring.advance();
    }
  }
};

// One warp. The next item is asked for before a tile's first half is copied and looked up before its second half.
template <class Policy>
__device__ __forceinline__ void produce(const GemmArgs& args, GemmShared<Policy>& shared) {
  const int blocks = (args.row_tiles + kBlockTiles - 1) / kBlockTiles, items = *args.schedule.tiles_total * blocks;
  const int lane = threadIdx.x % 32;
  Ring<kWorkSlots> work_ring;
  Ring<Policy::kStages> ring;
  Item item = load_item(args, blockIdx.x, blocks, items);
  while (true) {
    const Work work = work_of(item, blocks);
    barrier_wait(shared_address(&shared.work_empty[work_ring.slot]), work_ring.parity ^ 1);
    if (lane == 0) publish(args, shared, work, work_ring.slot);
    work_ring.advance();
    if (work.expert < 0) break;
    int next = 0;
    if (lane == 0) next = gridDim.x + atomicAdd(args.next_item, 1);
    Copies<Policy> copies(args, shared, work);
    const int first = args.k_tiles / 2;
    copies.issue(shared, ring, first);
    item = load_item(args, __shfl_sync(0xffffffffu, next, 0), blocks, items);
    copies.issue(shared, ring, args.k_tiles - first);
  }
}

}  // namespace moeq::sm90::w4a8
