// Quantization of the intermediate: float32 rows of GEMM1's result become GEMM2's operand. Between the GEMMs, by a
// kernel of its own; or beside them, by warps of the GEMM kernel that would be idle, expert after expert as GEMM1
// finishes them.
#pragma once
#include "gemm_activation.cuh"
#include "gemm_async.cuh"
#include "w4a8_encode.cuh"
#include "w4a8_producer.cuh"

namespace moeq::sm90::w4a8 {

constexpr int kRowsAtOnce = 8;        // of one expert: rows of the operand begin at multiples of 8
constexpr int kManyRows = 4096;       // below, a warp takes a single row, so that all warps have some
constexpr int kAhead = 4;             // K tiles whose loads are under way together

// A K tile of a row: lane 4 * q + c has the values c of piece q.
__device__ __forceinline__ int first_of_lane() { return first_k(threadIdx.x % 32 / 4, threadIdx.x % 4); }

// activated: h is.
template <bool activated>
__device__ __forceinline__ float4 load_values(const GemmArgs& args, const float* h, int k) {
  const Problem& p = args.problem;
  const float4 v = __ldcg(reinterpret_cast<const float4*>(h + k));
  if constexpr (activated) return v;
  const float4 u = p.gated ? __ldcg(reinterpret_cast<const float4*>(h + p.inter + k)) : v;
  return make_float4(activate(p, v.x, u.x), activate(p, v.y, u.y), activate(p, v.z, u.z), activate(p, v.w, u.w));
}

__device__ __forceinline__ float largest_of(float4 v) {
  return max_magnitude(max_magnitude(v.x, v.y), max_magnitude(v.z, v.w));
}

__device__ __forceinline__ float warp_max(float value) {
  for (int step = 16; step > 0; step /= 2) value = max_magnitude(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

// How values become codes: times `by`, or divided by it.
struct Scale {
  float by, inverse;
  bool divides;

  __device__ __forceinline__ explicit Scale(float by, bool divides)
      : by(by), inverse(reciprocal(by)), divides(divides) {}
  // What multiplies accumulators.
  __device__ __forceinline__ float factor() const { return divides ? by : inverse; }
  // Whether `encode` may be used; else `encode_any`.
  __device__ __forceinline__ bool is_usual() const { return !divides || (by > 0x1p-100f && by < 0x1p100f); }
  __device__ __forceinline__ uint32_t encode(float4 v) const {
    if (!divides) return encode4(__fmul_rn(v.x, by), __fmul_rn(v.y, by), __fmul_rn(v.z, by), __fmul_rn(v.w, by));
    return encode4(quotient(v.x, by, inverse), quotient(v.y, by, inverse), quotient(v.z, by, inverse),
                   quotient(v.w, by, inverse));
  }
  __device__ __forceinline__ uint32_t encode_any(float4 v) const {
    return encode4(divide(v.x, by), divide(v.y, by), divide(v.z, by), divide(v.w, by));
  }
};

// The K tiles of a row that a warp does: first, first + step ...
struct Share {
  int first, step;
};

// Where a row's codes go: a word for each lane and K tile.
struct WordRow {
  uint32_t* at;
  int64_t stride;    // words from a K tile to the next

  __device__ WordRow(const GemmArgs& args, const Place& place) {
    const int local = place.row - place.start, lane = threadIdx.x % 32;
    at = reinterpret_cast<uint32_t*>(args.h_operand) +
         (int64_t{place.start} * args.second.k_tiles + local) * (kTileK / 4) + ((lane / 4 ^ local % 8) * 4 + lane % 4);
    stride = place.rows * (kTileK / 4);
  }
  __device__ __forceinline__ void store(int k, uint32_t codes) const { at[k * stride] = codes; }
};

// A row with one scale. h: its values of this lane.
template <bool activated>
__device__ __forceinline__ void quantize_row(const GemmArgs& args, const Place& place, const float* h, Share share,
                                             Scale scale) {
  const int k_tiles = args.second.k_tiles;
  const WordRow to(args, place);
  int k = share.first;
  if (scale.is_usual()) {
    for (; k + (kAhead - 1) * share.step < k_tiles; k += kAhead * share.step) {
      float4 v[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; i++) v[i] = load_values<activated>(args, h, (k + i * share.step) * kTileK);
#pragma unroll
      for (int i = 0; i < kAhead; i++) to.store(k + i * share.step, scale.encode(v[i]));
    }
  }
#pragma unroll 1
  for (; k < k_tiles; k += share.step) {
    const float4 v = load_values<activated>(args, h, k * kTileK);
    to.store(k, scale.is_usual() ? scale.encode(v) : scale.encode_any(v));
  }
}

// A row with a scale for each K tile.
template <bool activated>
__device__ __forceinline__ void quantize_groups(const GemmArgs& args, const Place& place, const float* h, Share share) {
  const int k_tiles = args.second.k_tiles;
  const WordRow to(args, place);
#pragma unroll 2
  for (int k = share.first; k < k_tiles; k += share.step) {
    const float4 v = load_values<activated>(args, h, k * kTileK);
    const Scale scale(scale_of(warp_max(largest_of(v))), true);
    to.store(k, scale.is_usual() ? scale.encode(v) : scale.encode_any(v));
    if (threadIdx.x % 32 == 0) args.h_factor[group_at(place, k_tiles, k)] = scale.by;
  }
}

// The largest magnitude of a warp's share.
template <bool activated>
__device__ __forceinline__ float find_max(const GemmArgs& args, const float* h, Share share) {
  float amax = 0.0f;
#pragma unroll 4
  for (int k = share.first; k < args.second.k_tiles; k += share.step) {
    amax = max_magnitude(amax, largest_of(load_values<activated>(args, h, k * kTileK)));
  }
  return warp_max(amax);
}

// By all warps that have a share; max_of_all(value): the largest of what they give.
template <class Policy, bool activated, class MaxOfAll>
__device__ __forceinline__ void quantize_place(const GemmArgs& args, const Place& place, Share share,
                                               MaxOfAll max_of_all) {
  const Problem& p = args.problem;
  const float* h = args.h + int64_t{place.row} * p.inter * (!activated && p.gated ? 2 : 1) + first_of_lane();
  if constexpr (Policy::kGroups) {
    quantize_groups<activated>(args, place, h, share);
  } else {
    const bool dynamic = p.a2 == ActScale::kToken;
    const Scale scale(dynamic ? scale_of(max_of_all(find_max<activated>(args, h, share)))
                              : p.a2_gscale[p.a2 == ActScale::kExpert ? place.expert : 0],
                      dynamic);
    quantize_row<activated>(args, place, h, share, scale);
    if (share.first == 0 && threadIdx.x % 32 == 0) args.h_factor[place.row] = scale.factor();
  }
}

// A warp of any block. A warp waits for items that others have taken, whom nothing keeps from finishing.
template <class Policy, bool activated>
__device__ __forceinline__ void quantize_beside(const GemmArgs& args) {
  const Schedule& schedule = args.schedule;
  const int lane = threadIdx.x % 32, total = schedule.start[args.problem.experts];
  const int step = total > kManyRows ? kRowsAtOnce : 1;
  int next = lane == 0 ? atomicAdd(schedule.next_row, step) : 0;
  while (true) {
    const int row = __shfl_sync(0xffffffffu, next, 0);
    if (row >= total) return;
    if (lane == 0) next = atomicAdd(schedule.next_row, step);   // its latency passes meanwhile
    Place place = schedule.place_of_row[row];
    if (place.row < 0) continue;
    const int count = schedule.count[place.expert];
    const int rows = min(step, place.start + count - place.row);
    wait_for_count(schedule.finished + place.expert, tiles_for(count) * row_blocks(args.first));
#pragma unroll 1
    for (int i = 0; i < rows; i++, place.row++) {
      quantize_place<Policy, activated>(args, place, {0, 1}, [](float amax) { return amax; });
    }
    fence_async_proxy();   // GEMM2 reads them by bulk copies
    __syncwarp();
    if (lane == 0) add_release(schedule.quantized + place.expert, rows);
  }
}

constexpr int kQuantizeThreads = 512;   // at most

// A launch between the GEMMs: a block a row, which it reads twice, the second time from the cache.
template <class Policy, bool activated>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_kernel(const __grid_constant__ GemmArgs args) {
  __shared__ float of_warp[kQuantizeThreads / 32];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int row = blockIdx.x, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (row >= args.schedule.start[args.problem.experts]) return;
  const Place place = args.schedule.place_of_row[row];
  if (place.row < 0) return;
  quantize_place<Policy, activated>(args, place, {warp, warps}, [&](float amax) {
    if (threadIdx.x % 32 == 0) of_warp[warp] = amax;
    __syncthreads();
    for (int i = 0; i < warps; i++) amax = max_magnitude(amax, of_warp[i]);
    return amax;
  });
}

}  // namespace moeq::sm90::w4a8
