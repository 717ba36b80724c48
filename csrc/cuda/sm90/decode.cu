// Decode: a whole MoE layer of few tokens in one launch.
//
// One thread block per multiprocessor, all of them resident (a cooperative launch). Each works out the routing alone.
// The row tiles of all active experts are dealt out to the blocks; two warps of each copy them into a ring in shared
// memory, sixteen multiply them on the tensor cores. Two grid barriers: the intermediate must be complete before GEMM2
// multiplies it (its weights are under way by then), and GEMM2's sums before they are combined.
#include <atomic>

#include "decode_combine.cuh"
#include "decode_routing.cuh"

namespace moeq::sm90::decode {

// What must be known across thread blocks, on each device. Launches follow each other here without anybody zeroing it:
// a launch adds kArrivals for each block to `arrivals`, so the count says which launch this is, and launches take turns
// at the two sets of `taken`, each clearing the other's. That needs launches never to overlap: each takes all shared
// memory of all multiprocessors (and all at once: it is cooperative), so a block of the next one can only start where
// one of this one has ended, which is after the last arrival of all.
struct State {
  alignas(128) unsigned long long arrivals;
  alignas(128) uint32_t taken[2][2][32];
};
__device__ State state;
constexpr int kArrivals = 4;

__device__ __forceinline__ unsigned long long arrivals_so_far() {
  unsigned long long count;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(&state.arrivals) : "memory");
  return count;
}

// All workers of all blocks. The `steps` of a launch's barriers add up to kArrivals. Who waits may do something useful.
template <typename Meanwhile>
__device__ __forceinline__ void sync_grid(Fixed& fixed, unsigned steps, int ready, Meanwhile meanwhile) {
  sync_workers();
  if (threadIdx.x == 0) {
    const unsigned long long mine = steps;
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(&state.arrivals), "l"(mine) : "memory");
    fixed.target += mine * gridDim.x;
    while (arrivals_so_far() < fixed.target) {
    }
    asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(shared_address(&fixed.ready)), "r"(ready) : "memory");
  } else if (threadIdx.x >= 32) {
    meanwhile();
  }
  sync_workers();
}

template <int kGroups>
__device__ __forceinline__ void work(const Args& args, const Shared& s) {
  const Ring ring = ring_of(s, args);
  Fixed& fixed = *s.fixed;
  const auto nothing = [] {};
  unsigned arrivals = kArrivals;
  if (args.operand != nullptr && !args.private_operand) {
    make_operand(args, fixed);
    sync_grid(fixed, 1, 0, nothing);
    --arrivals;
  }
  const int worker = threadIdx.x / 128;
  Turn turn = {0, 0};
  next_stage(turn, ring, worker);
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    if (worker < ring.workers) {
      run_gemm<kGroups>(args, s, ring, gemm, turn);
    }
    if (gemm == 0) {
      fence_async_proxy();
      if (args.wide != nullptr) {
        sync_grid(fixed, 1, 0, nothing);
        quantize_hidden(args, fixed);
        --arrivals;
      }
    }
    // The last barrier makes up for those that there were not.
    sync_grid(fixed, gemm == 0 ? 1 : arrivals, 1, [&] {
      if (gemm == 0) {
        load_shares(args, s);
      }
    });
    --arrivals;
    if (gemm == 0 && blockIdx.x == 0 && threadIdx.x < 2) {
      state.taken[1 - fixed.launch][threadIdx.x][0] = 0;
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
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  if (i == 0) {
    const unsigned long long each = kArrivals * gridDim.x, launch = arrivals_so_far() / each;
    fixed.target = launch * each;
    fixed.launch = launch % 2;
    fixed.next_row[0] = state.taken[launch % 2][0];
    fixed.next_row[1] = state.taken[launch % 2][1];
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

template <int kGroups>
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
    work<kGroups>(args, s);
  }
}

// Once for each device and kernel; repeated by a race at worst.
cudaError_t allow_shared_memory(const void* kernel, int groups, int bytes) {
  constexpr int kDevices = 64;
  static std::atomic<bool> done[kDevices][5];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && (device >= kDevices || !done[device][groups])) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (device < kDevices) {
      done[device][groups] = error == cudaSuccess;
    }
  }
  return error;
}

const void* kernel_of(int groups) {
  return groups == 1   ? reinterpret_cast<const void*>(decode_kernel<1>)
         : groups == 2 ? reinterpret_cast<const void*>(decode_kernel<2>)
                       : reinterpret_cast<const void*>(decode_kernel<4>);
}

}  // namespace moeq::sm90::decode

namespace moeq::sm90 {

int decode_max_tokens(const Problem& p) { return p.top_k < 1 ? 0 : decode::kMaxSlots / p.top_k; }

size_t decode_workspace(const Problem& p) {
  decode::Plan plan;
  return decode::make_plan(p, plan) == cudaSuccess ? plan.workspace : 0;
}

cudaError_t decode_run(const Problem& p) {
  if (p.tokens > decode_max_tokens(p)) {
    return cudaErrorInvalidValue;
  }
  if (p.tokens == 0) {
    return cudaSuccess;
  }
  decode::Plan plan;
  cudaError_t error = decode::make_plan(p, plan);
  if (error != cudaSuccess) {
    return error;
  }
  const void* kernel = decode::kernel_of(plan.groups);
  error = decode::allow_shared_memory(kernel, plan.groups, plan.shared_bytes);
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.grid);
  config.blockDim = dim3(decode::kBlockThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = p.stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* arguments[] = {&plan.args};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace moeq::sm90
