// The last launch of a prefill: each token's sum over its experts, in float32 and in the order of its slots.
#include <cuda_fp16.h>

#include "../device/bounded_wait.cuh"
#include "../device/async.cuh"
#include "prefill_plan.h"

namespace moeq::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;       // of a thread
constexpr int kAtOnce = 8;        // slots whose loads are under way together

template <bool wide>
struct Piece {
  uint4 words[wide ? 2 : 1];

  __device__ __forceinline__ void load(const void* y, int64_t at) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(y) + at * (wide ? 4 : 2));
#pragma unroll
    for (int i = 0; i < (wide ? 2 : 1); i++) words[i] = __ldcs(from + i);
  }
  __device__ __forceinline__ float value(int i) const {
    const uint32_t* w = reinterpret_cast<const uint32_t*>(words);
    if (wide) return __uint_as_float(w[i]);
    return __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
  }
};

__device__ void store(const Problem& p, void* out, int64_t at, const float (&sum)[kColumns]) {
  if (p.out_type == OutType::kFloat32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(out) + at);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    return;
  }
  uint32_t words[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; i++) {
    if (p.out_type == OutType::kBfloat16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + at) = make_uint4(words[0], words[1], words[2], words[3]);
}

// A row for another rank goes to its memory, unless the token has no expert here, which that rank knows as well.
template <bool remote>
__device__ __forceinline__ void store_row(const CombineArgs& args, int token, int column, bool any,
                                          const float (&sum)[kColumns]) {
  const Problem& p = args.problem;
  if constexpr (!remote) {
    store(p, p.out, static_cast<int64_t>(token) * p.hidden + column, sum);
  } else if (any) {
    const RemoteRow at = remote_row(args.remote, token);
    store(p, reinterpret_cast<void*>(args.remote.out[at.rank]), at.row * p.hidden + column, sum);
  }
}

// A token's slots in shared memory, `kMany` at a time: the router weight of those that are ours.
constexpr int kMany = 32;   // a warp's threads find them, before the wait or behind it

struct Slots {
  uint32_t mine;
  float weights[kMany];
};

__device__ __forceinline__ void find_slots(const Problem& p, Slots& slots, int64_t token, int first) {
  const int64_t slot = token * p.top_k + first + threadIdx.x;
  const bool mine = first + static_cast<int>(threadIdx.x) < p.top_k && local_expert(p, slot) >= 0;
  slots.weights[threadIdx.x] = mine && !p.weight_on_input ? load_settled(p.topk_weights + slot) : 1.0f;
  const uint32_t all = __ballot_sync(0xffffffffu, mine);
  if (threadIdx.x == 0) slots.mine = all;
}

// A thread's columns of the results of kAtOnce slots, in bits of `mine` those that are ours, added in order.
template <bool wide>
__device__ __forceinline__ void add_slots(const void* y, int64_t at, int hidden, uint32_t mine, const float* weights,
                                          float (&sum)[kColumns]) {
  Piece<wide> pieces[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    if (mine >> i & 1) pieces[i].load(y, at);
    at += hidden;
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    if (!(mine >> i & 1)) continue;
#pragma unroll
    for (int c = 0; c < kColumns; c++) sum[c] = __fadd_rn(sum[c], __fmul_rn(weights[i], pieces[i].value(c)));
  }
}

// Grid: (tokens, pieces of a row).
template <bool wide, bool remote>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineArgs args) {
  __shared__ Slots slots;
  const Problem& p = args.problem;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kColumns;
  const int64_t token = blockIdx.x;
  if (threadIdx.x < kMany) find_slots(p, slots, token, 0);
  wait_for_previous_kernel();
  allow_next_kernel();
  float sum[kColumns] = {};
  bool any = false;
  __syncthreads();
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kAtOnce) {
    if (first > 0 && first % kMany == 0) {
      __syncthreads();
      if (threadIdx.x < kMany) find_slots(p, slots, token, first);
      __syncthreads();
    }
    const uint32_t mine = slots.mine >> first % kMany & (1 << kAtOnce) - 1;
    any |= mine != 0;
    const int64_t at = (token * p.top_k + first) * p.hidden + column;
    if (column < p.hidden) add_slots<wide>(args.y, at, p.hidden, mine, slots.weights + first % kMany, sum);
  }
  if (column >= p.hidden) return;
  store_row<remote>(args, blockIdx.x, column, any, sum);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && args.overdue != nullptr && *args.overdue != 0) {
    give_up("gemm_kernel", "thread blocks waited some seconds for the intermediate of others, in vain");
  }
}

}  // namespace

cudaError_t launch_combine(const CombineArgs& args) {
  const Problem& p = args.problem;
  const int pieces = (p.hidden + kThreads * kColumns - 1) / (kThreads * kColumns);
  const int threads = pieces > 1 ? kThreads : (p.hidden / kColumns + 31) / 32 * 32;
  const auto kernel = args.remote.ranks == 0 ? args.y_wide ? combine_kernel<true, false> : combine_kernel<false, false>
                      : args.y_wide          ? combine_kernel<true, true>
                                             : combine_kernel<false, true>;
  return launch_dependent(kernel, args, dim3(p.tokens, pieces), threads, 0);
}

}  // namespace moeq::sm90
