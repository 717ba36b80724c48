// Decode of very few tokens (at most eight, and 32 slots): latency is everything.
//
// One thread block per multiprocessor, all of them resident. The weights that a block multiplies are an equal and fixed
// share, known as soon as the ids are, so that its copies of both GEMMs' weights are under way from the start. Blocks
// exchange sums through memory without barriers (decode_exchange.cuh): whoever multiplies a row of the intermediate makes
// it of GEMM1's sums, and the outputs are combined by whoever finds all of a row's sums.
#include <atomic>

#include "decode_exchange.cuh"
#include "decode_few_operand.cuh"
#include "decode_few_feed.cuh"
#include "decode_few_sort.cuh"
#include "formats.cuh"
#include "decode_combine.cuh"

namespace moeq::sm90::few {

// This warp's share of a stage: tiles `first`, first + 4, ...
template <class Format>
__device__ __forceinline__ void multiply_stage(const uint8_t* codes, const uint8_t* scales, const uint8_t* row, int first,
                                               int tiles, float (&sums)[4]) {
#pragma unroll 2
  for (int tile = first; tile < tiles; tile += kWorkers) {
    const uint4 code = *reinterpret_cast<const uint4*>(codes + tile * kTileCodeBytes);
    const auto word = *reinterpret_cast<const typename Format::ScaleWord*>(scales + tile * Format::kTileScaleBytes);
    const uint4 b0 = *reinterpret_cast<const uint4*>(row + tile * 128);
    const uint4 b1 = *reinterpret_cast<const uint4*>(row + tile * 128 + 16);
    const auto scale = Format::scales(word);
    uint32_t a[4];
    Format::decode(code.x, scale, a);
    decode::multiply_add(sums, a, b0.x, b0.y);
    Format::decode(code.y, scale, a);
    decode::multiply_add(sums, a, b0.z, b0.w);
    Format::decode(code.z, scale, a);
    decode::multiply_add(sums, a, b1.x, b1.y);
    Format::decode(code.w, scale, a);
    decode::multiply_add(sums, a, b1.z, b1.w);
  }
}

// A warp's sums of a unit, the `number`-th of this block, for the finishers.
__device__ __forceinline__ void leave_sums(const Args& args, Fixed& fixed, int gemm, int count, int number, float (&sums)[4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, buffer = number % 2;
  barrier_wait(shared_address(&fixed.freed[buffer]), number / 2 % 2 ^ 1);
  float(*to)[kTileRows] = fixed.sums[buffer][warp / 4];
  const int row = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (column + j < count) {
      const float factor = gemm == 1 && args.p.a2 == ActScale::kToken ? fixed.h_factor[column + j] : 1.0f;
      to[column + j][row] = sums[j] * factor;
      to[column + j][row + 8] = sums[j + 2] * factor;
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    sums[j] = 0.0f;
  }
  __syncwarp();
  if (lane == 0) {
    barrier_arrive(shared_address(&fixed.summed[buffer]));
  }
}

__device__ __forceinline__ void store_two(const Problem& p, int64_t at, float a, float b) {
  if (p.out_type == OutType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(a, b);
  } else if (p.out_type == OutType::kBfloat16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + at) = __floats2bfloat162_rn(a, b);
  } else {
    *reinterpret_cast<__half2*>(static_cast<__half*>(p.out) + at) = __floats2half2_rn(a, b);
  }
}

// out[token] = sum over its slots, ascending, of weight * (alpha2 * sums + bias), in float32. `rehearse`: the same without
// waiting for sums and without a result.
__device__ __noinline__ void combine(const Args& args, const Fixed& fixed, int thread, bool rehearse) {
  constexpr int kAtOnce = 8;
  const Problem& p = args.p;
  const uint32_t epoch = fixed.epoch;
  const int per_token = p.hidden / 2, all = p.tokens * per_token, each = (all + gridDim.x - 1) / gridDim.x;
  const int per_slot = args.row_tiles[1] * (kTileRows / 2), parts = fixed.work[1].parts;
  const int part_bits = __ffs(parts) - 1, items = p.top_k * parts;
  const int begin = blockIdx.x * each, end = min(begin + each, all);
#pragma unroll 1
  for (int at = begin + thread; at < end; at += kThreads) {
    const int token = at / per_token, pair = at - token * per_token, first = token * p.top_k;
    const Pair* from = reinterpret_cast<const Pair*>(exchange) + args.outputs + static_cast<int64_t>(first) * per_slot + pair;
    float sum[2] = {}, y[2] = {};
#pragma unroll 1
    for (int item = 0; item < items; item += kAtOnce) {
      Pair v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int slot = (item + i) >> part_bits, part = (item + i) & (parts - 1);
        v[i] = {};
        if (item + i < items && fixed.place[first + slot] != kForeign) {
          v[i] = look(from + (part * args.slots + slot) * per_slot);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int slot = (item + i) >> part_bits, part = (item + i) & (parts - 1);
        if (item + i >= items || fixed.place[first + slot] == kForeign) {
          continue;
        }
        if (!rehearse) {
          await(v[i], from + (part * args.slots + slot) * per_slot, epoch);
        }
        y[0] = part == 0 ? v[i].a() : y[0] + v[i].a();
        y[1] = part == 0 ? v[i].b() : y[1] + v[i].b();
        if (part == parts - 1) {
          const Share share = fixed.shares[first + slot];
          float2 bias = {0.0f, 0.0f};
          if (p.w2_bias != nullptr) {
            const int64_t expert = fixed.entries[fixed.place[first + slot]].expert;
            const float* of = p.w2_bias + expert * p.hidden + 2 * pair;
            bias = {of[0], of[1]};
          }
          sum[0] = fmaf(share.weight, fmaf(y[0], share.alpha, bias.x), sum[0]);
          sum[1] = fmaf(share.weight, fmaf(y[1], share.alpha, bias.y), sum[1]);
        }
      }
    }
    if (!rehearse) {
      store_two(p, static_cast<int64_t>(token) * p.hidden + 2 * pair, sum[0], sum[1]);
    }
  }
}

// Adds up what the warps leave of all units, and sends it. Each finisher takes every fourth column.
__device__ __forceinline__ void finish_units(const Args& args, Fixed& fixed, uint8_t* base) {
  const int lane = threadIdx.x % 32, finisher = threadIdx.x / 32 - kWarps - 1;
  const uint32_t epoch = fixed.epoch;
  int number = 0;
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    Work work = fixed.work[gemm];
    const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
    const bool whole = gemm == 0 && finishes_hidden(args, fixed);
#pragma unroll 1
    for (; work.count > 0; --work.count, ++number) {
      const int buffer = number % 2;
      const Entry entry = fixed.entries[work.entry];
      barrier_wait(shared_address(&fixed.summed[buffer]), number / 2 % 2);
#pragma unroll 1
      for (int column = finisher; column < entry.count; column += kFinishers) {
        float2 all = {0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < kWorkers; ++w) {
          const float2 one = *reinterpret_cast<const float2*>(&fixed.sums[buffer][w][column][2 * lane]);
          all.x += one.x, all.y += one.y;
        }
        const int slot = fixed.slots[entry.first + column];
        if (whole) {
          send_hidden(args, fixed, entry, work.entry, slot, work.row_tile, all);
        } else {
          const int64_t line = static_cast<int64_t>(work.part) * args.slots + slot;
          send_pair((gemm == 0 ? 0 : args.outputs) + (line * row_tiles + work.row_tile) * (kTileRows / 2) + lane, all.x,
                    all.y, epoch);
        }
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(shared_address(&fixed.freed[buffer]));
      }
      next_unit(work, row_tiles);
    }
  }
}

