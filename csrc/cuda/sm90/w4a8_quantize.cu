// Quantization to e4m3, one block a row: a row lies in registers between its maximum and its codes.
#include <cuda_bf16.h>

#include "../rounding.cuh"
#include "gemm_activation.cuh"
#include "gemm_async.cuh"
#include "w4a8_quantize.cuh"

namespace moeq::sm90::w4a8 {
namespace {

constexpr float kMax = 448.0f;

// Nearest e4m3 codes of four numbers, saturating; a NaN stays one.
__device__ __forceinline__ uint32_t encode4(float a, float b, float c, float d) {
  uint32_t word;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high}; }"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

__device__ __forceinline__ float block_max(float value, float* shared) {
  for (int step = 16; step > 0; step /= 2) value = max_magnitude(value, __shfl_xor_sync(0xffffffffu, value, step));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int i = 1; i < blockDim.x / 32; i++) value = max_magnitude(value, shared[i]);
  return value;
}

// Where a row lies: first row and number of rows of its expert, rounded up to 8, and itself.
struct Place {
  int start, rows, row, expert;

  // row: in the operand; or, of a slot, among those of its expert (`ranked`).
  __device__ Place(const QuantizeArgs& args, int slot, int row_or_rank, bool ranked) {
    expert = args.problem.topk_ids[slot] - args.problem.expert_offset;
    start = args.schedule.start[expert];
    rows = round_up(args.schedule.count[expert], 8);
    row = ranked ? start + row_or_rank : row_or_rank;
  }
  __device__ Place() {}
};

// A row of the operand, in pieces of 16 bytes. Piece q holds the values at K = 128 * (q / 8) + 64 * (q / 4 % 2) + 16 *
// c + 4 * (q % 4) + b, as w4a8_layout.h orders them.
struct OperandRow {
  uint4* at;
  int stride;    // pieces from a K tile to the next
  int turn;      // of the swizzle

  __device__ OperandRow(const QuantizeArgs& args, const Place& place) {
    const int local = place.row - place.start;
    at = reinterpret_cast<uint4*>(args.operand) + (int64_t{place.start} * args.k_tiles + local) * (kTileK / 16);
    stride = place.rows * (kTileK / 16);
    turn = local % 8;
  }
  __device__ __forceinline__ void store(int q, uint4 codes) const {
    at[int64_t{q / 8} * stride + (q % 8 ^ turn)] = codes;
  }
};

__device__ __forceinline__ int first_k(int q, int c) { return q / 8 * 128 + q / 4 % 2 * 64 + c * 16 + q % 4 * 4; }

// fl(x / by) from the rounded reciprocal: the first correction comes within one unit of the last place, the second one
// is exact (Markstein, 1990) where nothing underflows; where it does, the code is zero either way.
__device__ __forceinline__ float quotient(float x, float by, float inverse) {
  float near = __fmul_rn(x, inverse);
  near = __fmaf_rn(__fmaf_rn(-near, by, x), inverse, near);
  return __fmaf_rn(__fmaf_rn(-near, by, x), inverse, near);
}

// A thread's part of a row: the pieces threadIdx.x + i * blockDim.x.
template <int pieces>
struct Row {
  float values[pieces][4][4];   // [i][c][b]

