// Tokens are quantized to e4m3, one block a token.
#include <cuda_bf16.h>

#include "../device/async.cuh"
#include "w4a8_rows.cuh"

namespace moeq::sm90::w4a8 {
namespace {

constexpr int kPlaces = 32;   // of a token's slots, looked up at a time

__device__ Place place_of(const QuantizeArgs& args, int slot) {
  const Schedule& schedule = args.schedule;
  const auto [expert, rank] = schedule.rank[slot];
  if (expert < 0) return {-1, 0, 0, 0};
  const int start = schedule.start[expert];
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

template <int pieces>
__device__ __forceinline__ Row<pieces> load_token(const Problem& p, int token) {
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + int64_t{token} * p.hidden;
  Row<pieces> row;
#pragma unroll
  for (int i = 0; i < pieces * 4; i++) {
    const int k = first_k(threadIdx.x + i / 4 * blockDim.x, i % 4);
    const uint2 v = k < p.hidden ? *reinterpret_cast<const uint2*>(x + k) : make_uint2(0, 0);
    float (&values)[4] = row.piece[i / 4].values[i % 4];
    values[0] = __uint_as_float(v.x << 16);
    values[1] = __uint_as_float(v.x & 0xffff0000u);
    values[2] = __uint_as_float(v.y << 16);
    values[3] = __uint_as_float(v.y & 0xffff0000u);
  }
  if (!p.weight_on_input) return row;
  const float weight = p.topk_weights[token];
#pragma unroll
  for (int i = 0; i < pieces * 16; i++) {
    float& value = row.piece[i / 16].values[i / 4 % 4][i % 4];
    value = __bfloat162float(__float2bfloat16_rn(__fmul_rn(value, weight)));
  }
  return row;
}

template <int pieces>
constexpr int kMostThreads = pieces == 4 ? 1024 : 512;

// A token's codes go to the rows of all its slots.
template <int pieces, bool groups>
__global__ void __launch_bounds__(kMostThreads<pieces>, pieces == 4 ? 1 : 2)
    quantize_tokens_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ float shared[32];
  __shared__ Place places[kPlaces];
  allow_next_kernel();
  wait_for_previous_kernel();
  const Problem& p = args.problem;
  const Row<pieces> row = load_token<pieces>(p, blockIdx.x);
  if constexpr (groups) {
    const Groups<pieces> quantized(row);
    for_each_place(args, places, [&](const Place& place) { quantized.write(args, place); });
    return;
  }
  const bool dynamic = p.a1 == ActScale::kToken;
  float by = dynamic ? scale_of(block_max(row.largest(), shared)) : p.a1_gscale[0];
  uint4 codes[pieces];
  encode_row(row, by, dynamic, codes);
  for_each_place(args, places, [&](const Place& place) {
    if (p.a1 == ActScale::kExpert) {
      by = p.a1_gscale[place.expert];
      encode_row(row, by, false, codes);
    }
    store(OperandRow(args.operand, place, args.k_tiles), codes, args.k_tiles * kPieces);
    if (threadIdx.x == 0) args.factor[place.row] = dynamic ? by : __frcp_rn(by);
  });
}

// Tokens that are e4m3 codes already.
__global__ void __launch_bounds__(512) place_codes_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ Place places[kPlaces];
  allow_next_kernel();
  wait_for_previous_kernel();
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

// One block a token; few pieces a thread, so that many tokens are under way.
template <bool groups>
cudaError_t launch(const QuantizeArgs& args) {
  const W4a8Problem& p = args.problem;
  const int count = args.k_tiles * kPieces;
  const auto threads = [=](int pieces) { return round_up((count + pieces - 1) / pieces, 32); };
  if (count <= 256) return launch_after(quantize_tokens_kernel<1, groups>, args, p.tokens, threads(1), 0, p.stream);
  if (count <= 1024) return launch_after(quantize_tokens_kernel<2, groups>, args, p.tokens, threads(2), 0, p.stream);
  return launch_after(quantize_tokens_kernel<4, groups>, args, p.tokens, threads(4), 0, p.stream);
}

}  // namespace

cudaError_t launch_quantize_tokens(const QuantizeArgs& args) {
  const W4a8Problem& p = args.problem;
  if (p.x_scale != nullptr) {
    const int threads = least_of(round_up(args.k_tiles * kPieces, 32), 512);
    return launch_after(place_codes_kernel, args, p.tokens, threads, 0, p.stream);
  }
  return p.weights == Weights::kBlocks ? launch<true>(args) : launch<false>(args);
}

}  // namespace moeq::sm90::w4a8
