// The second launch of a prefill: the operand of GEMM1.
#include "../device/gemm_async.cuh"
#include "prefill_tokens.cuh"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = 256;

// 16 values of K of a token for each of its experts.
template <bool remote>
__global__ void __launch_bounds__(kThreads) operand_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Problem& p = args.problem;
  const int blocks_per_row = args.hidden_padded / 16;
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool real = unit < int64_t{p.tokens} * blocks_per_row;   // the same for a quad
  const int token = real ? unit / blocks_per_row : 0, block = real ? unit % blocks_per_row : threadIdx.x % 4;
  float x[16];
  if constexpr (!remote) {
    load_token(args, token, block * 16, x);
  } else {
    load_remote_units(args, unit, blocks_per_row, token, x);
  }
  uint4 pieces[2];
  if (p.a1 != ActScale::kExpert) {
    if (p.a1 != ActScale::kNone) {
      const float gscale = p.a1 == ActScale::kTensor ? p.a1_gscale[0] : args.row_gscale[token];
      if (args.factor != nullptr && real && block == 0) args.factor[token] = reciprocal(gscale);
      quantize(x, gscale);
    }
    exchange(x, pieces);
  }
  store_in_slots(args, token, block, real, pieces, [&](int64_t, int expert) {
    if (p.a1 != ActScale::kExpert) return;
    float values[16];
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = x[i];
    quantize(values, expert >= 0 ? p.a1_gscale[expert] : 1.0f);
    exchange(values, pieces);
  });
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
    load_token(args, blockIdx.x, column, values);
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
  if (args.act_format != ActFormat::kNvfp4 && args.problem.a1 != ActScale::kNone) return launch_e4m3_operand(args);
  if (args.problem.a1 == ActScale::kToken) {
    const cudaError_t error = launch_dependent(row_gscale_kernel, args, args.problem.tokens, kThreads, 0);
    if (error != cudaSuccess) return error;
  }
  const int64_t units = int64_t{args.problem.tokens} * (args.hidden_padded / 16);
  const auto kernel = args.remote.ranks == 0 ? operand_kernel<false> : operand_kernel<true>;
  return launch_dependent(kernel, args, static_cast<unsigned>((units + kThreads - 1) / kThreads), kThreads, 0);
}

}  // namespace moeq::sm90