template <class Format>
__device__ __forceinline__ void run_gemm(const Args& args, Fixed& fixed, uint8_t* base, int gemm, Turn& turn, int& number) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, thread = threadIdx.x % 128;
  const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
  const int k_tiles = gemm == 0 ? args.k_tiles[0] : args.k_tiles[1];
  const int stage_bytes = args.stage_tiles * kTileBytes;
  const uint32_t full = shared_address(fixed.full), empty = shared_address(fixed.empty);
  const int scales_at = args.stage_tiles * kTileCodeBytes + Format::scale_offset(thread);
  Work work = fixed.work[gemm];
  int known = -1;
  Entry entry = {};
  const uint8_t* row = nullptr;
  float sums[4] = {};
#pragma unroll 1
  for (int unit = 0; unit < work.count; ++unit) {
    const int begin = work.part * work.part_tiles, end = min(begin + work.part_tiles, k_tiles);
    if (work.entry * kMaxParts + work.part != known) {
      known = work.entry * kMaxParts + work.part;
      entry = fixed.entries[work.entry];
      const int column = min(lane / 4, entry.count - 1);   // columns without a token repeat the last one
      if (gemm == 0) {
        const int token = fixed.slots[entry.first + column] / args.p.top_k;
        row = base + args.x_offset + token * args.x_stride + begin * 128 + lane % 4 * 32;
      } else {
        gather_hidden(args, fixed, work, k_tiles, base + args.h_offset, threadIdx.x, false);
        row = base + args.h_offset + column * args.h_stride + lane % 4 * 32;
      }
    }
#pragma unroll 1
    for (int k = begin; k < end; k += work.stage_tiles) {
      const uint8_t* codes = base + args.ring_offset + turn.stage * stage_bytes;
      const int done = k - begin;
      barrier_wait(full + 8 * turn.stage, turn.parity);
      multiply_stage<Format>(codes + 16 * thread, codes + scales_at, row + done * 128,
                     (warp / 4 - done) & 3, min(work.stage_tiles, end - k), sums);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(empty + 8 * turn.stage);
      }
      next_stage(turn, args.stages);
    }
    leave_sums(args, fixed, gemm, entry.count, number, sums);
    ++number;
    next_unit(work, row_tiles);
  }
}

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

