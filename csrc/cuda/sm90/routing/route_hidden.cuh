// The product of routers: logits of eight tokens by one cluster, all experts. A warp has 16 experts and a part of K, in
// one tensor core tile [16 experts, 8 tokens]; each part of a token's logits is stored into the shared memory of the
// block that has the token, where they are added in the order of their K. No sum depends on the number of tokens.
#pragma once
#include "../device/async.cuh"
#include "route.cuh"
#include "route_hidden.h"

namespace moeq::sm90::hidden {

constexpr int max_of(int a, int b) { return a > b ? a : b; }

constexpr int kTokens = 8;  // of a cluster: columns of a tile
constexpr int kRows = 16;  // experts of a tile
constexpr int kChunk = 32;  // of K: four threads have 16 bytes of a row each
constexpr int kAhead = 4;  // chunks that are loaded before the first is multiplied
constexpr int kMaxBlocks = 16;  // of a cluster
// Parts of K times experts: whole tiles, either several parts by one block or one.
constexpr int kMaxParts = kMaxBlocks * max_of(kMaxRouterExperts, kMaxWarps* kRows);

struct Shared {
  float parts[kMaxParts];  // [parts of K, experts, rounded up to tiles] of the block's token
  float logits[kMaxRouterExperts];
  int chosen[32];  // of the warp that chooses
};

// How a block's warps divide its share of K.
struct Division {
  int tiles;  // of experts
  int slices;  // of the block's K: warps that share a tile
  int parts;  // of all K
  __device__ __forceinline__ Division(int experts, int blocks)
      : tiles((experts + kRows - 1) / kRows),
        slices(max(static_cast<int>(blockDim.x) / 32 / tiles, 1)),
        parts(blocks * slices) {}
};

struct Range {
  int begin, end;
};

// Chunks of one of `parts` parts of K.
__device__ __forceinline__ Range chunks_of(int hidden, int part, int parts) {
  const int chunks = (hidden + kChunk - 1) / kChunk;
  return {chunks * part / parts, chunks * (part + 1) / parts};
}

__device__ __forceinline__ uint4 load_or_zero(const uint16_t* row, int k, bool exists) {
  return exists ? *reinterpret_cast<const uint4*>(row + k) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One part of K of the logits of a tile's 16 experts and of the tokens from `first` on, as a tensor core has results.
// Which K an operand's columns stand for is free, if both operands agree: a thread's are eight neighbours in memory.
__device__ __forceinline__ void multiply_tile(const RouteHidden& call, int tile, int first, Range chunks,
                                              float (&sum)[4]) {
  const int lane = threadIdx.x % 32, row = lane / 4, expert = tile * kRows + row;
  const uint16_t* upper = static_cast<const uint16_t*>(call.weight) + expert * call.weight_stride;
  const uint16_t* lower = upper + kRows / 2 * call.weight_stride;
  const uint16_t* token = static_cast<const uint16_t*>(call.x) + (first + row) * call.x_stride;
  const bool has_upper = expert < call.router.experts, has_lower = expert + kRows / 2 < call.router.experts;
  const bool has_token = first + row < call.tokens;
  for (int chunk = chunks.begin; chunk < chunks.end; chunk += kAhead) {
    uint4 a[kAhead], b[kAhead], c[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = (chunk + i) * kChunk + lane % 4 * 8;
      const bool inside = chunk + i < chunks.end && k < call.hidden;
      a[i] = load_or_zero(upper, k, inside && has_upper);
      b[i] = load_or_zero(lower, k, inside && has_lower);
      c[i] = load_or_zero(token, k, inside && has_token);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      multiply(sum, a[i].x, b[i].x, a[i].y, b[i].y, c[i].x, c[i].y);
      multiply(sum, a[i].z, b[i].z, a[i].w, b[i].w, c[i].z, c[i].w);
    }
  }
}

// A part of the logits to the blocks that have their tokens: block t of the cluster has the token first + t.
__device__ __forceinline__ void send_tile(const RouteHidden& call, Shared& s, const Division& division, int tile,
                                          int part, int first, const float (&sum)[4]) {
  const int lane = threadIdx.x % 32, columns = division.tiles * kRows;
  const uint32_t to = shared_address(&s.parts[part * columns + tile * kRows + lane / 4]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane % 4 * 2 + i;
    if (first + token >= call.tokens) continue;
    const uint32_t address = address_in_block(to, token);
    store_in_cluster(address, sum[i]);
    store_in_cluster(address + kRows / 2 * sizeof(float), sum[i + 2]);
  }
}

// Brings the block's share of the weights into the L2, which may be done before the wait.
__device__ __forceinline__ void prefetch_weights(const RouteHidden& call, Range chunks) {
  const int begin = chunks.begin * kChunk, end = min(chunks.end * kChunk, call.hidden);
  if (begin >= end) return;
  for (int row = threadIdx.x; row < call.router.experts; row += blockDim.x) {
    const uint16_t* from = static_cast<const uint16_t*>(call.weight) + row * call.weight_stride + begin;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"((end - begin) * 2) : "memory");
  }
}

// Writes a logit as `type` has it; returns what was written.
__device__ __forceinline__ float store_rounded(void* values, LogitType type, int64_t at, float value) {
  switch (type) {
    case LogitType::kBfloat16: {
      const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
      static_cast<__nv_bfloat16*>(values)[at] = rounded;
      return __bfloat162float(rounded);
    }
    case LogitType::kFloat16: {
      const __half rounded = __float2half_rn(value);
      static_cast<__half*>(values)[at] = rounded;
      return __half2float(rounded);
    }
    default:
      static_cast<float*>(values)[at] = value;
      return value;
  }
}

// Adds a token's parts, in the order of their K.
__device__ __forceinline__ void add_parts(const RouteHidden& call, Shared& s, const Division& division, int token) {
  const int columns = division.tiles * kRows, experts = call.router.experts;
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    const float* part = s.parts + expert;
    float sum = part[0];
#pragma unroll 8
    for (int i = 1; i < division.parts; ++i) sum += part[i * columns];
    if (call.bias != nullptr) sum += load_as_float(call.bias, call.bias_type, expert);
    const int64_t at = int64_t{token} * experts + expert;
    s.logits[expert] = store_rounded(const_cast<void*>(call.router.logits), call.router.type, at, sum);
  }
}

// One warp, once `s.logits` are there.
template <int each>
__device__ __forceinline__ void choose(const RouteHidden& call, Shared& s, int token) {
  const int lane = threadIdx.x % 32;
  float z[each], bias[each];
#pragma unroll
  for (int i = 0; i < each; ++i) z[i] = 32 * i + lane < call.router.experts ? s.logits[32 * i + lane] : 0.0f;
  load_bias(call.router, bias);
  const int64_t at = int64_t{token} * (call.router.top_k + call.shared.count);
  route_loaded(call.router, z, bias, s.chosen, call.ids + at, call.weights + at);
  append_shared(call.router, call.shared, token, call.ids + at, call.weights + at);
}

}  // namespace moeq::sm90::hidden
