// The decode kernel, for each format of weights (decode.cu) and number of tokens an expert.
#pragma once
#include "decode_epilogue.cuh"
#include "decode_routing.cuh"
#include "../device/bounded_wait.cuh"

namespace moeq::sm90::decode {

// What the sixteen multiplying warps do: a worker is four of them; the workers take the stages of a row tile in turn,
// and add up their sums at its end.

// Adds the workers' sums up, in the order of the first stages that they had. `rank` is the caller's place in it, of
// `ranks`; the owner, who had the last stage, gets the result and true.
template <int kGroups>
__device__ __forceinline__ bool add_up(const Shared& s, int gemm, uint32_t turn, int rank, int ranks, int owner,
                                       Sums<kGroups>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int buffer = turn % 2;
  const uint32_t parity = turn / 2 % 2;
  const uint32_t summed = shared_address(&s.fixed->summed[gemm][buffer][warp]);
  const uint32_t taken = shared_address(&s.fixed->taken[gemm][buffer][warp]);
  const auto place = [&](int of_rank, int group) {
    return s.sums + (((buffer * kWorkers + of_rank) * 4 + warp) * kGroups + group) * 32 + lane;
  };
  if (rank != owner) {
    barrier_wait(taken, parity ^ 1);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      *place(rank, i) = make_float4(sums.v[i][0], sums.v[i][1], sums.v[i][2], sums.v[i][3]);
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(summed);
    }
    return false;
  }
  if (ranks > 1) {
    barrier_wait(summed, parity);
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    float4 all = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < kWorkers; ++r) {
      if (r < ranks) {
        const float4 mine = make_float4(sums.v[i][0], sums.v[i][1], sums.v[i][2], sums.v[i][3]);
        const float4 one = r == owner ? mine : *place(r, i);
        all.x += one.x, all.y += one.y, all.z += one.z, all.w += one.w;
      }
    }
    sums.v[i][0] = all.x, sums.v[i][1] = all.y, sums.v[i][2] = all.z, sums.v[i][3] = all.w;
  }
  __syncwarp();
  if (lane == 0) {
    barrier_arrive(taken);
  }
  return true;
}

// GEMM2's sums go to memory as they are.
template <int kGroups>
__device__ inline void finish_output(const Args& args, const Shared& s, const RowTile<kGroups>& tile_row, int part,
                                     const Sums<kGroups>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, hidden = args.p.hidden;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = i * kGroupTokens + lane % 4 * 2 + j % 2;
      const int row = tile_row.row_tile * kTileRows + 16 * warp + lane / 4 + j / 2 * 8;
      if (column < tile_row.what.count && row < hidden) {
        const int slot = s.slots[tile_row.what.first + column];
        __stcg(args.y + (static_cast<int64_t>(part) * args.slots + slot) * hidden + row, sums.v[i][j]);
      }
    }
  }
}

// A warp goes to its next stage. No lane reads this one or its description any more when one arrives for all.
__device__ __forceinline__ void leave_stage(const Ring& ring, Turn& turn) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(ring.empty + 8 * turn.stage);
  }
  next_stage(turn, ring, ring.workers);
}

// The worker's share of one GEMM. `turn` is where its next stage is in the ring.
template <class Format, int kGroups>
__device__ __forceinline__ void run_gemm(const Args& args, const Shared& s, const Ring& ring, int gemm, Turn& turn) {
  const Gemm m = gemm_of(args, ring, gemm, s.fixed->entries);
  const int lane = threadIdx.x % 32;
  const bool ragged = m.depth % kTileK != 0;
  const bool beyond = (m.k_tiles - 1) * kTileK + lane % 4 * 16 >= m.depth;   // in the last tile
  const int ranks = min(m.stages, ring.workers), owner = (m.stages - 1) % ring.workers;
  RowTile<kGroups> tile_row;
  tile_row.entry = -1;
  Alphas alphas = {};
  Sums<kGroups> sums;
  clear(sums);
  while (true) {
    barrier_wait(ring.full + 8 * turn.stage, turn.parity);
    const StageInfo info = ring.info[turn.stage];
    const int k = info.k_and_tiles >> 8, tiles = info.k_and_tiles & 255;
    if ((info.kind_and_turn & 3) == kEnd) {
      leave_stage(ring, turn);
      return;
    }
    const bool last = k + tiles == m.k_tiles;
    const uint8_t* stage = ring.base + turn.stage * ring.stage_bytes;
    if (info.entry != tile_row.entry) {
      open_entry<Format>(s, ring, tile_row, info.entry);
      if (gemm == 0) {
        alphas = load_alphas(args, tile_row.what.expert);
      }
    }
    tile_row.row_tile = info.row_tile;
    if (!(last && ragged)) {
#pragma unroll 4
      for (int tile = 0; tile < tiles; ++tile) {
        multiply_tile<Format>(stage, tile, tile_row, nullptr, sums);
      }
    } else {
      for (int tile = 0; tile < tiles; ++tile) {
        multiply_tile<Format>(stage, tile, tile_row, last && beyond && tile == tiles - 1 ? s.fixed->zeros : nullptr,
                              sums);
      }
    }
    leave_stage(ring, turn);
    const int part = info.kind_and_turn >> 2 & 3;
    const int stage_of_unit = (k - part * m.part_tiles) / m.stage_tiles;
    if (stage_of_unit + ring.workers >= m.stages) {
      if (add_up(s, gemm, info.kind_and_turn >> 4, stage_of_unit % ring.workers, ranks, owner, sums)) {
        if (gemm == 0) {
          finish_hidden(args, s, tile_row, alphas, sums);
        } else {
          finish_output(args, s, tile_row, part, sums);
        }
      }
      clear(sums);
    }
  }
}

