// Between the two GEMMs where each row of the intermediate is quantized with a scale of its own: no tile of GEMM1 sees
// a whole row.
#include "../device/async.cuh"
#include "prefill_tokens.cuh"

namespace moeq::sm90 {
namespace {

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

// Rows are those that there might be, as a row may be asked for then before their number is known. The last ones come
// first: they were written last, and what GEMM2 begins with is written last then, so that both are in the L2.
__device__ __forceinline__ int64_t row_of_block(const RequantizeArgs& args) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.schedule.next_item = 0;
  return args.rows - 1 - blockIdx.x;
}

// One block a row.
__global__ void __launch_bounds__(kRowThreads) requantize_kernel(const __grid_constant__ RequantizeArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = row_of_block(args);
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
  const int64_t row = row_of_block(args);
  const float* wide = args.wide + row * args.inter_padded;
  const auto load = [&](int block, float (&values)[16]) { load_row(wide, block, values); };
  RowBlocks blocks(args.inter_padded / 16, load);
  if (row >= *args.schedule.rows_total) return;
  Rounding rounding{};
  if (args.act_format == ActFormat::kFp8) {
    rounding = args.problem.a2 == ActScale::kToken ? dynamic_rounding(blocks.amax(load))
                                                   : given_rounding(gscale_of_row(args, row));
    if (threadIdx.x == 0) args.factor[row] = rounding.factor;
  }
  blocks.for_each(load, [&](int block, float (&values)[16]) {
    round_block(values, args.act_format, rounding);
    uint4 pieces[2];
    exchange(values, pieces, args.half);
    if (block < blocks.count) store_pieces(args.h + int64_t{block / 4} * args.rows * 64, row, pieces);
  });
}

}  // namespace

cudaError_t launch_requantize(const RequantizeArgs& args) {
  if (args.act_format != ActFormat::kNvfp4) {
    return launch_dependent(e4m3_requantize_kernel, args, args.rows, threads_for(args.inter_padded), 0);
  }
  return launch_dependent(requantize_kernel, args, args.rows, kRowThreads, 0);
}

}  // namespace moeq::sm90
