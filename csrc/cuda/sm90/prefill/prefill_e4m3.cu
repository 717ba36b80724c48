// A prefill's operands rounded to e4m3, a block a row: values of codes, and what sums of their products lack.
#include "../numerics/e4m3_round.cuh"
#include "../device/gemm_async.cuh"
#include "prefill_tokens.cuh"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float amax_of(const float (&values)[16]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; i++) amax = max_magnitude(amax, values[i]);
  return amax;
}

// The largest magnitude of a row of `blocks` of 16, as bits. By the whole block, once.
template <class Load>
__device__ __forceinline__ uint32_t amax_of_row(int blocks, Load load) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  float amax = 0.0f;
  for (int block = threadIdx.x; block < blocks; block += blockDim.x) {
    float values[16];
    load(block, values);
    amax = max_magnitude(amax, amax_of(values));
  }
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, bits_of(amax));
  if (threadIdx.x % 32 == 0) atomicMax(&largest, of_warp);
  __syncthreads();
  return largest;
}

// Whole warps come: two neighbouring threads have a block of mxfp8.
__device__ __forceinline__ void round_block(float (&values)[16], ActFormat format, const Rounding& of_row) {
  if (format == ActFormat::kMxfp8) {
    const float amax = amax_of(values);
    round_to_e4m3(values, mx_rounding(max_magnitude(amax, __shfl_xor_sync(0xffffffffu, amax, 1))));
  } else {
    round_to_e4m3(values, of_row);
  }
}

// One block a token. With a gscale of each expert a token is rounded for each of its slots.
__global__ void __launch_bounds__(kThreads) e4m3_operand_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Problem& p = args.problem;
  const int token = blockIdx.x, blocks = args.hidden_padded / 16;
  const bool mx = args.act_format == ActFormat::kMxfp8, by_slot = p.a1 == ActScale::kExpert;
  const auto load = [&](int block, float (&values)[16]) { load_token(args, token, block * 16, values); };
  Rounding rounding{};
  if (p.a1 == ActScale::kTensor) rounding = given_rounding(p.a1_gscale[0]);
  if (p.a1 == ActScale::kToken && !mx) rounding = dynamic_rounding(amax_of_row(blocks, load));
  if (args.factor != nullptr && !by_slot && threadIdx.x == 0) args.factor[token] = rounding.factor;
  for (int block = threadIdx.x; block - static_cast<int>(threadIdx.x) < blocks; block += blockDim.x) {
    float x[16];
    load(block, x);   // zeros beyond the end
    uint4 pieces[2];
    if (!by_slot) {
      round_block(x, args.act_format, rounding);
      exchange(x, pieces);
    }
    store_in_slots(args, token, block, block < blocks, pieces, [&](int64_t slot, int expert) {
      if (!by_slot) return;
      const Rounding of_slot = given_rounding(expert >= 0 ? p.a1_gscale[expert] : 1.0f);
      if (block == 0) args.factor[slot] = of_slot.factor;
      float values[16];
#pragma unroll
      for (int i = 0; i < 16; i++) values[i] = x[i];
      round_to_e4m3(values, of_slot);
      exchange(values, pieces);
    });
  }
}

__device__ __forceinline__ void load_row(const float* row, int block, float (&values)[16]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 v = reinterpret_cast<const float4*>(row + block * 16)[i];
    values[4 * i] = v.x;
    values[4 * i + 1] = v.y;
    values[4 * i + 2] = v.z;
    values[4 * i + 3] = v.w;
  }
}

// Of the expert whose row it is; of a gap, any.
__device__ __forceinline__ float gscale_of_row(const RequantizeArgs& args, int64_t row) {
  const Problem& p = args.problem;
  if (p.a2 == ActScale::kTensor) return p.a2_gscale[0];
  const uint32_t slot = args.schedule.slot_of_row[row];
  const int expert = slot < static_cast<uint32_t>(p.tokens * p.top_k) ? args.schedule.rank[slot].expert : -1;
  return p.a2_gscale[max(expert, 0)];
}

__global__ void __launch_bounds__(kThreads) e4m3_requantize_kernel(const __grid_constant__ RequantizeArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  if (row == 0 && threadIdx.x == 0) *args.schedule.next_item = 0;
  if (row >= *args.schedule.rows_total) return;
  const int blocks = args.inter_padded / 16;
  const float* wide = args.wide + row * args.inter_padded;
  const auto load = [&](int block, float (&values)[16]) { load_row(wide, block, values); };
  Rounding rounding{};
  if (args.act_format == ActFormat::kFp8) {
    rounding = args.problem.a2 == ActScale::kToken ? dynamic_rounding(amax_of_row(blocks, load))
                                                   : given_rounding(gscale_of_row(args, row));
    if (threadIdx.x == 0) args.factor[row] = rounding.factor;
  }
  for (int block = threadIdx.x; block - static_cast<int>(threadIdx.x) < blocks; block += blockDim.x) {
    const bool real = block < blocks;
    float values[16] = {};
    if (real) load(block, values);
    round_block(values, args.act_format, rounding);
    uint4 pieces[2];
    exchange(values, pieces);
    if (real) store_pieces(args.h + int64_t{block / 4} * args.rows * 64, row, pieces);
  }
}

// For a row of so many values: no thread without some, where it is short.
int threads_for(int columns) {
  const int threads = (columns / 16 + 31) / 32 * 32;
  return threads < kThreads ? threads : kThreads;
}

}  // namespace

cudaError_t launch_e4m3_operand(const OperandArgs& args) {
  return launch_dependent(e4m3_operand_kernel, args, args.problem.tokens, threads_for(args.hidden_padded), 0);
}

cudaError_t launch_e4m3_requantize(const RequantizeArgs& args) {
  return launch_dependent(e4m3_requantize_kernel, args, args.rows, threads_for(args.inter_padded), 0);
}

}  // namespace moeq::sm90
