// The router's product in the launch that runs the experts: each block multiplies the tokens by the router's rows of a
// few experts, and sends the logits to all others. Sums are those of route_hidden.cuh, bit for bit: of the same parts
// of K, each summed by the same instructions (a row of a tensor core's tile depends on no other row), added in the same
// order.
#pragma once
#include "../routing/route_hidden.cuh"
#include "decode_few_prepare.cuh"
#include "decode_few_routed.h"

namespace moeq::sm90::few {

// [parts of K, experts of the block, columns], until they are added: in the place of units' sums.
__device__ __forceinline__ float* router_parts(const RoutedArgs& all, uint8_t* base) {
  return reinterpret_cast<float*>(base + all.args.sums_offset);
}
static_assert(kMaxRouterParts * kRouterRows * sizeof(float) <= 2 * kWorkers * kTileRows * sizeof(float),
              "there is room");

// A logit is two words of the exchange, like half a pair.
__device__ __forceinline__ uint64_t* sent_logits(const RoutedArgs& all, uint32_t epoch, int token) {
  return reinterpret_cast<uint64_t*>(half_of(all.args, epoch)) + all.logits + token * all.args.p.router.experts;
}

// One warp: its parts of the block's logits, of the rows that a lane has: an expert's and a token's, or null. Not
// inlined, as what follows needs all registers; values, as in decode_few_sort.cuh.
__device__ __noinline__ inline void multiply_router_parts(const uint16_t* weight, const uint16_t* token, int size,
                                                          int parts, float inverse_parts, int columns, float* to) {
  using namespace hidden;
  constexpr int kLine = 128 / sizeof(uint16_t);
  const int lane = lane_of_warp(), chunks = (size + kChunk - 1) / kChunk, column = lane % 4 * 2;
#pragma unroll 1
  for (int part = threadIdx.x / 32; part < parts; part += kWarps) {
    const int begin = quotient(chunks * part, inverse_parts), end = quotient(chunks * (part + 1), inverse_parts);
    const int next = quotient(chunks * (part + kWarps), inverse_parts) * kChunk + lane % 4 * kLine;
    if (weight != nullptr && next < size) {  // its next part: a lane for each line
      asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + next));
    }
    float sum[4] = {};
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += kAhead) {
      uint4 a[kAhead], c[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int k = (chunk + i) * kChunk + lane % 4 * 8;
        const bool inside = chunk + i < end && k < size;
        a[i] = load_or_zero(weight, k, inside && weight != nullptr);
        c[i] = load_or_zero(token, k, inside && token != nullptr);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        multiply(sum, a[i].x, 0, a[i].y, 0, c[i].x, c[i].y);
        multiply(sum, a[i].z, 0, a[i].w, 0, c[i].z, c[i].w);
      }
    }
    float* row = to + (part * kRouterRows + lane / 4) * columns;
    if (column < columns) row[column] = sum[0];
    if (column + 1 < columns) row[column + 1] = sum[1];
  }
}

// All workers: the block's experts are numbers blockIdx.x, + gridDim.x, ..., a row of the tile each.
__device__ __forceinline__ void multiply_router(const RoutedArgs& all, uint8_t* base) {
  const Problem& p = all.args.p;
  const RouterProduct& product = all.product;
  if (static_cast<int>(blockIdx.x) >= p.router.experts) return;
  const int row = lane_of_warp() / 4, expert = blockIdx.x + row * gridDim.x;
  const uint16_t* weight = static_cast<const uint16_t*>(product.weight) + expert * product.weight_stride;
  const uint16_t* token = static_cast<const uint16_t*>(p.x) + static_cast<int64_t>(row) * p.hidden;
  multiply_router_parts(expert < p.router.experts ? weight : nullptr, row < p.tokens ? token : nullptr, p.hidden,
                        product.parts, product.inverse_parts, all.args.columns, router_parts(all, base));
}

// A thread for each of the block's logits, once the launch is counted: adds its parts, writes it and sends it.
__device__ __forceinline__ void send_logits(const RoutedArgs& all, const Fixed& fixed, uint8_t* base, float bias) {
  const Problem& p = all.args.p;
  const int row = threadIdx.x / kColumns, token = threadIdx.x % kColumns;
  const int expert = blockIdx.x + row * gridDim.x;
  if (row >= kRouterRows || token >= p.tokens || expert >= p.router.experts) return;
  const float* part = router_parts(all, base) + row * all.args.columns + token;
  const int apart = kRouterRows * all.args.columns;
  float sum = part[0];
#pragma unroll 8
  for (int i = 1; i < all.product.parts; ++i) sum += part[i * apart];
  if (all.product.bias != nullptr) sum += bias;
  const int64_t at = int64_t{token} * p.router.experts + expert;
  const float logit = hidden::store_rounded(const_cast<void*>(p.router.logits), p.router.type, at, sum);
  const uint64_t item = static_cast<uint64_t>(fixed.epoch) << 32 | __float_as_uint(logit);
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(sent_logits(all, fixed.epoch, token) + expert), "l"(item)
               : "memory");
}

