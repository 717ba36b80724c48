// Rows of activations -> rows of the token operand: e4m3, in the order and with the swizzle of w4a8_layout.h.
#pragma once
#include "w4a8_shared.cuh"
#include "../numerics/act_rounding.cuh"
#include "../numerics/activations.cuh"

namespace moeq::sm90::w4a8 {

struct QuantizeArgs {
  W4a8Problem problem;
  Schedule schedule;
  const float* h;      // of GEMM1: [rows, inter] activated, or [rows, halves * inter] not yet
  bool activated;
  uint8_t* operand;    // [rows, K padded], see w4a8_shared.cuh
  float* factor;       // [rows]: multiplies accumulators; kBlocks: [k tiles, rows], as the operand lies
  int k_tiles;
};

cudaError_t launch_quantize_tokens(const QuantizeArgs& args);
cudaError_t launch_quantize_intermediate(const QuantizeArgs& args, int rows);

// Rows of numbers -> e4m3 codes in the order and with the swizzle of the token operand (w4a8_layout.h).
constexpr int kPieces = kTileK / 16;   // of 16 bytes, of a row's K tile

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
  __device__ __forceinline__ uint4 encode_each(Scale scale) const {
    uint32_t words[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      words[c] = encode4(scale(values[c][0]), scale(values[c][1]), scale(values[c][2]), scale(values[c][3]));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // See with_scaling.
  __device__ __forceinline__ uint4 encode(float by, bool divide) const {
    return with_scaling(by, divide, [&](auto scaled) { return encode_each(scaled); });
  }
};

// The largest of the eight neighbouring lanes that hold the pieces of a K tile.
__device__ __forceinline__ float group_max(float value) {
  for (int step = 1; step < kPieces; step *= 2) {
    value = max_magnitude(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

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

// Of the whole block; `shared` has one place a warp, and may be written again after a barrier.
__device__ __forceinline__ float block_max(float value, float* shared) {
  for (int step = 16; step > 0; step /= 2) value = max_magnitude(value, __shfl_xor_sync(0xffffffffu, value, step));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int i = 1; i < blockDim.x / 32; i++) value = max_magnitude(value, shared[i]);
  return value;
}

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
      by[i] = scale_of(group_max(row.piece[i].largest()));
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
__device__ __forceinline__ void encode_row(const Row<pieces>& row, float by, bool divide, uint4 (&codes)[pieces]) {
#pragma unroll
  for (int i = 0; i < pieces; i++) codes[i] = row.piece[i].encode(by, divide);
}

}  // namespace moeq::sm90::w4a8
