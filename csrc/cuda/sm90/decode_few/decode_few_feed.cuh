// The copies: barriers and tokens at once, the weights of both GEMMs as soon as the routing is known.
#pragma once
#include "../decode/decode_exchange.cuh"
#include "decode_few_shared.cuh"

namespace moeq::sm90::few {

// A worker's part of the barriers: each warp has some, as one thread would take long.
template <class Fixed>
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
    if constexpr (kGathers<Fixed>) {
      if (warp < 2) {
        barrier_init(shared_address(&fixed.landed[warp]), 1);
        barrier_init(shared_address(&fixed.left[warp]), kWarps);
      }
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
}
static_assert(kMaxStages + 4 == kWarps, "a warp for each pair of barriers");

// One warp: the tokens are on their way.
template <class Fixed>
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
      copy_bulk(shared_address(base + args.x_offset) + token * args.each * args.x_stride,
                static_cast<const __nv_bfloat16*>(p.x) + static_cast<int64_t>(token) * p.hidden, p.hidden * 2, tokens);
    }
  }
}

// One thread: the number of this launch.
template <class Fixed>
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
template <class Fixed>
__device__ __forceinline__ void announce_stages(Fixed& fixed, int number) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(&fixed.asked)), "r"(number) : "memory");
}

template <class Fixed>
__device__ __forceinline__ void await_announcement(const Fixed& fixed, int number) {
  int asked;
  do {
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(asked) : "r"(shared_address(&fixed.asked)) : "memory");
  } while (asked <= number);
}

// Where the rows of an entry lie, the `run`-th operand of GEMM1 of this block: at the beginning and at the end in
// turns, so that two entries are there where both have few.
__device__ __forceinline__ int first_row(const Args& args, const Entry& entry, int run) {
  return run % 2 == 0 ? 0 : args.rows - entry.count;
}

// All warps have left the rows of operand `run`.
template <class Fixed>
__device__ __forceinline__ void await_left(const Fixed& fixed, int run) {
  barrier_wait(shared_address(&fixed.left[run % 2]), run / 2 % 2);
}

// One thread: an entry's rows of tokens. `before`: how many the entry before has.
template <class Fixed>
__device__ __forceinline__ void copy_rows(const Args& args, Fixed& fixed, uint8_t* base, const Entry& entry, int run,
                                          int before) {
  const Problem& p = args.p;
  if (run > 1) {
    await_left(fixed, run - 2);
  }
  if (run > 0 && before + entry.count > args.rows) {
    await_left(fixed, run - 1);
  }
  const uint32_t landed = shared_address(&fixed.landed[run % 2]);
  uint32_t to = shared_address(base + args.x_offset) + first_row(args, entry, run) * args.x_stride;
  barrier_expect(landed, entry.count * p.hidden * 2);
#pragma unroll 1
  for (int column = 0; column < entry.count; ++column, to += args.x_stride) {
    const int token = quotient(fixed.slots[entry.first + column], args.inverse_top_k);
    copy_bulk(to, static_cast<const __nv_bfloat16*>(p.x) + static_cast<int64_t>(token) * p.hidden, p.hidden * 2,
              landed);
  }
}

// One thread.
template <class Format, Kind kKind, class Fixed>
__device__ __forceinline__ void copy_weights(const Args& args, Fixed& fixed, uint8_t* base) {
  const Problem& p = args.p;
  const uint32_t ring = shared_address(base + args.ring_offset);
  const uint32_t full = shared_address(fixed.full), empty = shared_address(fixed.empty);
  const int stage_bytes = args.stage_tiles * kStageTileBytes<Format>;
  Turn turn = {0, 1, 0};
  [[maybe_unused]] int run = 0, rows = 0;   // operands of GEMM1 so far, and rows of the last one
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    Work work = first_unit<kKind>(fixed.work, gemm);
    const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
    const int k_tiles = gemm == 0 ? args.k_tiles[0] : args.k_tiles[1];
    const uint8_t* all_codes = gemm == 0 ? p.w13 : p.w2;
    const uint8_t* all_scales = gemm == 0 ? p.w13_scale : p.w2_scale;
#pragma unroll 1
    for (int known = -1; work.count > 0; --work.count) {
      if constexpr (kGathers<Fixed>) {
        if (gemm == 0 && work.entry != known) {
          known = work.entry;
          const Entry entry = fixed.entries[known];
          copy_rows(args, fixed, base, entry, run++, rows);
          rows = entry.count;
        }
      }
      const int begin = work.part * work.part_tiles, end = min(begin + work.part_tiles, k_tiles);
      const int64_t row = static_cast<int64_t>(fixed.entries[work.entry].expert) * row_tiles + work.row_tile;
      int64_t tile = row * k_tiles + begin;
      if constexpr (kHasBlocks<Format>) {
        prefetch_scales<kKind>(args, work, fixed.entries[work.entry].expert, gemm, end);
      }
#pragma unroll 1
      for (int k = begin; k < end; k += work.stage_tiles) {
        const int tiles = min(work.stage_tiles, end - k);
        const uint32_t to = ring + turn.stage * stage_bytes, bar = full + 8 * turn.stage;
        barrier_wait(empty + 8 * turn.stage, turn.parity);
        if constexpr (kIsBytes<Format>) {
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
