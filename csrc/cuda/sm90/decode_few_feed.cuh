// The copies: barriers and tokens at once, the weights of both GEMMs as soon as the routing is known.
#pragma once
#include "decode_exchange.cuh"
#include "decode_few_shared.cuh"

namespace moeq::sm90::few {

__device__ __forceinline__ void start_block(const Args& args, Fixed& fixed, uint8_t* base) {
  const Problem& p = args.p;
  const int lane = threadIdx.x % 32;
  uint32_t epoch = 0;
  if (lane == 0) {
    epoch = epoch_of(blockIdx.x);
  }
  if (lane < args.stages) {
    barrier_init(shared_address(&fixed.full[lane]), 1);
    barrier_init(shared_address(&fixed.empty[lane]), kWarps);
  }
  const uint32_t tokens = shared_address(&fixed.tokens);
  if (lane < 2) {
    barrier_init(shared_address(&fixed.summed[lane]), kWarps);
    barrier_init(shared_address(&fixed.freed[lane]), kFinishers);
  }
  if (lane == 0) {
    barrier_init(tokens, 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  if (lane == 0) {
    barrier_expect(tokens, p.tokens * p.hidden * 2);
  }
  __syncwarp();
  if (lane < p.tokens) {
    const uint32_t to = shared_address(base + args.x_offset) + lane * args.x_stride;
    copy_bulk(to, static_cast<const __nv_bfloat16*>(p.x) + static_cast<int64_t>(lane) * p.hidden, p.hidden * 2, tokens);
  }
  if (lane == 0) {
    fixed.epoch = epoch + 1;
    set_epoch(epoch + 1);
  }
}

// One thread.
template <class Format>
__device__ __forceinline__ void copy_weights(const Args& args, const Fixed& fixed, uint8_t* base) {
  const Problem& p = args.p;
  const uint32_t ring = shared_address(base + args.ring_offset);
  const uint32_t full = shared_address(fixed.full), empty = shared_address(fixed.empty);
  const int stage_bytes = args.stage_tiles * kTileBytes;
  Turn turn = {0, 1};
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    Work work = fixed.work[gemm];
    const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
    const int k_tiles = gemm == 0 ? args.k_tiles[0] : args.k_tiles[1];
    const uint8_t* all_codes = gemm == 0 ? p.w13 : p.w2;
    const uint8_t* all_scales = gemm == 0 ? p.w13_scale : p.w2_scale;
#pragma unroll 1
    for (; work.count > 0; --work.count) {
      const int begin = work.part * work.part_tiles, end = min(begin + work.part_tiles, k_tiles);
      const int64_t row = static_cast<int64_t>(fixed.entries[work.entry].expert) * row_tiles + work.row_tile;
      int64_t tile = row * k_tiles + begin;
#pragma unroll 1
      for (int k = begin; k < end; k += work.stage_tiles) {
        const int tiles = min(work.stage_tiles, end - k);
        const uint32_t to = ring + turn.stage * stage_bytes, bar = full + 8 * turn.stage;
        barrier_wait(empty + 8 * turn.stage, turn.parity);
        barrier_expect(bar, tiles * (kTileCodeBytes + Format::kTileScaleBytes));
        copy_bulk(to, all_codes + tile * kTileCodeBytes, tiles * kTileCodeBytes, bar);
        copy_bulk(to + args.stage_tiles * kTileCodeBytes, all_scales + tile * Format::kTileScaleBytes,
                  tiles * Format::kTileScaleBytes, bar);
        tile += tiles;
        next_stage(turn, args.stages);
      }
      next_unit(work, row_tiles);
    }
  }
}

}  // namespace moeq::sm90::few
