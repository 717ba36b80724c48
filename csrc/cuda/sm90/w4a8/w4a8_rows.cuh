// A row that a thread block quantizes to e4m3: it lies in registers between its maximum and its codes.
#pragma once
#include "../numerics/activations.cuh"
#include "w4a8_encode.cuh"
#include "w4a8_quantize.cuh"

namespace moeq::sm90::w4a8 {

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
