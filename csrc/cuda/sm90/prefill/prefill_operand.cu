// The second launch of a prefill, the operand of GEMM1, and what makes that of GEMM2 between the two where each row of
// the intermediate is quantized with a scale of its own and no thread block of GEMM1 sees a whole row.
#include "../device/async.cuh"
#include "prefill_tokens.cuh"

namespace moeq::sm90 {
namespace {

// 16 values of K of a token for each of its experts.
template <bool remote>
__global__ void __launch_bounds__(kRowThreads) operand_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Problem& p = args.problem;
  const int blocks_per_row = args.hidden_padded / 16;
  const int64_t unit = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
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
__global__ void __launch_bounds__(kRowThreads) row_gscale_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  float amax = 0.0f;
  for (int column = threadIdx.x * 16; column < args.problem.hidden; column += kRowThreads * 16) {
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

// A thread block's share of the words.
__device__ __forceinline__ void write_zeros(const OperandArgs& args) {
  const int fours = args.zero_words / 4;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < fours; i += gridDim.x * blockDim.x) {
    reinterpret_cast<uint4*>(args.zeros)[i] = make_uint4(0, 0, 0, 0);
  }
}

// Rounded to e4m3: values of codes, and what sums of their products lack. One block a token. With a gscale of each
// expert a token is rounded for each of its slots.
__global__ void __launch_bounds__(kRowThreads) e4m3_operand_kernel(const __grid_constant__ OperandArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Problem& p = args.problem;
  const int token = blockIdx.x, blocks = args.hidden_padded / 16;
  const bool mx = args.act_format == ActFormat::kMxfp8, by_slot = p.a1 == ActScale::kExpert;
  const auto load = [&](int block, float (&values)[16]) { load_token(args, token, block * 16, values); };
  Rounding rounding{};
  if (p.a1 == ActScale::kTensor) rounding = given_rounding(p.a1_gscale[0]);
  RowBlocks row(blocks, load);
  if (p.a1 == ActScale::kToken && !mx) rounding = dynamic_rounding(row.amax(load));
  if (args.factor != nullptr && !by_slot && threadIdx.x == 0) args.factor[token] = rounding.factor;
  if (args.zeros != nullptr) write_zeros(args);
  row.for_each(load, [&](int block, float (&x)[16]) {
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
  });
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

__device__ float gscale_of(const float* row, int columns) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  float amax = 0.0f;
  for (int column = threadIdx.x; column < columns; column += kRowThreads) amax = max_magnitude(amax, row[column]);
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, bits_of(amax));
  if (threadIdx.x % 32 == 0) atomicMax(&largest, of_warp);
  __syncthreads();
  return nvfp4_dynamic_gscale(largest);
}

// One block a row.
__global__ void __launch_bounds__(kRowThreads) requantize_kernel(const __grid_constant__ RequantizeArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  if (row == 0 && threadIdx.x == 0) *args.schedule.next_item = 0;
  if (row >= *args.schedule.rows_total) return;
  const float* wide = args.wide + row * args.inter_padded;
  const float gscale = gscale_of(wide, args.inter_padded);
  if (threadIdx.x == 0) args.factor[row] = reciprocal(gscale);
  const int blocks = args.inter_padded / 16;
  for (int first = 0; first < blocks; first += kRowThreads) {
    const int block = first + threadIdx.x;
    const bool real = block < blocks;
    float values[16] = {};
    if (real) load_row(wide, block, values);
    quantize(values, gscale);
    uint4 pieces[2];
    exchange(values, pieces);
    if (real) store_pieces(args.h + int64_t{block / 4} * args.rows * 64, row, pieces);
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

__global__ void __launch_bounds__(kRowThreads) e4m3_requantize_kernel(const __grid_constant__ RequantizeArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  if (row == 0 && threadIdx.x == 0) *args.schedule.next_item = 0;
  if (row >= *args.schedule.rows_total) return;
  const float* wide = args.wide + row * args.inter_padded;
  const auto load = [&](int block, float (&values)[16]) { load_row(wide, block, values); };
  RowBlocks blocks(args.inter_padded / 16, load);
  Rounding rounding{};
  if (args.act_format == ActFormat::kFp8) {
    rounding = args.problem.a2 == ActScale::kToken ? dynamic_rounding(blocks.amax(load))
                                                   : given_rounding(gscale_of_row(args, row));
    if (threadIdx.x == 0) args.factor[row] = rounding.factor;
  }
  blocks.for_each(load, [&](int block, float (&values)[16]) {
    round_block(values, args.act_format, rounding);
    uint4 pieces[2];
    exchange(values, pieces);
    if (block < blocks.count) store_pieces(args.h + int64_t{block / 4} * args.rows * 64, row, pieces);
  });
}

}  // namespace

cudaError_t launch_operand(const OperandArgs& args) {
  if (args.act_format != ActFormat::kNvfp4 && args.problem.a1 != ActScale::kNone) {
    return launch_dependent(e4m3_operand_kernel, args, args.problem.tokens, threads_for(args.hidden_padded), 0);
  }
  if (args.problem.a1 == ActScale::kToken) {
    const cudaError_t error = launch_dependent(row_gscale_kernel, args, args.problem.tokens, kRowThreads, 0);
    if (error != cudaSuccess) return error;
  }
  const int64_t units = int64_t{args.problem.tokens} * (args.hidden_padded / 16);
  const auto kernel = args.remote.ranks == 0 ? operand_kernel<false> : operand_kernel<true>;
  return launch_dependent(kernel, args, static_cast<unsigned>((units + kRowThreads - 1) / kRowThreads), kRowThreads, 0);
}

cudaError_t launch_requantize(const RequantizeArgs& args) {
  if (args.act_format != ActFormat::kNvfp4) {
    return launch_dependent(e4m3_requantize_kernel, args, args.rows, threads_for(args.inter_padded), 0);
  }
  return launch_dependent(requantize_kernel, args, args.rows, kRowThreads, 0);
}

}  // namespace moeq::sm90