template <class Format>
__device__ __forceinline__ void work(const Args& args, Fixed& fixed, uint8_t* base) {
  load_shares(args, fixed);
  barrier_wait(shared_address(&fixed.tokens), 0);
  if (args.p.a1 != ActScale::kNone) {
    quantize_tokens(args, fixed, base + args.x_offset);
  }
  Turn turn = {0, 0};
  int number = 0;
#pragma unroll 1
  for (int gemm = 0; gemm < 2; ++gemm) {
    run_gemm<Format>(args, fixed, base, gemm, turn, number);
  }
  sync_workers();   // the shares of other threads, where there was nothing to multiply
  combine(args, fixed, threadIdx.x, false);
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

template <class Format>
__global__ void __launch_bounds__(kBlockThreads, 1) decode_few_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t base[];
  touch_parameters(args);
  Fixed& fixed = *reinterpret_cast<Fixed*>(base);
  const bool routes = args.p.router.logits != nullptr;
  const int warp = threadIdx.x / 32;
  if (warp == kWarps) {
    const int lane = threadIdx.x % 32;
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
    if (threadIdx.x == kThreads) {
      copy_weights<Format>(args, fixed, base);
    }
  } else if (warp > kWarps) {
    finish_units(args, fixed, base);
  } else {
    work<Format>(args, fixed, base);
  }
}

const void* kernel_of(Format format) {
  switch (format) {
    case Format::kNvfp4:
      return reinterpret_cast<const void*>(decode_few_kernel<Nvfp4Format>);
    case Format::kMxfp4:
      return reinterpret_cast<const void*>(decode_few_kernel<Mxfp4Format>);
    case Format::kInt4Per32:
      return reinterpret_cast<const void*>(decode_few_kernel<Int4Format<32>>);
    case Format::kInt4Per64:
      return reinterpret_cast<const void*>(decode_few_kernel<Int4Format<64>>);
    default:
      return reinterpret_cast<const void*>(decode_few_kernel<Int4ZeroFormat>);
  }
}

cudaError_t run(const Plan& plan) {
  constexpr int kDevices = 64;
  constexpr int kFormats = 5;
  static std::atomic<bool> done[kDevices][kFormats];
  const Format format = plan.args.p.format;
  const void* kernel = kernel_of(format);
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && (device >= kDevices || !done[device][static_cast<int>(format)])) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
    if (device < kDevices) {
      done[device][static_cast<int>(format)] = error == cudaSuccess;
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
