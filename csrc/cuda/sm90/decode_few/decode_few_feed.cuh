// The copies: barriers and tokens at once, the weights of both GEMMs as soon as the routing is known.
#pragma once
#include "../decode/decode_exchange.cuh"
#include "decode_few_fp8_scales.cuh"
#include "decode_few_shared.cuh"

namespace moeq::sm90::few {

// A worker's part of the barriers: each warp has some, as one thread would take long.
__device__ __forceinline__ void init_barriers(Fixed& fixed) {
  const int warp = threadIdx.x / 32;
  if (lane_of_warp() == 0) {
    if (warp < kMaxStages) {
      barrier_init(shared_address(&fixed.full[warp]), 1);
      barrier_init(shared_address(&fixed.empty[warp]), kWarps);
    } else if (warp < kMaxStages + 2) {
      const int buffer = warp - kMaxStages;
      barrier_init(shared_address(&fixed.summed[buffer]), kWarps);
      barrier_init(shared_address(&fixed.freed[buffer]), kHelpers);
    } else {
      const int buffer = warp - kMaxStages - 2;
      barrier_init(shared_address(&fixed.made[buffer]), kHelpers);
      fixed.asked = 0;
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
}
static_assert(kMaxStages + 4 == kWarps, "a warp for each pair of barriers");

// One warp: the tokens are on their way.
__device__ __forceinline__ void copy_tokens(const Args& args, Fixed& fixed, uint8_t* base) {
  const Problem& p = args.p;
  const int lane = lane_of_warp();
  const uint32_t tokens = shared_address(&fixed.tokens);
  if (lane == 0) {
    barrier_init(tokens, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(tokens, p.tokens * p.hidden * 2);
#pragma unroll 1
    for (int token = 0; token < p.tokens; ++token) {
      copy_bulk(shared_address(base + args.x_offset) + token * args.x_stride,
                static_cast<const __nv_bfloat16*>(p.x) + static_cast<int64_t>(token) * p.hidden, p.hidden * 2, tokens);
    }
  }
}

// One thread: the number of this launch.
__device__ __forceinline__ void count_launch(const Args& args, Fixed& fixed) {
  if (args.epochs == nullptr) {
    fixed.epoch = kOnlyEpoch;
    return;
  }
  fixed.epoch = epoch_after(epoch_of(args.epochs, blockIdx.x));
  set_epoch(args.epochs, fixed.epoch);
}

// A group of warps does not see the phases of the other group's stages, so that a barrier's parity alone may be that of
// two phases ago: it waits until its own phase has begun.
__device__ __forceinline__ void announce_stages(Fixed& fixed, int number) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(&fixed.asked)), "r"(number) : "memory");
}

__device__ __forceinline__ void await_announcement(const Fixed& fixed, int number) {
  int asked;
  do {
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(asked) : "r"(shared_address(&fixed.asked)) : "memory");
  } while (asked <= number);
}

// One thread.
template <class Format, Kind kKind>
__device__ __forceinline__ void copy_weights(const Args& args, Fixed& fixed, uint8_t* base) {
  const Problem& p = args.p;
  const uint32_t ring = shared_address(base + args.ring_offset);
  const uint32_t full = shared_address(fixed.full), empty = shared_address(fixed.empty);
  const int stage_bytes = args.stage_tiles * kStageTileBytes<Format>;
  Turn turn = {0, 1, 0};
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    Work work = first_unit<kKind>(fixed.work, gemm);
    const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
    const int k_tiles = gemm == 0 ? args.k_tiles[0] : args.k_tiles[1];
    const uint8_t* all_codes = gemm == 0 ? p.w13 : p.w2;
    const uint8_t* all_scales = gemm == 0 ? p.w13_scale : p.w2_scale;
#pragma unroll 1
    for (; work.count > 0; --work.count) {
      const int begin = work.part * work.part_tiles, end = min(begin + work.part_tiles, k_tiles);
      const int64_t row = static_cast<int64_t>(fixed.entries[work.entry].expert) * row_tiles + work.row_tile;
      int64_t tile = row * k_tiles + begin;
      if constexpr (std::is_same_v<Format, Fp8Format<true>>) {
        prefetch_scales<kKind>(args, work, fixed.entries[work.entry].expert, gemm, end);
      }
#pragma unroll 1
      for (int k = begin; k < end; k += work.stage_tiles) {
        const int tiles = min(work.stage_tiles, end - k);
        const uint32_t to = ring + turn.stage * stage_bytes, bar = full + 8 * turn.stage;
        barrier_wait(empty + 8 * turn.stage, turn.parity);
        if constexpr (kIsFp8<Format>) {
          barrier_expect(bar, tiles * kCodeBytes<Format>);
        } else {
          barrier_expect(bar, tiles * (kCodeBytes<Format> + Format::kTileScaleBytes));
          copy_bulk(to + args.stage_tiles * kCodeBytes<Format>,
                    all_scales + tile * Format::kTileScaleBytes + row * kBytesBehindRow<Format>,
                    tiles * Format::kTileScaleBytes, bar);
        }
        copy_bulk(to, all_codes + tile * kCodeBytes<Format>, tiles * kCodeBytes<Format>, bar);
        tile += tiles;
        next_stage(turn, args.stages);
        if (!Case<kKind>::kShared || turn.number > args.stages) {   // before, all barriers are in their first phase
          announce_stages(fixed, turn.number);
        }
      }
      next_unit<kKind>(fixed.work, work, row_tiles);
    }
  }
}

}  // namespace moeq::sm90::few
