// Quantization of the tokens to e4m3, one block a token, whose values lie in registers between maximum and codes.
#include <cuda_bf16.h>

#include "gemm_async.cuh"
#include "w4a8_encode.cuh"
#include "w4a8_quantize.cuh"

namespace moeq::sm90::w4a8 {
namespace {

__device__ __forceinline__ float block_max(float value, float* shared) {
  for (int step = 16; step > 0; step /= 2) value = max_magnitude(value, __shfl_xor_sync(0xffffffffu, value, step));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int i = 1; i < blockDim.x / 32; i++) value = max_magnitude(value, shared[i]);
  return value;
}

constexpr int kPlaces = 32;   // of a token's slots, looked up at a time

__device__ Place place_of(const QuantizeArgs& args, int slot) {
  const Schedule& schedule = args.schedule;
  const int rank = schedule.rank[slot];
  if (rank < 0) return {-1, 0, 0, 0};
  const int expert = args.problem.topk_ids[slot] - args.problem.expert_offset, start = schedule.start[expert];
  const Place place{start + rank, expert, start, round_up(schedule.count[expert], 8)};
  schedule.slot_of_row[place.row] = slot;
  schedule.place_of_row[place.row] = place;
  return place;
}

// By the whole block, for each row that the token has: write(place).
template <class Write>
__device__ __forceinline__ void for_each_place(const QuantizeArgs& args, Place (&places)[kPlaces], Write write) {
  const int top_k = args.problem.top_k;
  for (int first = 0; first < top_k; first += kPlaces) {
    const int many = min(kPlaces, top_k - first);
    __syncthreads();
    if (threadIdx.x < many) places[threadIdx.x] = place_of(args, blockIdx.x * top_k + first + threadIdx.x);
    __syncthreads();
    for (int i = 0; i < many; i++) {
      const Place place = places[i];
      if (place.row >= 0) write(place);
    }
  }
}

// Of a thread: the pieces threadIdx.x + i * blockDim.x.
template <int pieces>
struct Row {
  Piece piece[pieces];

  __device__ __forceinline__ explicit Row(const Problem& p) {
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + int64_t{blockIdx.x} * p.hidden;
#pragma unroll
    for (int i = 0; i < pieces * 4; i++) {
      const int k = first_k(threadIdx.x + i / 4 * blockDim.x, i % 4);
      const uint2 v = k < p.hidden ? *reinterpret_cast<const uint2*>(x + k) : make_uint2(0, 0);
      float(&values)[4] = piece[i / 4].values[i % 4];
      values[0] = __uint_as_float(v.x << 16);
      values[1] = __uint_as_float(v.x & 0xffff0000u);
      values[2] = __uint_as_float(v.y << 16);
      values[3] = __uint_as_float(v.y & 0xffff0000u);
    }
    if (p.weight_on_input) multiply_by(p.topk_weights[blockIdx.x]);
  }

  __device__ __forceinline__ void multiply_by(float weight) {
#pragma unroll
    for (int i = 0; i < pieces * 16; i++) {
      float& value = piece[i / 16].values[i / 4 % 4][i % 4];
      value = __bfloat162float(__float2bfloat16_rn(__fmul_rn(value, weight)));
    }
  }

  __device__ __forceinline__ float largest() const {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < pieces; i++) amax = piece[i].largest(amax);
    return amax;
  }
};

template <int pieces>
__device__ __forceinline__ void store(const OperandRow& to, const uint4 (&codes)[pieces], int count) {
#pragma unroll
  for (int i = 0; i < pieces; i++) {
    const int q = threadIdx.x + i * blockDim.x;
    if (q < count) to.store(q, codes[i]);
  }
}

template <int pieces>
constexpr int kMostThreads = pieces == 4 ? 1024 : 512;

