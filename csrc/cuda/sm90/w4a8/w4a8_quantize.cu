// Tokens are quantized to e4m3, and the intermediate between the GEMMs.
#include <cuda_bf16.h>

#include "w4a8_shared.cuh"
#include "../device/async.cuh"
#include "../device/scans.cuh"
#include "../numerics/act_rounding.cuh"
#include "../numerics/activations.cuh"

namespace moeq::sm90::w4a8 {

// Rows of numbers -> e4m3 codes in the order and with the swizzle of the token operand (w4a8_layout.h).
constexpr int kPieces = kTileK / 16;   // of 16 bytes, of a row's K tile: neighbouring lanes have them

// Piece q of a row holds the values at K = 128 * (q / 8) + 64 * (q / 4 % 2) + 16 * c + 4 * (q % 4) + b.
__device__ __forceinline__ int first_k(int q, int c) { return q / 8 * 128 + q / 4 % 2 * 64 + c * 16 + q % 4 * 4; }

// 16 values of a piece, [c][b].
struct Piece {
  float values[4][4];

  __device__ __forceinline__ float largest(float amax = 0.0f) const {
#pragma unroll
    for (int i = 0; i < 16; i++) amax = max_magnitude(amax, values[i / 4][i % 4]);
    return amax;
  }

  template <class Scale>
  __device__ __forceinline__ uint4 encode_each(Scale scale, uint32_t order) const {
    uint32_t words[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      words[c] = encode4(scale(values[c][0]), scale(values[c][1]), scale(values[c][2]), scale(values[c][3]));
      words[c] = __byte_perm(words[c], 0, order);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // See with_scaling; order: of QuantizeArgs.
  __device__ __forceinline__ uint4 encode(float by, bool divide, uint32_t order = 0x3210) const {
    return with_scaling(by, divide, [&](auto scaled) { return encode_each(scaled, order); });
  }
};

// A row of the operand, [k tiles, rows of its expert, 128 bytes] of an expert.
struct OperandRow {
  uint4* at;
  int stride;    // pieces from a K tile to the next
  int turn;      // of the swizzle

  __device__ OperandRow(uint8_t* operand, const Place& place, int k_tiles) {
    const int local = place.row - place.start;
    at = reinterpret_cast<uint4*>(operand) + (int64_t{place.start} * k_tiles + local) * kPieces;
    stride = place.rows * kPieces;
    turn = local % 8;
  }
  __device__ __forceinline__ void store(int q, uint4 codes) const {
    at[int64_t{q / kPieces} * stride + (q % kPieces ^ turn)] = codes;
  }
};

// Where the scale of a row's K tile is, as the operand lies.
__device__ __forceinline__ int64_t group_at(const Place& place, int k_tiles, int k_tile) {
  return int64_t{place.start} * k_tiles + int64_t{k_tile} * place.rows + (place.row - place.start);
}

// A row that a thread block quantizes to e4m3: it lies in registers between its maximum and its codes.

// Of a thread: the pieces threadIdx.x + i * blockDim.x.
template <int pieces>
struct Row {
  Piece piece[pieces];

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

// A row's codes with a scale for each 128 of K, and their scales.
template <int pieces>
struct Groups {
  uint4 codes[pieces];
  float by[pieces];

  __device__ __forceinline__ explicit Groups(const Row<pieces>& row) {
#pragma unroll
    for (int i = 0; i < pieces; i++) {
      by[i] = scale_of(amax_of_lanes<1, kPieces>(row.piece[i].largest()));
      codes[i] = row.piece[i].encode(by[i], true);
    }
  }

  __device__ __forceinline__ void write(const QuantizeArgs& args, const Place& place) const {
    store(OperandRow(args.operand, place, args.k_tiles), codes, args.k_tiles * kPieces);
#pragma unroll
    for (int i = 0; i < pieces; i++) {
      const int k_tile = (threadIdx.x + i * blockDim.x) / kPieces;
      if (threadIdx.x % kPieces == 0 && k_tile < args.k_tiles) {
        args.factor[group_at(place, args.k_tiles, k_tile)] = by[i];
      }
    }
  }
};

template <int pieces>
__device__ __forceinline__ void encode_row(const Row<pieces>& row, float by, bool divide, uint32_t order,
                                           uint4 (&codes)[pieces]) {
#pragma unroll
  for (int i = 0; i < pieces; i++) codes[i] = row.piece[i].encode(by, divide, order);
}

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

__device__ __forceinline__ void find_places(const QuantizeArgs& args, Place (&places)[kPlaces], int first) {
  const int top_k = args.problem.top_k;
  if (threadIdx.x < min(kPlaces, top_k - first)) {
    places[threadIdx.x] = place_of(args, blockIdx.x * top_k + first + threadIdx.x);
  }
}

// By the whole block, for each row that the token has: write(place). The first places have been found.
template <class Write>
__device__ __forceinline__ void for_each_place(const QuantizeArgs& args, Place (&places)[kPlaces], Write write) {
  const int top_k = args.problem.top_k;
  for (int first = 0; first < top_k; first += kPlaces) {
    const int many = min(kPlaces, top_k - first);
    if (first > 0) {
      __syncthreads();
      find_places(args, places, first);
    }
    __syncthreads();
    for (int i = 0; i < many; i++) {
      const Place place = places[i];
      if (place.row >= 0) write(place);
    }
  }
}

// As they lie in memory: loads that places are found beside, before the wait or behind it.
template <int pieces>
struct Words {
  uint2 at[pieces * 4];

  __device__ __forceinline__ Words(const Problem& p, int token) {
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + int64_t{token} * p.hidden;
#pragma unroll
    for (int i = 0; i < pieces * 4; i++) {
      const int k = first_k(threadIdx.x + i / 4 * blockDim.x, i % 4);
      at[i] = k < p.hidden ? load_settled(reinterpret_cast<const uint2*>(x + k)) : make_uint2(0, 0);
    }
  }
  // Nothing before this waits for them.
  __device__ __forceinline__ void arrive() {
#pragma unroll
    for (int i = 0; i < pieces * 4; i++) asm volatile("" : "+r"(at[i].x), "+r"(at[i].y));
  }
};

template <int pieces>
__device__ __forceinline__ Row<pieces> token_of(const Problem& p, const Words<pieces>& words, int token) {
  Row<pieces> row;
#pragma unroll
  for (int i = 0; i < pieces * 4; i++) {
    const uint2 v = words.at[i];
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
  const Problem& p = args.problem;
  Words<pieces> words(p, blockIdx.x);
  allow_next_kernel();
  wait_for_previous_kernel();
  find_places(args, places, 0);
  words.arrive();
  const Row<pieces> row = token_of(p, words, blockIdx.x);
  if constexpr (groups) {
    const Groups<pieces> quantized(row);
    for_each_place(args, places, [&](const Place& place) { quantized.write(args, place); });
    return;
  }
  const bool dynamic = p.a1 == ActScale::kToken;
  float by = dynamic ? scale_of(amax_of_threads(row.largest(), shared)) : p.a1_gscale[0];
  uint4 codes[pieces];
  encode_row(row, by, dynamic, args.order, codes);
  for_each_place(args, places, [&](const Place& place) {
    if (p.a1 == ActScale::kExpert) {
      by = p.a1_gscale[place.expert];
      encode_row(row, by, false, args.order, codes);
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
  find_places(args, places, 0);
  for_each_place(args, places, [&](const Place& place) {
    const OperandRow to(args.operand, place, args.k_tiles);
    for (int q = threadIdx.x; q < args.k_tiles * kPieces; q += blockDim.x) {
      uint32_t words[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int k = first_k(q, c);
        words[c] = k < p.hidden ? __byte_perm(*reinterpret_cast<const uint32_t*>(x + k), 0, args.order) : 0;
      }
      to.store(q, make_uint4(words[0], words[1], words[2], words[3]));
      if (groups && q % kPieces == 0) args.factor[group_at(place, args.k_tiles, q / kPieces)] = scales[q / kPieces];
    }
    if (!groups && threadIdx.x == 0) args.factor[place.row] = scales[0];
  });
}

// One block a token; few pieces a thread, so that many tokens are under way.
template <bool groups>
cudaError_t launch_tokens(const QuantizeArgs& args) {
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
  return p.weights == Weights::kBlocks ? launch_tokens<true>(args) : launch_tokens<false>(args);
}

// The intermediate is quantized to e4m3: its rows come through shared memory, the next ones while one is quantized, or,
// where they are too long for that, one block a row, piece by piece.
namespace {

constexpr int kMostStages = 3;
constexpr int kRingBytes = 216 * 1024;  // of a multiprocessor, for all its blocks' stages
constexpr int kRingThreads = 1024;

struct RingArgs {
  QuantizeArgs quantize;
  int stages;  // rows that a block has in shared memory or has asked for
  int row_bytes;  // of h
};

// The pieces first + i * blockDim.x, activated if they are not yet; `load` gets four numbers of h.
template <int pieces, class Load>
__device__ __forceinline__ Row<pieces> load_row(const QuantizeArgs& args, int first, Load load) {
  const Problem& p = args.problem;
  const bool two = p.gated && !args.activated;
  Row<pieces> row;
#pragma unroll
  for (int i = 0; i < pieces * 4; i++) {
    const int k = first_k(first + i / 4 * blockDim.x, i % 4);
    const float4 v = k < p.inter ? load(k) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float (&values)[4] = row.piece[i / 4].values[i % 4];
    values[0] = v.x;
    values[1] = v.y;
    values[2] = v.z;
    values[3] = v.w;
    if (args.activated || k >= p.inter) continue;
    const float4 u = two ? load(p.inter + k) : v;
    const float up[4] = {u.x, u.y, u.z, u.w};
    for (int b = 0; b < 4; b++) values[b] = activate(p, values[b], up[b]);
  }
  return row;
}

// Of a row of the expert, unless each has its own.
__device__ __forceinline__ float calibrated(const Problem& p, const Place& place) {
  return p.a2_gscale[p.a2 == ActScale::kExpert ? place.expert : 0];
}

// `by` divides where rows have scales of their own, else multiplies.
template <int pieces>
__device__ __forceinline__ void write_row(const QuantizeArgs& args, const Place& place, const Row<pieces>& row,
                                          float by, bool divide) {
  uint4 codes[pieces];
  encode_row(row, by, divide, args.order, codes);
  store(OperandRow(args.operand, place, args.k_tiles), codes, args.k_tiles * kPieces);
  if (threadIdx.x == 0) args.factor[place.row] = divide ? by : __frcp_rn(by);
}

struct RowRing {
  uint8_t* rows;
  uint64_t* full;
  const RingArgs& args;
  int total;
  int stage;
  uint32_t parity;

  __device__ __forceinline__ RowRing(const RingArgs& ring_args, uint8_t* shared_rows, uint64_t* barriers)
      : rows(shared_rows), full(barriers), args(ring_args), total(0), stage(0), parity(0) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < args.stages; i++) barrier_init(shared_address(&full[i]), 1);
      fence_barrier_init();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void fetch(int at, int to) const {
    if (threadIdx.x > 0 || at >= total) return;
    const uint32_t barrier = shared_address(&full[to]);
    barrier_expect(barrier, args.row_bytes);
    copy_bulk(shared_address(rows + to * args.row_bytes),
              reinterpret_cast<const uint8_t*>(args.quantize.h) + int64_t{total - 1 - at} * args.row_bytes,
              args.row_bytes, barrier);
  }
  __device__ __forceinline__ void begin() {
    total = args.quantize.schedule.start[args.quantize.problem.experts];
    for (int i = 0; i < args.stages; i++) fetch(blockIdx.x + i * gridDim.x, i);
  }
  __device__ __forceinline__ const float* wait() const {
    barrier_wait(shared_address(&full[stage]), parity);
    return reinterpret_cast<const float*>(rows + stage * args.row_bytes);
  }
  // After a barrier of the block: the row has been read.
  __device__ __forceinline__ void advance(int at) {
    fetch(at + args.stages * gridDim.x, stage);
    if (++stage == args.stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// As many blocks as fit, each with a ring of rows; a thread has one piece. The last rows first: they were written last,
// and what GEMM2 begins with is written last then, so that both are in the L2 when they are read.
template <bool groups>
__global__ void __launch_bounds__(kRingThreads, 1) quantize_ring_kernel(const __grid_constant__ RingArgs ring_args) {
  extern __shared__ __align__(128) uint8_t shared_rows[];
  __shared__ float maxima[2][kRingThreads / 32];
  __shared__ uint64_t full[kMostStages];
  const QuantizeArgs& args = ring_args.quantize;
  const Problem& p = args.problem;
  RowRing ring(ring_args, shared_rows, full);
  allow_next_kernel();
  wait_for_previous_kernel();
  ring.begin();
  const bool dynamic = p.a2 == ActScale::kToken;
  int turn = 0;
  const auto place_at = [&](int at) { return args.schedule.place_of_row[max(ring.total - 1 - at, 0)]; };
  Place next = ring.total > 0 ? place_at(blockIdx.x) : Place{-1, 0, 0, 0};
  for (int at = blockIdx.x; at < ring.total; at += gridDim.x) {
    const Place place = next;
    next = place_at(at + gridDim.x);
    const float* h = ring.wait();
    const Row<1> row = load_row<1>(args, threadIdx.x, [=](int k) { return *reinterpret_cast<const float4*>(h + k); });
    float by = 0.0f;
    if (!groups && dynamic) {
      by = scale_of(amax_of_threads(row.largest(), maxima[turn]));
      turn ^= 1;
    } else {
      __syncthreads();
    }
    ring.advance(at);
    if (place.row < 0) continue;
    if constexpr (groups) {
      Groups<1>(row).write(args, place);
    } else {
      write_row(args, place, row, dynamic ? by : calibrated(p, place), dynamic);
    }
  }
}

constexpr int kLongPieces = 4;  // of a thread, one at a time: registers do not hold all

// The scale of a row's own; its codes read the row again, mostly from L2.
__device__ __forceinline__ float scale_of_long_row(const QuantizeArgs& args, const float* h, float* shared) {
  float amax = 0.0f;
#pragma unroll 1
  for (int q = threadIdx.x; q < kLongPieces * blockDim.x; q += blockDim.x) {
    const Row<1> row = load_row<1>(args, q, [=](int k) { return *reinterpret_cast<const float4*>(h + k); });
    amax = row.piece[0].largest(amax);
  }
  return scale_of(amax_of_threads(amax, shared));
}

template <bool groups>
__global__ void __launch_bounds__(1024, 1) quantize_long_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ float shared[32];
  allow_next_kernel();
  wait_for_previous_kernel();
  const Problem& p = args.problem;
  const int total = args.schedule.start[p.experts];
  const int row = total - 1 - static_cast<int>(blockIdx.x);
  if (row < 0) return;
  const Place place = args.schedule.place_of_row[row];
  if (place.row < 0) return;
  const float* h = args.h + int64_t{row} * p.inter * (p.gated && !args.activated ? 2 : 1);
  const bool dynamic = groups || p.a2 == ActScale::kToken;
  float by = 0.0f;
  if (!groups) {
    by = dynamic ? scale_of_long_row(args, h, shared) : calibrated(p, place);
    if (threadIdx.x == 0) args.factor[place.row] = dynamic ? by : __frcp_rn(by);
  }
  const OperandRow to(args.operand, place, args.k_tiles);
#pragma unroll 1
  for (int q = threadIdx.x; q < kLongPieces * blockDim.x; q += blockDim.x) {
    const int k_tile = q / kPieces;
    const Row<1> row = load_row<1>(args, q, [=](int k) { return __ldcs(reinterpret_cast<const float4*>(h + k)); });
    if (groups) by = scale_of(amax_of_lanes<1, kPieces>(row.largest()));
    if (k_tile >= args.k_tiles) continue;
    to.store(q, row.piece[0].encode(by, dynamic, groups ? 0x3210 : args.order));
    if (groups && q % kPieces == 0) args.factor[group_at(place, args.k_tiles, k_tile)] = by;
  }
}

template <bool groups>
cudaError_t launch_ring(const RingArgs& args) {
  const auto kernel = quantize_ring_kernel<groups>;
  const int threads = round_up(args.quantize.k_tiles * kPieces, 32), shared = args.stages * args.row_bytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int blocks =
      args.quantize.problem.partition.multiprocessors * least_of(kRingBytes / shared, kRingThreads / threads);
  return launch_after(kernel, args, blocks, threads, shared, args.quantize.problem.stream);
}

template <bool groups>
cudaError_t launch_hidden(const QuantizeArgs& args, int rows) {
  const Problem& p = args.problem;
  const int bytes = p.inter * (p.gated && !args.activated ? 2 : 1) * static_cast<int>(sizeof(float));
  const int stages = least_of(kRingBytes / bytes, kMostStages), pieces = args.k_tiles * kPieces;
  if (stages >= 2 && pieces <= kRingThreads) return launch_ring<groups>({args, stages, bytes});
  const int threads = round_up((pieces + kLongPieces - 1) / kLongPieces, 32);
  return launch_after(quantize_long_kernel<groups>, args, rows, threads, 0, p.stream);
}

}  // namespace

cudaError_t launch_quantize_intermediate(const QuantizeArgs& args, int rows) {
  return args.problem.weights == Weights::kBlocks ? launch_hidden<true>(args, rows) : launch_hidden<false>(args, rows);
}

}  // namespace moeq::sm90::w4a8
