// The second launch of a prefill: the operand of GEMM1. Tokens are read while their slots are sorted.
#include "../device/async.cuh"
#include "prefill_tokens.cuh"

namespace moeq::sm90 {
namespace {

// Of a multiprocessor. Float16 hidden states take more registers than four would leave.
template <bool half>
constexpr int kRowBlocks = half ? 3 : 4;

// 16 values of K of a token for each of its experts.
template <bool remote, bool half>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<half>)
    operand_kernel(const __grid_constant__ OperandArgs args) {
  const Problem& p = args.problem;
  const int blocks_per_row = args.hidden_padded / 16;
  const int64_t unit = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  const bool real = unit < int64_t{p.tokens} * blocks_per_row;   // the same for a quad
  const int token = real ? unit / blocks_per_row : 0, block = real ? unit % blocks_per_row : threadIdx.x % 4;
  float x[16];
  if constexpr (!remote) load_token<half>(args, token, block * 16, x);
  wait_for_previous_kernel();
  allow_next_kernel();
  const SlotRows<half> rows(args, token, 0);
  if constexpr (remote) load_remote_units(args, unit, blocks_per_row, token, x);  // which are wanted is known now
  uint4 pieces[2], rest[2] = {};
  float factor = args.given_factor != nullptr ? args.given_factor[token] : 1.0f;
  if (p.a1 != ActScale::kExpert) {
    if (p.a1 != ActScale::kNone) {
      const float gscale = p.a1 == ActScale::kTensor ? p.a1_gscale[0] : args.row_gscale[token];
      factor = reciprocal(gscale);
      quantize(x, gscale);
    }
    exchange(x, pieces, half && args.half);
    if (half && p.splits) {
#pragma unroll
      for (int i = 0; i < 16; i++) x[i] = rest_of_half(x[i]);
      exchange(x, rest);
    }
  }
  store_in_slots<half>(args, token, block, real, rows, pieces, rest, [&](int expert, int row) {
    if (args.factor != nullptr && real && block == 0 && row >= 0) args.factor[row] = factor;
    if (p.a1 != ActScale::kExpert) return;
    float values[16];
#pragma unroll
    for (int i = 0; i < 16; i++) values[i] = x[i];
    quantize(values, expert >= 0 ? p.a1_gscale[expert] : 1.0f);
    exchange(values, pieces);
  });
}

// The largest magnitude of a token's row, one block a row.
template <bool half>
__global__ void __launch_bounds__(kRowThreads) row_gscale_kernel(const __grid_constant__ OperandArgs args) {
  float amax = 0.0f;
  for (int column = threadIdx.x * 16; column < args.problem.hidden; column += kRowThreads * 16) {
    float values[16];
    load_token<half>(args, blockIdx.x, column, values);
    amax = max_magnitude(amax, amax_of(values));
  }
  const uint32_t largest = amax_of_row(amax);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (threadIdx.x == 0) args.row_gscale[blockIdx.x] = nvfp4_dynamic_gscale(largest);
}

// 16 values, rounded unless they are values of codes already, and the scale of their group, where it has one.
__device__ __forceinline__ float round_token(const OperandArgs& args, int token, int block, float (&x)[16],
                                             const Rounding& of_row) {
  if (args.given_scale != nullptr) {
    const int groups = args.hidden_padded / 128;
    return args.given_scale[int64_t{token} * groups + min(block / 8, groups - 1)];
  }
  if (args.group_scale != nullptr) return round_group(x);
  if (args.problem.a1 != ActScale::kNone) round_block(x, args.act_format, of_row);
  return 1.0f;
}

// A copy of a token's values with the expert's gscale; returns what sums of its products lack. expert -1: any.
__device__ __forceinline__ float round_for_expert(const OperandArgs& args, int expert, const float (&x)[16],
                                                  uint4 (&pieces)[2]) {
  const Rounding rounding = given_rounding(expert >= 0 ? args.problem.a1_gscale[expert] : 1.0f);
  float values[16];
#pragma unroll
  for (int i = 0; i < 16; i++) values[i] = x[i];
  round_to_e4m3(values, rounding);
  exchange(values, pieces, args.half);
  return rounding.factor;
}

// Rounded to e4m3: values of codes, and what sums of their products lack. One block a token. With a gscale of each
// expert a token is rounded for each of its slots.
template <bool half>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<half>)
    e4m3_operand_kernel(const __grid_constant__ OperandArgs args) {
  const Problem& p = args.problem;
  const int token = blockIdx.x, blocks = args.hidden_padded / 16;
  const bool mx = args.act_format == ActFormat::kMxfp8, by_slot = p.a1 == ActScale::kExpert;
  const bool of_rows = !mx && args.group_scale == nullptr;
  const auto load = [&](int block, float (&values)[16]) { load_token<half>(args, token, block * 16, values); };
  RowBlocks row(blocks, load);
  wait_for_previous_kernel();
  allow_next_kernel();
  const SlotRows<false> rows(args, token, 0);
  Rounding rounding{};
  if (p.a1 == ActScale::kTensor) rounding = given_rounding(p.a1_gscale[0]);
  if (p.a1 == ActScale::kToken && of_rows) rounding = dynamic_rounding(row.amax(load));
  const float factor = args.given_factor != nullptr ? args.given_factor[token] : rounding.factor;
  row.for_each(load, [&](int block, float (&x)[16]) {
    uint4 pieces[2];
    float scale = 1.0f;
    if (!by_slot) {
      scale = round_token(args, token, block, x, rounding);
      exchange(x, pieces, args.half);
    }
    store_in_slots<false>(args, token, block, block < blocks, rows, pieces, pieces, [&](int expert, int row) {
      if (args.group_scale != nullptr && block % 8 == 0 && block < blocks && row >= 0) {
        args.group_scale[int64_t{block / 8} * args.rows + row] = scale;
      }
      const bool stores = args.factor != nullptr && block == 0 && row >= 0;
      if (by_slot) {
        const float of_expert = round_for_expert(args, expert, x, pieces);
        if (stores) args.factor[row] = of_expert;
      } else if (stores) {
        args.factor[row] = factor;
      }
    });
  });
}

}  // namespace

cudaError_t launch_operand(const OperandArgs& args) {
  const bool half = args.problem.x_half;
  const bool has_codes = args.half && args.act_format != ActFormat::kNvfp4;
  if (has_codes || (args.act_format != ActFormat::kNvfp4 && args.problem.a1 != ActScale::kNone)) {
    const auto kernel = half ? e4m3_operand_kernel<true> : e4m3_operand_kernel<false>;
    return launch_dependent(kernel, args, args.problem.tokens, threads_for(args.hidden_padded), 0);
  }
  if (args.problem.a1 == ActScale::kToken) {
    const auto kernel = half ? row_gscale_kernel<true> : row_gscale_kernel<false>;
    const cudaError_t error = launch_dependent(kernel, args, args.problem.tokens, kRowThreads, 0);
    if (error != cudaSuccess) return error;
  }
  const int64_t units = int64_t{args.problem.tokens} * (args.hidden_padded / 16);
  const auto kernel = args.remote.ranks != 0 ? operand_kernel<true, false>
                      : half                 ? operand_kernel<false, true>
                                             : operand_kernel<false, false>;
  return launch_dependent(kernel, args, static_cast<unsigned>((units + kRowThreads - 1) / kRowThreads), kRowThreads, 0);
}

}  // namespace moeq::sm90
