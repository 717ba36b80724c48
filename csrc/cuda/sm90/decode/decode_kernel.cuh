// The decode kernel, for each format of weights (decode.cu) and number of tokens an expert.
#pragma once
#include "../device/bounded_wait.cuh"
#include "decode_epilogue.cuh"
#include "decode_routing.cuh"

namespace moeq::sm90::decode {

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
