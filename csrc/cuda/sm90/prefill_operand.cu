// The second launch of a prefill: the operand of GEMM1.
#include "gemm_async.cuh"
#include "prefill_kernels.cuh"
#include "prefill_quantize.cuh"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = 256;

__device__ void load_values(const OperandArgs& args, int token, int column, float (&values)[16]) {
  const Problem& p = args.problem;
  if (column >= p.hidden) {
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = 0.0f;
    return;
  }
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.x) +
                                                     static_cast<int64_t>(token) * p.hidden + column);
  const uint4 raw[2] = {from[0], from[1]};
  const uint32_t* words = reinterpret_cast<const uint32_t*>(raw);
  const float weight = p.weight_on_input ? p.topk_weights[token] : 1.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
  if (p.weight_on_input) {
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = __bfloat162float(__float2bfloat16_rn(values[i] * weight));
  }
}

// 16 values of K of a token for each of its experts.
__global__ void __launch_bounds__(kThreads) operand_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Problem& p = args.problem;
  const int blocks_per_row = args.hidden_padded / 16;
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool real = unit < int64_t{p.tokens} * blocks_per_row;   // the same for a quad
  const int token = real ? unit / blocks_per_row : 0, block = real ? unit % blocks_per_row : threadIdx.x % 4;
  float x[16];
  load_values(args, token, block * 16, x);
  uint4 pieces[2];
  if (p.a1 != ActScale::kExpert) {
    if (p.a1 != ActScale::kNone) {
      const float gscale = p.a1 == ActScale::kTensor ? p.a1_gscale[0] : args.row_gscale[token];
      if (args.factor != nullptr && real && block == 0) args.factor[token] = reciprocal(gscale);
      quantize(x, gscale);
    }
    exchange(x, pieces);
  }
  __nv_bfloat16* k_tile = args.operand + int64_t{block / 4} * args.rows * 64;
#pragma unroll 4
  for (int j = 0; j < p.top_k; j++) {
    const int64_t slot = int64_t{token} * p.top_k + j;
    const auto [expert, rank] = args.schedule.rank[slot];
    const int row = expert >= 0 ? args.schedule.first_row[expert] + rank : -1;
    if (real && block == 0 && row >= 0) args.schedule.slot_of_row[row] = slot;
    if (p.a1 == ActScale::kExpert) {
      float values[16];
#pragma unroll
      for (int i = 0; i < 16; i++) values[i] = x[i];
      quantize(values, expert >= 0 ? p.a1_gscale[expert] : 1.0f);
      exchange(values, pieces);
    }
    if (real && row >= 0) store_pieces(k_tile, row, pieces);
  }
}

// The largest magnitude of a token's row, one block a row.
__global__ void __launch_bounds__(kThreads) row_gscale_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  float amax = 0.0f;
  for (int column = threadIdx.x * 16; column < args.problem.hidden; column += kThreads * 16) {
    float values[16];
    load_values(args, blockIdx.x, column, values);
#pragma unroll
    for (int i = 0; i < 16; i++) amax = max_magnitude(amax, values[i]);
  }
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, bits_of(amax));
  if (threadIdx.x % 32 == 0) atomicMax(&largest, of_warp);
  __syncthreads();
  if (threadIdx.x == 0) args.row_gscale[blockIdx.x] = nvfp4_dynamic_gscale(largest);
}

}  // namespace

cudaError_t launch_operand(const OperandArgs& args) {
  if (args.problem.a1 == ActScale::kToken) {
    const cudaError_t error = launch_dependent(row_gscale_kernel, args, args.problem.tokens, kThreads, 0);
    if (error != cudaSuccess) return error;
  }
  const int64_t units = int64_t{args.problem.tokens} * (args.hidden_padded / 16);
  return launch_dependent(operand_kernel, args, static_cast<unsigned>((units + kThreads - 1) / kThreads), kThreads, 0);
}

}  // namespace moeq::sm90