// A scale for each token, or calibrated ones.
template <int pieces>
__global__ void __launch_bounds__(kMostThreads<pieces>, pieces == 4 ? 1 : 2) quantize_rows_kernel(
    const __grid_constant__ QuantizeArgs args) {
  __shared__ float shared[32];
  __shared__ Place places[kPlaces];
  wait_for_previous_kernel();
  allow_next_kernel();
  const Problem& p = args.problem;
  const Row<pieces> row(p);
  const bool dynamic = p.a1 == ActScale::kToken;
  float by = dynamic ? scale_of(block_max(row.largest(), shared)) : p.a1_gscale[0];
  uint4 codes[pieces];
  const auto encode = [&] {
#pragma unroll
    for (int i = 0; i < pieces; i++) codes[i] = row.piece[i].encode(by, dynamic);
  };
  encode();
  for_each_place(args, places, [&](const Place& place) {
    if (p.a1 == ActScale::kExpert) {
      by = p.a1_gscale[place.expert];
      encode();
    }
    store(OperandRow(args.operand, place, args.k_tiles), codes, args.k_tiles * kPieces);
    if (threadIdx.x == 0) args.factor[place.row] = dynamic ? by : __frcp_rn(by);
  });
}

// A scale for each 128 of K.
template <int pieces>
__global__ void __launch_bounds__(kMostThreads<pieces>, pieces == 4 ? 1 : 2) quantize_groups_kernel(
    const __grid_constant__ QuantizeArgs args) {
  __shared__ Place places[kPlaces];
  wait_for_previous_kernel();
  allow_next_kernel();
  const Row<pieces> row(args.problem);
  float by[pieces];
  uint4 codes[pieces];
#pragma unroll
  for (int i = 0; i < pieces; i++) {
    by[i] = scale_of(group_max(row.piece[i].largest()));
    codes[i] = row.piece[i].encode(by[i], true);
  }
  for_each_place(args, places, [&](const Place& place) {
    store(OperandRow(args.operand, place, args.k_tiles), codes, args.k_tiles * kPieces);
#pragma unroll
    for (int i = 0; i < pieces; i++) {
      const int k_tile = (threadIdx.x + i * blockDim.x) / kPieces;
      if (threadIdx.x % kPieces == 0 && k_tile < args.k_tiles) {
        args.factor[group_at(place, args.k_tiles, k_tile)] = by[i];
      }
    }
  });
}

// Tokens that are e4m3 codes already.
__global__ void __launch_bounds__(512) place_codes_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ Place places[kPlaces];
  wait_for_previous_kernel();
  allow_next_kernel();
  const W4a8Problem& p = args.problem;
  const uint8_t* x = static_cast<const uint8_t*>(p.x) + int64_t{blockIdx.x} * p.hidden;
  const bool groups = p.weights == Weights::kBlocks;
  const float* scales = p.x_scale + int64_t{blockIdx.x} * (groups ? args.k_tiles : 1);
  for_each_place(args, places, [&](const Place& place) {
    const OperandRow to(args.operand, place, args.k_tiles);
    for (int q = threadIdx.x; q < args.k_tiles * kPieces; q += blockDim.x) {
      uint32_t words[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int k = first_k(q, c);
        words[c] = k < p.hidden ? *reinterpret_cast<const uint32_t*>(x + k) : 0;
      }
      to.store(q, make_uint4(words[0], words[1], words[2], words[3]));
      if (groups && q % kPieces == 0) args.factor[group_at(place, args.k_tiles, q / kPieces)] = scales[q / kPieces];
    }
    if (!groups && threadIdx.x == 0) args.factor[place.row] = scales[0];
  });
}

template <int pieces>
auto kernel_of(const W4a8Problem& p) {
  return p.weights == Weights::kBlocks ? quantize_groups_kernel<pieces> : quantize_rows_kernel<pieces>;
}

}  // namespace

// One block a token; few pieces a thread, so that many tokens are under way.
cudaError_t launch_quantize_tokens(const QuantizeArgs& args) {
  const W4a8Problem& p = args.problem;
  const int count = args.k_tiles * kPieces;
  const auto threads = [=](int pieces) { return round_up((count + pieces - 1) / pieces, 32); };
  const auto launch = [&](auto kernel, int size) { return launch_after(kernel, args, p.tokens, size, 0, p.stream); };
  if (p.x_scale != nullptr) return launch(place_codes_kernel, least_of(threads(1), 512));
  if (count <= 256) return launch(kernel_of<1>(p), threads(1));
  if (count <= 1024) return launch(kernel_of<2>(p), threads(2));
  return launch(kernel_of<4>(p), threads(4));
}

}  // namespace moeq::sm90::w4a8
