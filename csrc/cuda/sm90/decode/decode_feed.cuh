// The copies: which row tiles a thread block takes, and how they reach its ring.
//
// A block's first row tile of a GEMM is that of its own number, further ones are taken from a counter: whoever is fast
// takes more. A stage holds up to 16 neighbours in K of one row tile, and the same stretch of K of the entry's
// tokens. Stages go to the four workers in turn.
#pragma once
#include "decode_shared.cuh"

namespace moeq::sm90::decode {

struct Ring {
  uint8_t* base;
  uint32_t full, empty, issued;    // addresses of their first barriers
  StageInfo* info;
  int stage_tiles;                 // that a stage has room for
  int row_bytes, weight_bytes;     // of a token's row in a stage; of all weights, which come first
  int stages, stage_bytes;
  int workers;                     // that multiply: all four, unless there are fewer stages
};

__device__ __forceinline__ Ring ring_of(const Shared& s, const Args& args) {
  Ring ring;
  ring.stage_tiles = 2 * kStageTiles;
  do {
    ring.stage_tiles /= 2;
    ring.weight_bytes = ring.stage_tiles * (kTileCodeBytes + args.tile_scale_bytes);
    // The odd 16 bytes spread eight tokens' 16-byte reads over all banks.
    ring.row_bytes = ring.stage_tiles * kTileK * 2 + 16;
    ring.stage_bytes = ring.weight_bytes + s.fixed->widest * ring.row_bytes;
    ring.stages = min(args.ring_bytes / ring.stage_bytes, kMaxStages);
  } while (ring.stages < kWorkers && ring.stage_tiles > kLeastStageTiles);
  ring.workers = min(ring.stages, kWorkers);
  // A stage is always the same worker's: waiting for its next phase is only right for who has seen the last one.
  ring.stages -= ring.stages % ring.workers;
  ring.base = s.ring;
  ring.full = shared_address(s.fixed->full);
  ring.empty = shared_address(s.fixed->empty);
  ring.issued = shared_address(s.fixed->issued);
  ring.info = s.fixed->stages;
  return ring;
}

// Stages of a unit of `tiles` tiles. Workers take stages in turn, and a buffer for their sums must always serve the
// same ones: either all, or two of four.
__device__ __forceinline__ int stages_of(const Ring& ring, int tiles) {
  const int stages = (tiles + ring.stage_tiles - 1) / ring.stage_tiles;
  return stages > 1 && stages < ring.workers && ring.workers % stages != 0 ? ring.workers : stages;
}

// One GEMM as the copies and the products see it.
struct Gemm {
  const uint8_t* codes;
  const uint8_t* scales;
  const __nv_bfloat16* rows;
  int row_tiles, k_tiles, depth;   // depth: K
  int parts, part_tiles;           // of K, each with sums of its own: a unit of work
  int stages, stage_tiles;         // of a unit
  int slots_per_row;
  uint32_t total;                  // parts of row tiles of all entries
};

// 0: GEMM1, 1: GEMM2. Not a template argument: code that runs twice is fetched once.
__device__ __forceinline__ Gemm gemm_of(const Args& args, const Ring& ring, int gemm, int entries) {
  const Problem& p = args.p;
  Gemm m;
  m.codes = gemm == 0 ? p.w13 : p.w2;
  m.scales = gemm == 0 ? p.w13_scale : p.w2_scale;
  m.depth = gemm == 0 ? p.hidden : p.inter;
  m.row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
  m.k_tiles = gemm == 0 ? args.k_tiles[0] : args.k_tiles[1];
  if (gemm == 1) {
    m.rows = args.h;
    m.slots_per_row = 1;
  } else {
    m.rows = args.operand != nullptr ? operand_of(args) : static_cast<const __nv_bfloat16*>(p.x);
    m.slots_per_row = operand_by_slot(p) ? 1 : p.top_k;
  }
  m.parts = gemm == 0 ? 1 : args.output_parts;
  m.part_tiles = gemm == 0 ? m.k_tiles : m.k_tiles / m.parts;
  m.stages = stages_of(ring, m.part_tiles);
  m.stage_tiles = (m.part_tiles + m.stages - 1) / m.stages;
  m.total = static_cast<uint32_t>(entries) * m.row_tiles * m.parts;
  return m;
}

// Which stage of the ring comes next.
struct Turn {
  int stage;
  uint32_t parity;
};

__device__ __forceinline__ void next_stage(Turn& turn, const Ring& ring, int steps = 1) {
  turn.stage += steps;
  while (turn.stage >= ring.stages) {
    turn.stage -= ring.stages;
    turn.parity ^= 1;
  }
}

__device__ __forceinline__ int row_bytes(const Gemm& m, int k, int tiles) {
  return 2 * min(tiles * kTileK, m.depth - k * kTileK);
}

__device__ __forceinline__ uint32_t take_row(uint32_t* next_row) { return gridDim.x + atomicAdd(next_row, 1u); }

// The stages of one GEMM: weights. One thread.
__device__ __forceinline__ void copy_weights(const Args& args, const Shared& s, const Ring& ring, int gemm,
                                             Turn& turn) {
  const Gemm m = gemm_of(args, ring, gemm, s.fixed->entries);
  uint32_t row = blockIdx.x;
  for (int count = 0; row < m.total; ++count) {
    const uint32_t next = take_row(s.fixed->next_row[gemm]);   // not waited for until this row is under way
    const int part = row % m.parts, row_tile = row / m.parts % m.row_tiles, entry = row / m.parts / m.row_tiles;
    const int begin = part * m.part_tiles, end = begin + m.part_tiles;
    const int64_t tile = (static_cast<int64_t>(s.entries[entry].expert) * m.row_tiles + row_tile) * m.k_tiles + begin;
    const uint8_t* codes = m.codes + tile * kTileCodeBytes;
    const uint8_t* scales = m.scales + tile * args.tile_scale_bytes;
    for (int k = begin; k < end; k += m.stage_tiles) {
      const int tiles = min(m.stage_tiles, end - k);
      const uint32_t full = ring.full + 8 * turn.stage;
      const uint32_t to = shared_address(ring.base) + turn.stage * ring.stage_bytes;
      barrier_wait(ring.empty + 8 * turn.stage, turn.parity);
      ring.info[turn.stage] = {gemm | part << 2 | count << 4, entry, row_tile, k << 8 | tiles};
      barrier_expect(full, tiles * (kTileCodeBytes + args.tile_scale_bytes));
      copy_bulk(to, codes, tiles * kTileCodeBytes, full);
      copy_bulk(to + ring.stage_tiles * kTileCodeBytes, scales, tiles * args.tile_scale_bytes, full);
      barrier_arrive(ring.issued + 8 * turn.stage);
      codes += tiles * kTileCodeBytes;
      scales += tiles * args.tile_scale_bytes;
      next_stage(turn, ring);
    }
    row = next;
  }
  for (int worker = 0; worker < ring.workers; ++worker) {   // each must hear of the end
    barrier_wait(ring.empty + 8 * turn.stage, turn.parity);
    ring.info[turn.stage] = {kEnd, 0, 0, 0};
    barrier_arrive(ring.full + 8 * turn.stage);
    barrier_arrive(ring.issued + 8 * turn.stage);
    next_stage(turn, ring);
  }
}

__device__ __forceinline__ void await_ready(const Shared& s, int gemm) {
  int ready;
  do {
    asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(ready) : "r"(shared_address(&s.fixed->ready)) : "memory");
  } while (ready < gemm);
  fence_async_proxy();
}