  __device__ __forceinline__ float largest() const {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < pieces * 16; i++) amax = max_magnitude(amax, values[i / 16][i / 4 % 4][i % 4]);
    return amax;
  }

  template <class Scale>
  __device__ __forceinline__ void encode_each(uint4 (&codes)[pieces], Scale scale) const {
#pragma unroll
    for (int i = 0; i < pieces; i++) {
      uint32_t words[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float* v = values[i][c];
        words[c] = encode4(scale(v[0]), scale(v[1]), scale(v[2]), scale(v[3]));
      }
      codes[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Divided by `by` or, if it is not `divide`, multiplied.
  __device__ __forceinline__ void encode(float by, bool divide, uint4 (&codes)[pieces]) const {
    if (!divide) {
      encode_each(codes, [=](float x) { return __fmul_rn(x, by); });
    } else if (by > 0x1p-100f && by < 0x1p100f) {
      const float inverse = __frcp_rn(by);
      encode_each(codes, [=](float x) { return quotient(x, by, inverse); });
    } else {
      encode_each(codes, [=](float x) { return __fdiv_rn(x, by); });
    }
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

__device__ __forceinline__ float scale_of(float amax) {
  const float scale = __fdiv_rn(amax, kMax);
  return scale == 0.0f ? 1.0f : scale;
}

constexpr int kPlaces = 32;   // of a token's slots, looked up at a time

template <int pieces>
__device__ __forceinline__ Row<pieces> load_token(const Problem& p, int token) {
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + int64_t{token} * p.hidden;
  Row<pieces> row;
#pragma unroll
  for (int i = 0; i < pieces * 4; i++) {
    const int k = first_k(threadIdx.x + i / 4 * blockDim.x, i % 4);
    const uint2 v = k < p.hidden ? *reinterpret_cast<const uint2*>(x + k) : make_uint2(0, 0);
    float* values = row.values[i / 4][i % 4];
    values[0] = __uint_as_float(v.x << 16);
    values[1] = __uint_as_float(v.x & 0xffff0000u);
    values[2] = __uint_as_float(v.y << 16);
    values[3] = __uint_as_float(v.y & 0xffff0000u);
  }
  if (p.weight_on_input) {
    const float weight = p.topk_weights[token];
#pragma unroll
    for (int i = 0; i < pieces * 16; i++) {
      float& value = row.values[i / 16][i / 4 % 4][i % 4];
      value = __bfloat162float(__float2bfloat16_rn(__fmul_rn(value, weight)));
    }
  }
  return row;
}

// A token's codes go to the rows of all its slots.
template <int pieces>
__global__ void __launch_bounds__(pieces == 4 ? 1024 : 512, pieces == 4 ? 1 : 2) quantize_tokens_kernel(
    const __grid_constant__ QuantizeArgs args) {
  __shared__ float shared[32];
  __shared__ Place places[kPlaces];
  wait_for_previous_kernel();
  const Problem& p = args.problem;
  const int token = blockIdx.x, count = args.k_tiles * (kTileK / 16);
  const Row<pieces> row = load_token<pieces>(p, token);
  const bool dynamic = p.a1 == ActScale::kToken;
  float by = dynamic ? scale_of(block_max(row.largest(), shared)) : p.a1_gscale[0];
  uint4 codes[pieces];
  row.encode(by, dynamic, codes);
  for (int first = 0; first < p.top_k; first += kPlaces) {
    const int many = min(kPlaces, p.top_k - first);
    __syncthreads();
    if (threadIdx.x < many) {
      const int slot = token * p.top_k + first + threadIdx.x, rank = args.schedule.rank[slot];
      Place& place = places[threadIdx.x];
      place.row = -1;
      if (rank >= 0) place = Place(args, slot, rank, true);
      if (rank >= 0) args.schedule.slot_of_row[place.row] = slot;
    }
    __syncthreads();
    for (int i = 0; i < many; i++) {
      const Place place = places[i];
      if (place.row < 0) continue;
      if (p.a1 == ActScale::kExpert) {
        by = p.a1_gscale[place.expert];
        row.encode(by, false, codes);
      }
      store(OperandRow(args, place), codes, count);
      if (threadIdx.x == 0) args.factor[place.row] = dynamic ? by : __frcp_rn(by);
    }
  }
}

template <int pieces>
__device__ __forceinline__ Row<pieces> load_intermediate(const QuantizeArgs& args, int from) {
  const Problem& p = args.problem;
  const bool two = p.gated && !args.activated;
  const float* h = args.h + int64_t{from} * p.inter * (two ? 2 : 1);
  const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  Row<pieces> row;
#pragma unroll
  for (int i = 0; i < pieces * 4; i++) {
    const int k = first_k(threadIdx.x + i / 4 * blockDim.x, i % 4);
    const float4 v = k < p.inter ? __ldcs(reinterpret_cast<const float4*>(h + k)) : zero;
    float* values = row.values[i / 4][i % 4];
    values[0] = v.x;
    values[1] = v.y;
    values[2] = v.z;
    values[3] = v.w;
    if (args.activated || k >= p.inter) continue;
    const float4 u = two ? __ldcs(reinterpret_cast<const float4*>(h + p.inter + k)) : v;
    const float up[4] = {u.x, u.y, u.z, u.w};
    for (int b = 0; b < 4; b++) values[b] = activate(p, values[b], up[b]);
  }
  return row;
}

// Rows that no slot has are loaded too: memory is there, and nothing waits to know.
template <int pieces>
__global__ void __launch_bounds__(pieces == 4 ? 1024 : 512, pieces == 4 ? 1 : 2) quantize_intermediate_kernel(
    const __grid_constant__ QuantizeArgs args) {
  __shared__ float shared[32];
  wait_for_previous_kernel();
  const Problem& p = args.problem;
  const int from = blockIdx.x, count = p.inter / 16;
  const Row<pieces> row = load_intermediate<pieces>(args, from);
  if (from >= args.schedule.start[p.experts]) return;
  const int slot = args.schedule.slot_of_row[from];
  if (slot < 0) return;
  const Place place(args, slot, from, false);
  const bool dynamic = p.a2 == ActScale::kToken;
  const float by = dynamic ? scale_of(block_max(row.largest(), shared))
                           : p.a2_gscale[p.a2 == ActScale::kExpert ? place.expert : 0];
  uint4 codes[pieces];
  row.encode(by, dynamic, codes);
  store(OperandRow(args, place), codes, count);
  if (threadIdx.x == 0) args.factor[from] = dynamic ? by : __frcp_rn(by);
}

// One block a row; few pieces a thread, so that many rows are under way.
template <template <int> class Kernel>
cudaError_t launch(const QuantizeArgs& args, int count, int rows) {
  const cudaStream_t stream = args.problem.stream;
  const auto threads = [=](int pieces) { return round_up((count + pieces - 1) / pieces, 32); };
  if (count <= 256) return launch_after(Kernel<1>::get(), args, rows, threads(1), 0, stream);
  if (count <= 1024) return launch_after(Kernel<2>::get(), args, rows, threads(2), 0, stream);
  return launch_after(Kernel<4>::get(), args, rows, threads(4), 0, stream);
}

template <int pieces>
struct Tokens {
  static auto get() { return quantize_tokens_kernel<pieces>; }
};
template <int pieces>
struct Intermediate {
  static auto get() { return quantize_intermediate_kernel<pieces>; }
};

}  // namespace

cudaError_t launch_quantize_tokens(const QuantizeArgs& args) {
  return launch<Tokens>(args, args.k_tiles * (kTileK / 16), args.problem.tokens);
}

cudaError_t launch_quantize_intermediate(const QuantizeArgs& args, int rows) {
  return launch<Intermediate>(args, args.problem.inter / 16, rows);
}

}  // namespace moeq::sm90::w4a8
