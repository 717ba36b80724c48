// The router's product in the launch that runs the experts: each block multiplies the tokens by the router's rows of a
// few experts, and sends the logits to all others. Sums are those of route_hidden.cuh, bit for bit: of the same parts
// of K, each summed by the same instructions (a row of a tensor core's tile depends on no other row), added in the same
// order.
//
// Instructions that a multiprocessor has not run since other kernels did take long to come: in a model, where others
// run between all launches, 4 us of this one. What comes behind the wait for logits is therefore rehearsed before it,
// by warps that have nothing else to do: the choice by a helper, sorting by those that sort. Both must be at the same
// instructions, not at copies of them: functions that are not inlined, or a loop.
#pragma once
#include "../routing/route_hidden.cuh"
#include "decode_few_gemm.cuh"
#include "decode_few_prepare.cuh"
#include "decode_few_routed.h"

namespace moeq::sm90::few {

// [experts of the block, columns, parts of K], until they are added: in the place of units' sums.
__device__ __forceinline__ float* router_parts(const RoutedArgs& all, uint8_t* base) {
  return reinterpret_cast<float*>(base + all.args.sums_offset);
}
static_assert(kMaxRouterParts * kRouterRows * sizeof(float) <= 2 * kWorkers * kTileRows * sizeof(float),
              "there is room");

// Sixteen bytes are read at a time.
__device__ __forceinline__ int padded_parts(int parts) { return (parts + 3) & ~3; }
static_assert(kMaxRouterParts % 4 == 0, "there is room for those, too");

// A logit is two words of the exchange, like half a pair.
__device__ __forceinline__ uint64_t* sent_logits(const RoutedArgs& all, uint32_t epoch, int token) {
  return reinterpret_cast<uint64_t*>(half_of(all.args, epoch)) + all.logits + token * all.args.p.router.experts;
}

// The block's experts are numbers blockIdx.x, + gridDim.x, ..., a row of the tile each. Their rows of the router lie
// where weights will, as far apart as tokens.
__device__ __forceinline__ int expert_of_row(int row) { return blockIdx.x + row * gridDim.x; }

__device__ __forceinline__ uint32_t router_row(const RoutedArgs& all, uint8_t* base, int row) {
  return shared_address(base + all.args.ring_offset) + row * all.args.x_stride;
}

// One warp: the tokens and the router's rows are on their way, a lane each.
__device__ __forceinline__ void copy_operands(const RoutedArgs& all, Fixed& fixed, uint8_t* base) {
  const Problem& p = all.args.p;
  const RouterProduct& product = all.product;
  const int lane = lane_of_warp(), row = lane - kMaxTokens, bytes = p.hidden * 2;
  const bool has_row = row >= 0 && row < kRouterRows && expert_of_row(row) < p.router.experts;
  const int rows = __popc(__ballot_sync(0xffffffffu, has_row));
  const uint32_t landed = shared_address(&fixed.tokens);
  if (lane == 0) {
    barrier_init(landed, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(landed, (p.tokens + rows) * bytes);
  }
  __syncwarp();
  if (lane < p.tokens) {
    copy_bulk(shared_address(base + all.args.x_offset) + lane * all.args.x_stride,
              static_cast<const uint16_t*>(p.x) + static_cast<int64_t>(lane) * p.hidden, bytes, landed);
  } else if (has_row) {
    copy_bulk(router_row(all, base, row),
              static_cast<const uint16_t*>(product.weight) + expert_of_row(row) * product.weight_stride, bytes, landed);
  }
  named_arrive(kOperandsAsked, kThreads + 32);
}

// One warp: its parts of the block's logits, of the rows that a lane has, in shared memory: an expert's and a token's,
// or 0. Not inlined, as what follows needs all registers; values, as in decode_few_prepare.cuh.
__device__ __noinline__ inline void multiply_router_parts(uint32_t weight, uint32_t token, int size, int parts,
                                                          float inverse_parts, int columns, float* to) {
  using namespace hidden;
  const int lane = lane_of_warp(), chunks = (size + kChunk - 1) / kChunk, column = lane % 4 * 2;
#pragma unroll 1
  for (int part = threadIdx.x / 32; part < parts; part += kWarps) {
    const int begin = quotient(chunks * part, inverse_parts), end = quotient(chunks * (part + 1), inverse_parts);
    float sum[4] = {};
#pragma unroll 1
    for (int chunk = begin; chunk < end; ++chunk) {
      const int k = chunk * kChunk + lane % 4 * 8;
      const bool inside = k < size;
      const uint4 a = inside && weight != 0 ? load_16(weight + 2 * k) : make_uint4(0, 0, 0, 0);
      const uint4 c = inside && token != 0 ? load_16(token + 2 * k) : make_uint4(0, 0, 0, 0);
      multiply(sum, a.x, 0, a.y, 0, c.x, c.y);
      multiply(sum, a.z, 0, a.w, 0, c.z, c.w);
    }
    float* row = to + (lane / 4 * columns + column) * padded_parts(parts) + part;
    if (column < columns) row[0] = sum[0];
    if (column + 1 < columns) row[padded_parts(parts)] = sum[1];
  }
}

// All workers.
__device__ __forceinline__ void multiply_router(const RoutedArgs& all, Fixed& fixed, uint8_t* base) {
  const Args& args = all.args;
  const RouterProduct& product = all.product;
  if (static_cast<int>(blockIdx.x) >= args.p.router.experts) return;
  const int row = lane_of_warp() / 4;
  const uint32_t weight = expert_of_row(row) < args.p.router.experts ? router_row(all, base, row) : 0;
  const uint32_t token = row < args.p.tokens ? shared_address(base + args.x_offset) + row * args.x_stride : 0;
  barrier_wait(shared_address(&fixed.tokens), 0);
  multiply_router_parts(weight, token, args.p.hidden, product.parts, product.inverse_parts, args.columns,
                        router_parts(all, base));
}

// A thread for each of the block's logits, once the launch is counted: adds its parts, writes it and sends it.
__device__ __forceinline__ void send_logits(const RoutedArgs& all, const Fixed& fixed, uint8_t* base, float bias) {
  const Problem& p = all.args.p;
  const int row = threadIdx.x / kColumns, token = threadIdx.x % kColumns;
  const int expert = expert_of_row(row);
  if (row >= kRouterRows || token >= p.tokens || expert >= p.router.experts) return;
  const int parts = all.product.parts;
  const float4* part =
      reinterpret_cast<const float4*>(router_parts(all, base) + (row * all.args.columns + token) * padded_parts(parts));
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < parts; i += 4) {
    const float4 four = part[i / 4];
    sum = i == 0 ? four.x : sum + four.x;
    sum = i + 1 < parts ? sum + four.y : sum;
    sum = i + 2 < parts ? sum + four.z : sum;
    sum = i + 3 < parts ? sum + four.w : sum;
  }
  if (all.product.bias != nullptr) sum += bias;
  const int64_t at = int64_t{token} * p.router.experts + expert;
  const float logit = hidden::store_rounded(const_cast<void*>(p.router.logits), p.router.type, at, sum);
  const uint64_t item = static_cast<uint64_t>(fixed.epoch) << 32 | __float_as_uint(logit);
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(sent_logits(all, fixed.epoch, token) + expert), "l"(item)
               : "memory");
}