// The stages of one GEMM: the tokens' rows. One warp; lane n copies row n: an entry has 32 at most.
__device__ __forceinline__ void copy_rows(const Args& args, const Shared& s, const Ring& ring, int gemm, Turn& turn) {
  const Gemm m = gemm_of(args, ring, gemm, s.fixed->entries);
  const int lane = threadIdx.x % 32;
  int known = -1;
  Entry entry = {};
  const __nv_bfloat16* first_row = nullptr;   // this lane's
  await_ready(s, gemm);
  for (int ends = 0; ends < ring.workers;) {
    barrier_wait(ring.issued + 8 * turn.stage, turn.parity);
    const StageInfo info = ring.info[turn.stage];
    const uint32_t full = ring.full + 8 * turn.stage;
    if ((info.kind_and_turn & 3) == kEnd) {
      ++ends;
      __syncwarp();   // all lanes have read the description
      if (lane == 0) {
        barrier_arrive(full);
      }
    } else {
      if (info.entry != known) {
        known = info.entry;
        entry = s.entries[known];
        const int slot = s.slots[entry.first + min(lane, entry.count - 1)];
        first_row = m.rows + static_cast<int64_t>(slot / m.slots_per_row) * m.depth;
      }
      const int k = info.k_and_tiles >> 8, bytes = row_bytes(m, k, info.k_and_tiles & 255);
      if (lane == 0) {
        barrier_expect(full, entry.count * bytes);
      }
      __syncwarp();
      if (lane < entry.count) {
        const uint32_t to = shared_address(ring.base) + turn.stage * ring.stage_bytes + ring.weight_bytes;
        copy_bulk(to + lane * ring.row_bytes, first_row + k * kTileK, bytes, full);
      }
    }
    next_stage(turn, ring);
  }
}

// Two warps: one thread of the first copies weights, which run ahead of the rows where those are not in memory yet.
__device__ inline void produce(const Args& args, const Shared& s) {
  const Ring ring = ring_of(s, args);
  if (threadIdx.x < kThreads + 32) {
    if (threadIdx.x == kThreads) {
      Turn turn = {0, 1};
#pragma unroll 1
      for (int gemm = 0; gemm < 2; ++gemm) {
        copy_weights(args, s, ring, gemm, turn);
      }
    }
  } else {
    Turn turn = {0, 0};
#pragma unroll 1
    for (int gemm = 0; gemm < 2; ++gemm) {
      copy_rows(args, s, ring, gemm, turn);
    }
  }
}

}  // namespace moeq::sm90::decode
