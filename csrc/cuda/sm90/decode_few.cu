// Decode of very few tokens: latency is everything.
//
// One thread block per multiprocessor, all of them resident. The weights that a block multiplies are an equal and fixed
// share, known as soon as the ids are, so that its copies of both GEMMs' weights are under way from the start. Blocks
// exchange sums through memory without barriers (decode_exchange.cuh): the intermediate is made of GEMM1's sums by the
// blocks that multiply it, or by those that have all sums of a row tile, and outputs are combined from GEMM2's sums.
#include <atomic>

#include "decode_few_combine.cuh"
#include "decode_few_feed.cuh"
#include "decode_few_gemm.cuh"
#include "decode_few_sort.cuh"

namespace moeq::sm90::few {

// Of slots and entries, loaded while the first weights are under way.
__device__ __forceinline__ void load_shares(const Args& args, Fixed& fixed) {
  const Problem& p = args.p;
  const int slot = threadIdx.x;
  if (slot < args.slots && fixed.place[slot] != kForeign) {
    const int expert = fixed.entries[fixed.place[slot]].expert;
    const float weight = p.router.logits != nullptr ? fixed.weights[slot] : p.topk_weights[slot];
    fixed.shares[slot] = {(p.g2_alphas == nullptr ? 1.0f : p.g2_alphas[expert]) * args.scale, weight};
    float2 alphas = {1.0f, 1.0f};
    if (p.g1_alphas != nullptr) {
      const float* of = p.g1_alphas + static_cast<int64_t>(expert) * p.alphas13;
      alphas = {of[0], of[p.alphas13 - 1]};
    }
    fixed.alphas[fixed.place[slot]] = alphas;   // the same from all slots of an entry
  }
}

template <class Format, Kind kKind>
__device__ __forceinline__ void work(const Args& args, Fixed& fixed, uint8_t* base) {
  load_shares(args, fixed);
  barrier_wait(shared_address(&fixed.tokens), 0);
  if (Case<kKind>::quantizes_tokens(args.p)) {
    quantize_tokens<kKind>(args, fixed, base + args.x_offset);
  }
  Turn turn = {0, 0};
  int number = 0;
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    run_gemm<Format, kKind>(args, fixed, base, gemm, turn, number);
  }
  sync_workers();   // the shares of other threads, where there was nothing to multiply
  combine<kKind>(args, fixed);
}

__device__ __forceinline__ void touch_parameters(const Args& args) {
  constexpr int kLine = 64 / sizeof(int);
  const int word = threadIdx.x / 32 * kLine;
  if (word < static_cast<int>(sizeof(Args) / sizeof(int))) {
    asm volatile("" ::"r"(reinterpret_cast<const int*>(&args)[word]));
  }
}

// Beyond the tokens' ends: zeros up to whole tiles.
__device__ __forceinline__ void clear_padding(const Args& args, Fixed& fixed, uint8_t* base) {
  const int tail = args.k_tiles[0] * kTileK - args.p.hidden;
  if (static_cast<int>(threadIdx.x) < tail) {
    for (int token = 0; token < args.p.tokens; ++token) {
      uint8_t* row = base + args.x_offset + token * args.x_stride;
      reinterpret_cast<__nv_bfloat16*>(row)[args.p.hidden + threadIdx.x] = __float2bfloat16_rn(0.0f);
    }
  }
  if (threadIdx.x < kMaxTokens) {
    fixed.amax[threadIdx.x] = 0;
  }
}

template <class Format, Kind kKind>
__global__ void __launch_bounds__(kBlockThreads, 1) decode_few_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t base[];
  Fixed& fixed = *reinterpret_cast<Fixed*>(base);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  touch_parameters(args);
  const bool routes = args.p.router.logits != nullptr;
  if (warp == kWarps) {
    const bool sorts = args.slots <= 32 && !routes;
    const int id = sorts && lane < args.slots ? args.p.topk_ids[lane] : 0;   // on its way meanwhile
    start_block(args, fixed, base);
    if (sorts) {
      sort_few(args, fixed, lane < args.slots ? local_expert(args.p, id) : -1);
    }
  } else if (warp < kWarps) {
    clear_padding(args, fixed, base);
    if (routes) {
      route_tokens(args, fixed);
      sync_workers();
    }
    if (threadIdx.x < kMaxSlots && (args.slots > 32 || routes)) {
      sort_many(args, fixed);
    }
  }
  __syncthreads();
  if (warp == kWarps) {
    if (lane == 0) {
      copy_weights<Format>(args, fixed, base);
    }
    __syncwarp();
    await_epochs(fixed.epoch);
  } else if (warp > kWarps) {
    finish_units<kKind>(args, fixed, base);
  } else {
    work<Format, kKind>(args, fixed, base);
  }
}

template <class Format>
const void* kernel_of(Kind kind) {
  return kind == Kind::kPlain ? reinterpret_cast<const void*>(decode_few_kernel<Format, Kind::kPlain>)
                              : reinterpret_cast<const void*>(decode_few_kernel<Format, Kind::kGeneral>);
}

const void* kernel_of(Format format, Kind kind) {
  switch (format) {
    case Format::kMxfp4:
      return kernel_of<Mxfp4Format>(kind);
    case Format::kInt4Per32:
      return kernel_of<Int4Format<32>>(kind);
    case Format::kInt4Per64:
      return kernel_of<Int4Format<64>>(kind);
    case Format::kInt4Zero:
      return kernel_of<Int4ZeroFormat>(kind);
    default:
      return kind == Kind::kQuantized ? reinterpret_cast<const void*>(decode_few_kernel<Nvfp4Format, Kind::kQuantized>)
                                      : kernel_of<Nvfp4Format>(kind);
  }
}

cudaError_t run(const Plan& plan) {
  constexpr int kDevices = 64;
  constexpr int kFormats = 5, kKinds = 3;
  static std::atomic<bool> done[kDevices][kFormats * kKinds];
  const int which = static_cast<int>(plan.args.p.format) * kKinds + static_cast<int>(plan.kind);
  const void* kernel = kernel_of(plan.args.p.format, plan.kind);
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && (device >= kDevices || !done[device][which])) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
    if (device < kDevices) {
      done[device][which] = error == cudaSuccess;
    }
  }
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute cooperative;
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(plan.grid);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = plan.args.p.stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<Args*>(&plan.args)};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace moeq::sm90::few