// Loaded before the product, which takes longer.
__device__ __forceinline__ float bias_of_logit(const RoutedArgs& all) {
  const int row = threadIdx.x / kColumns, expert = expert_of_row(row);
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

// One warp: ids and weights of a token, like route_one. `from` is null where it is rehearsed: of other logits, for
// nobody.
template <int each>
__device__ __noinline__ void route_sent(Fixed& fixed, const uint64_t* from, int token, int waiting) {
  float z[each];
  const int first = token * fixed.router.top_k;
  int32_t* ids = fixed.ids + first;
  float* weights = fixed.weights + first;
  if (from != nullptr) {
    receive_logits(from, fixed.epoch, fixed.router.experts, z);
  } else {
    ids = reinterpret_cast<int32_t*>(fixed.output_alphas);  // loaded when all warps have come to kPrepared
    weights = fixed.output_alphas + 32;
#pragma unroll
    for (int i = 0; i < each; ++i) z[i] = static_cast<float>(32 * i + lane_of_warp());
  }
  route_loaded<true>(fixed.router, z, ids, weights, [&] {
    __syncwarp();
    if (from != nullptr) named_arrive(kIdsKnown, waiting);
  });
}
static_assert(kMaxSlots >= 2 * 32, "room for what is rehearsed");

__device__ __forceinline__ void route_sent(const RoutedArgs& all, Fixed& fixed, const uint64_t* from, int token,
                                           int waiting) {
  const int experts = all.args.p.router.experts;
  keep_router(all.args, fixed);
  if (experts <= 32) {
    route_sent<1>(fixed, from, token, waiting);
  } else if (experts <= 128) {
    route_sent<4>(fixed, from, token, waiting);
  } else if (experts <= 256) {
    route_sent<8>(fixed, from, token, waiting);
  } else {
    route_sent<16>(fixed, from, token, waiting);
  }
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
  named_barrier(kOperandsAsked, kThreads + 32);
  multiply_router(all, fixed, base);
  clear_padding(args, fixed, base);
  named_barrier(kCounted, kThreads + 32);
  send_logits(all, fixed, base, bias);
  if (!few_slots) {
    sync_workers();  // parts have been added
    clear_slots_of_experts<kMaxSlots>(args, base);
    sync_workers();
  }
  if (router >= 0 && router < tokens) {
    route_sent(all, fixed, sent_logits(all, fixed.epoch, router), router, waiting);
    keep_choice(all, fixed, router);
  }
  if (!few_slots && thread < kMaxSlots) {
    sort_many(fixed, slots_of_experts<kMaxSlots>(args, base), args.columns, -1);  // rehearsed
    named_barrier(kIdsKnown, waiting);
    const int expert = thread < args.slots ? local_expert(args.p, fixed.ids[thread]) : -1;
    const int entries = sort_many(fixed, slots_of_experts<kMaxSlots>(args, base), args.columns, expert);
    if (thread < 2) {
      fixed.work[thread] = share_of(args, thread, entries);
    }
  }
}

// One warp: the block's share of what the launch will exchange comes into the L2, where other kernels' data has taken
// its place. Of several tokens it is so much that it gets in the way of the operands.
__device__ __forceinline__ void prefetch_exchange(const RoutedArgs& all, uint32_t epoch) {
  constexpr int kLine = 128, kWords = kLine / sizeof(uint64_t);
  const Problem& p = all.args.p;
  if (p.tokens > 1) return;
  const char* half = reinterpret_cast<const char*>(half_of(all.args, epoch));
  const int lines = (all.logits + p.router.experts + kWords - 1) / kWords;  // logits are the last
#pragma unroll 1
  for (int line = blockIdx.x * 32 + lane_of_warp(); line < lines; line += gridDim.x * 32) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(half + line * kLine));
  }
}

// How a block of this launch is prepared (decode_few_kernel.cuh).
struct OwnLogits {
  static constexpr bool kRehearses = true;
  const RoutedArgs& all;
  __device__ __forceinline__ void prepare(Fixed& fixed, uint8_t* base, bool few_slots) const {
    route_slots(all, fixed, base, few_slots);
  }
  __device__ __forceinline__ void copy(Fixed& fixed, uint8_t* base) const { copy_operands(all, fixed, base); }
  __device__ __forceinline__ void touch(int line) const { touch_parameters(all, line); }
  __device__ __forceinline__ void rehearse(Fixed& fixed) const { route_sent(all, fixed, nullptr, 0, 0); }
  __device__ __forceinline__ void counted(const Fixed& fixed) const {
    __syncwarp();
    named_arrive(kCounted, kThreads + 32);
    prefetch_exchange(all, fixed.epoch);
  }
};

}  // namespace moeq::sm90::few
