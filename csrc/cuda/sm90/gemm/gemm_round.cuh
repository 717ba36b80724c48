// Intermediates rounded to e4m3 row by row, beside the multiplications, by a warp of each block.
//
// No tile of GEMM1 has whole rows. Its end leaves them in float32, and the largest magnitudes that it has of them where
// those of other tiles are ([inter_padded / 32, rows, 32], pieces of 16 bytes swizzled by the row, so that four rows
// are one copy). Once all tiles of weight rows have done so, the rows of a tile of tokens are rounded in units, which a
// counter deals out to all blocks: GEMM2's tiles come much later for all but the last experts, so that nobody waits.
#pragma once
#include "../numerics/e4m3_rows.cuh"
#include "gemm_producer.cuh"

namespace moeq::sm90 {

__device__ __forceinline__ bool barrier_is_over(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done; }"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

// Tells other blocks that a block's share of an intermediate may be rounded, as announce_intermediates does that it may
// be multiplied. By one thread.
template <class C>
struct Announcer {
  Ring<kWorkSlots> ring;
  bool ended = false;

  // Whether the next piece of work could be announced; waits for it if it may.
  template <bool waits>
  __device__ __forceinline__ bool announce(const GemmArgs& args, GemmShared<C>& shared) {
    const uint32_t full = shared_address(&shared.work_full[ring.slot]);
    if (waits) barrier_wait(full, ring.parity);
    if (!waits && !barrier_is_over(full, ring.parity)) return false;
    const Work& work = shared.work[ring.slot];
    ended = work.expert < 0;
    if (ended) return false;
    if (!work.second) {
      const uint32_t stored = shared_address(&shared.stored[ring.slot]);
      if (waits) barrier_wait(stored, ring.parity);
      if (!waits && !barrier_is_over(stored, ring.parity)) return false;
      fence_async_proxy();  // who rounds reads by bulk copies
      add_release(args.rounded.stored + work.arrivals, 1);
    }
    barrier_arrive(shared_address(&shared.work_empty[ring.slot]));
    ring.advance();
    return true;
  }
};

// Eight rows of a tile of tokens, and so many steps of K.
struct RoundingUnit {
  int number, tile, expert;
  int row, rows;  // the first row, and how many of them are real
  int part;
};

// All lanes.
__device__ __forceinline__ RoundingUnit take_unit(const GemmArgs& args, int total, int lane) {
  int number = 0;
  if (lane == 0) number = atomicAdd(args.rounded.next_unit, 1);
  number = __shfl_sync(0xffffffffu, number, 0);
  if (number >= total) return {number, 0, 0, 0, 0, 0};
  const int parts = units_of_rows(args), group = number / parts, row = group * kUnitRows;
  const int index = args.rounded.tile_of_rows[group];
  const TokenTile& tile = args.schedule.tiles[index];
  return {number, index, tile.expert, row, tile.start + tile.rows - row, number % parts};
}

__device__ __forceinline__ RowRounding rounding_of_row(const GemmArgs& args, int row, int expert) {
  const float* given = args.given_gscale;
  return with_inverse(given == nullptr ? dynamic_rounding(__ldcg(args.row_amax + row))
                                       : given_rounding(given[args.gscale_by_expert ? expert : 0]));
}

// The steps of a unit, of four rows each, through a ring in shared memory.
template <class C>
struct RoundingSteps {
  static constexpr int kStages = Sizes<C>::kRoundingStages;
  const GemmArgs& args;
  GemmShared<C>& shared;
  Ring<kStages>& ring;
  int row, k, log_halves;  // the first row and step of K; whether there are more than four rows

  __device__ __forceinline__ uint32_t stage(int slot) const { return shared_address(shared.rounding.stages[slot]); }

  // By one lane.
  __device__ __forceinline__ void copy(int step, int slot) const {
    const int first = row + (step & log_halves) * kRoundedRows, at = k + (step >> log_halves);
    const uint32_t full = shared_address(&shared.rounding_full[slot]);
    const float* from = args.h_wide + (int64_t{2} * at * args.rows + first) * 32;
    barrier_expect(full, 2 * kRoundedBytes);
    copy_bulk(stage(slot), from, kRoundedBytes, full);
    copy_bulk(stage(slot) + kRoundedBytes, from + int64_t{args.rows} * 32, kRoundedBytes, full);
  }