// The decode kernel, for each format of weights (decode.cu) and number of tokens an expert.
__device__ __forceinline__ unsigned long long arrivals_so_far(const State* state) {
  unsigned long long count;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(&state->arrivals) : "memory");
  return count;
}

__device__ __forceinline__ void await_arrivals(const State* state, unsigned long long target) {
  BoundedWait wait;
  while (arrivals_so_far(state) < target) {
    if (wait.is_over()) {
      give_up("decode_kernel", "other thread blocks did not come to a grid barrier within seconds");
    }
  }
}

// All workers of all blocks. The `steps` of a launch's barriers add up to kArrivals. Who waits may do something useful.
template <typename Meanwhile>
__device__ __forceinline__ void sync_grid(State* state, Fixed& fixed, unsigned steps, int ready, Meanwhile meanwhile) {
  sync_workers();
  if (threadIdx.x == 0) {
    const unsigned long long mine = steps;
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(&state->arrivals), "l"(mine) : "memory");
    fixed.target += mine * gridDim.x;
    await_arrivals(state, fixed.target);
    asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(&fixed.ready)), "r"(ready) : "memory");
  } else if (threadIdx.x >= 32) {
    meanwhile();
  }
  sync_workers();
}

template <class Format, int kGroups>
__device__ __forceinline__ void work(const Args& args, const Shared& s) {
  const Ring ring = ring_of(s, args);
  Fixed& fixed = *s.fixed;
  const auto nothing = [] {};
  unsigned arrivals = kArrivals;
  if (args.operand != nullptr && !args.private_operand) {
    make_operand(args, fixed);
    sync_grid(args.state, fixed, 1, 0, nothing);
    --arrivals;
  }
  const int worker = threadIdx.x / 128;
  Turn turn = {0, 0};
  next_stage(turn, ring, worker);
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    if (worker < ring.workers) {
      run_gemm<Format, kGroups>(args, s, ring, gemm, turn);
    }
    if (gemm == 0) {
      fence_async_proxy();
      if (args.wide != nullptr) {
        sync_grid(args.state, fixed, 1, 0, nothing);
        round_hidden(args, fixed);
        --arrivals;
      }
    }
    // The last barrier makes up for those that there were not.
    sync_grid(args.state, fixed, gemm == 0 ? 1 : arrivals, 1, [&] {
      if (gemm == 0) {
        load_shares(args, s);
      }
    });
    --arrivals;
    if (gemm == 0 && blockIdx.x == 0 && threadIdx.x < 2) {
      args.state->taken[1 - fixed.launch][threadIdx.x][0] = 0;
    }
  }
  combine(args, s);
}

__device__ __forceinline__ void start_block(const Args& args, const Shared& s) {
  Fixed& fixed = *s.fixed;
  const int i = threadIdx.x % 32;
  if (i < kMaxStages) {
    barrier_init(shared_address(&fixed.full[i]), 2);
    barrier_init(shared_address(&fixed.issued[i]), 1);
    barrier_init(shared_address(&fixed.empty[i]), 4);
  }
  if (i < 8) {
    fixed.zeros[i] = 0;
  }
  fence_barrier_init();
  if (i == 0) {
    const unsigned long long each = kArrivals * gridDim.x, launch = arrivals_so_far(args.state) / each;
    fixed.target = launch * each;
    fixed.launch = launch % 2;
    fixed.next_row[0] = args.state->taken[launch % 2][0];
    fixed.next_row[1] = args.state->taken[launch % 2][1];
    fixed.ready = args.operand == nullptr || args.private_operand ? 0 : -1;
  }
}

// A launch's parameters are not in the constant cache yet; instead of waiting for each line in turn, fetch all at once.
__device__ __forceinline__ void touch_parameters(const Args& args) {
  constexpr int kLine = 64 / sizeof(int);
  const int word = threadIdx.x / 32 * kLine;
  if (word < static_cast<int>(sizeof(Args) / sizeof(int))) {
    asm volatile("" ::"r"(reinterpret_cast<const int*>(&args)[word]));
  }
}

// Once the routing is known.
__device__ __forceinline__ void start_sums(const Args& args, const Shared& s) {
  const int gemm = threadIdx.x / 8, buffer = threadIdx.x / 4 % 2, warp = threadIdx.x % 4;
  const int k_tiles = gemm == 0 ? args.k_tiles[0] : args.k_tiles[1] / args.output_parts;
  const Ring ring = ring_of(s, args);
  const int others = min(stages_of(ring, k_tiles), ring.workers) - 1;
  barrier_init(shared_address(&s.fixed->summed[gemm][buffer][warp]), max(others, 1));
  barrier_init(shared_address(&s.fixed->taken[gemm][buffer][warp]), 1);
}

template <class Format, int kGroups>
__global__ void __launch_bounds__(kBlockThreads, 1) decode_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t shared_base[];
  touch_parameters(args);
  const Shared s = shared_views(shared_base, args, kGroups);
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x < kThreads + 32) {
      start_block(args, s);
    }
  } else {
    route<kGroups * kGroupTokens>(args, s);
    if (threadIdx.x < 16) {
      start_sums(args, s);
    }
    if (args.operand != nullptr && args.private_operand) {
      make_operand(args, *s.fixed);
    }
    fence_async_proxy();   // the ring has been scratch memory
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    produce(args, s);
  } else {
    work<Format, kGroups>(args, s);
  }
}

template <class Format>
const void* kernel_for(int groups) {
  return groups == 1   ? reinterpret_cast<const void*>(decode_kernel<Format, 1>)
         : groups == 2 ? reinterpret_cast<const void*>(decode_kernel<Format, 2>)
                       : reinterpret_cast<const void*>(decode_kernel<Format, 4>);
}

}  // namespace moeq::sm90::decode