// Loaded before the product, which takes longer.
__device__ __forceinline__ float bias_of_logit(const RoutedArgs& all) {
  const int row = threadIdx.x / kColumns, expert = blockIdx.x + row * gridDim.x;
  if (all.product.bias == nullptr || row >= kRouterRows || expert >= all.args.p.router.experts) return 0.0f;
  return hidden::load_as_float(all.product.bias, all.product.bias_type, expert);
}

// One warp: a token's logits, as soon as all blocks have sent them.
template <int each>
__device__ __forceinline__ void receive_logits(const uint64_t* from, uint32_t epoch, int experts, float (&z)[each]) {
  const int lane = lane_of_warp();
  uint64_t items[each];
  BoundedWait wait;
  bool all_there = false;
  while (!all_there) {
    all_there = true;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      items[i] = static_cast<uint64_t>(epoch) << 32;
      if (32 * i + lane < experts) {
        asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(items[i]) : "l"(from + 32 * i + lane) : "memory");
      }
    }
#pragma unroll
    for (int i = 0; i < each; ++i) all_there = all_there && static_cast<uint32_t>(items[i] >> 32) == epoch;
    check_wait(wait);
  }
#pragma unroll
  for (int i = 0; i < each; ++i) z[i] = __uint_as_float(static_cast<uint32_t>(items[i]));
  __syncwarp();
}

// One warp: ids and weights of a token, like route_one.
template <int each>
__device__ __noinline__ void route_sent(Fixed& fixed, const uint64_t* from, int token, int waiting) {
  float z[each];
  receive_logits(from, fixed.epoch, fixed.router.experts, z);
  const int first = token * fixed.router.top_k;
  route_loaded<true>(fixed.router, z, fixed.ids + first, fixed.weights + first, [&] {
    __syncwarp();
    named_arrive(kIdsKnown, waiting);
  });
}

// What was chosen, for the caller: of a token by one block.
__device__ __forceinline__ void keep_choice(const RoutedArgs& all, const Fixed& fixed, int token) {
  const int top_k = all.args.p.router.top_k, lane = lane_of_warp(), at = token * top_k + lane;
  if (keeps_choice(token) && lane < top_k) {
    all.product.ids[at] = fixed.ids[at];
    all.product.weights[at] = fixed.weights[at];
  }
}

// The workers of a block that multiplies by the router: like prepare_slots.
__device__ __forceinline__ void route_slots(const RoutedArgs& all, Fixed& fixed, uint8_t* base, bool few_slots) {
  const Args& args = all.args;
  const int thread = threadIdx.x, tokens = args.p.tokens, router = thread / 32 - kFirstRouter;
  const int waiting = 32 * tokens + (few_slots ? 32 : kMaxSlots);
  const float bias = bias_of_logit(all);
  multiply_router(all, base);
  clear_padding(args, fixed, base);
  named_barrier(kCounted, kThreads + 32);
  send_logits(all, fixed, base, bias);
  if (!few_slots) {
    sync_workers();  // parts have been added
    clear_slots_of_experts(args, base);
    sync_workers();
  }
  if (router >= 0 && router < tokens) {
    keep_router(args, fixed);
    const uint64_t* from = sent_logits(all, fixed.epoch, router);
    const int experts = args.p.router.experts;
    if (experts <= 32) {
      route_sent<1>(fixed, from, router, waiting);
    } else if (experts <= 128) {
      route_sent<4>(fixed, from, router, waiting);
    } else if (experts <= 256) {
      route_sent<8>(fixed, from, router, waiting);
    } else {
      route_sent<16>(fixed, from, router, waiting);
    }
    keep_choice(all, fixed, router);
  }
  if (!few_slots && thread < kMaxSlots) {
    named_barrier(kIdsKnown, waiting);
    const int expert = thread < args.slots ? local_expert(args.p, fixed.ids[thread]) : -1;
    const int entries = sort_many(fixed, slots_of_experts(args, base), args.columns, expert);
    if (thread < 2) {
      fixed.work[thread] = share_of(args, thread, entries);
    }
  }
}

// How a block of this launch is prepared (decode_few_kernel.cuh).
struct OwnLogits {
  const RoutedArgs& all;
  __device__ __forceinline__ void prepare(Fixed& fixed, uint8_t* base, bool few_slots) const {
    route_slots(all, fixed, base, few_slots);
  }
  static __device__ __forceinline__ void counted() {
    __syncwarp();
    named_arrive(kCounted, kThreads + 32);
  }
};

}  // namespace moeq::sm90::few