  // A lane's eight values, in the order in which GEMM2's fragments take them.
  __device__ __forceinline__ void load(float2 (&v)[4], int first, int lane) const {
    const int within = first % 8 + lane / 8;
    const uint32_t from = stage(ring.slot) + lane / 8 * 128;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t at = from + i / 2 * kRoundedBytes + wide_pair_offset(within, i % 2, lane % 8);
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[i].x), "=f"(v[i].y) : "r"(at));
    }
  }

  // By one lane, before anything else of the unit: it takes a latency of memory.
  __device__ __forceinline__ void begin(int steps) const {
    for (int step = 0, slot = ring.slot; step < min(steps, kStages); step++) {
      copy(step, slot);
      slot = slot + 1 == kStages ? 0 : slot + 1;
    }
  }

  __device__ __forceinline__ void run(int steps, const RowRounding (&how)[2], int lane) {
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const int half = step & log_halves, first = row + half * kRoundedRows, at = k + (step >> log_halves);
      barrier_wait(shared_address(&shared.rounding_full[ring.slot]), ring.parity);
      float2 v[4];
      load(v, first, lane);
      __syncwarp();
      if (lane == 0 && step + kStages < steps) copy(step + kStages, ring.slot);
      ring.advance();
      const int mine = first + lane / 8;
      __nv_bfloat16* to = args.h + (int64_t{at} * args.rows + mine) * kTileK + (lane % 8 ^ mine % 8) * 8;
      *reinterpret_cast<uint4*>(to) = rounded_eight(v, half == 0 ? how[0] : how[1]);
    }
  }
};

// All lanes.
template <class C>
__device__ __forceinline__ void round_unit(const GemmArgs& args, GemmShared<C>& shared, const RoundingUnit& unit,
                                           Ring<Sizes<C>::kRoundingStages>& ring, int lane) {
  const int k = unit.part * kUnitSteps, log_halves = unit.rows > kRoundedRows ? 1 : 0;
  const int count = min(kUnitSteps, args.inter_padded / kTileK - k) << log_halves;
  RoundingSteps<C> steps{args, shared, ring, unit.row, k, log_halves};
  if (lane == 0) {
    fence_async_proxy();
    steps.begin(count);
  }
  RowRounding how[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = unit.row + half * kRoundedRows + lane / 8;
    how[half] = rounding_of_row(args, row, unit.expert);
    if (unit.part == 0 && lane % 8 == 0) args.h_factor[row] = how[half].rounding.factor;
  }
  steps.run(count, how, lane);
  __syncwarp();
  if (lane == 0) {
    fence_async_proxy();  // GEMM2 reads the intermediate by bulk copies
    add_release(args.rounded.units + unit.tile, 1);
  }
}

// By a warp, which announces besides: what others wait for must not wait for a unit of theirs.
template <class C>
__device__ __forceinline__ void round_intermediates(const GemmArgs& args, GemmShared<C>& shared, int lane) {
  if constexpr (Sizes<C>::kRoundsBeside) {
    Announcer<C> announcer;
    Ring<Sizes<C>::kRoundingStages> ring;
    BoundedWait wait;
    const int total = *args.schedule.rows_total / kUnitRows * units_of_rows(args);
    RoundingUnit unit = take_unit(args, total, lane);
    while (unit.number < total) {
      int ready = 0;
      if (lane == 0) {
        while (!announcer.ended && announcer.template announce<false>(args, shared)) continue;
        ready = load_acquire(args.rounded.stored + unit.tile) >= args.blocks13;
        if (!ready) {
          if (wait.is_over()) *args.schedule.overdue = 1;
          if (wait.rests() && load_acquire(args.schedule.overdue) != 0) ready = -1;
        }
      }
      ready = __shfl_sync(0xffffffffu, ready, 0);
      __syncwarp();
      if (ready < 0) break;
      if (ready == 0) {
        __nanosleep(32);
        continue;
      }
      round_unit(args, shared, unit, ring, lane);
      wait = {};
      unit = take_unit(args, total, lane);
    }
    while (lane == 0 && !announcer.ended) announcer.template announce<true>(args, shared);
  }
}

}  // namespace moeq::sm90
