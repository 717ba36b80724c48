// Where e4m3 weights of a unit have their scales.
#pragma once
#include "decode_few_shared.cuh"

namespace moeq::sm90::few {

struct ScalePlace {
  const float* first;   // the expert's
  int half, row, rows;
  bool paired;          // rows of gate and up take turns
};

template <Kind kKind>
__device__ __forceinline__ ScalePlace scale_place(const Args& args, int expert, int gemm) {
  const WeightScales& scales = gemm == 0 ? args.fp8.weights[0] : args.fp8.weights[1];
  const bool paired = gemm == 0 && Case<kKind>::gated(args.p);
  return {scales.data + expert * scales.expert, paired ? scales.half : 0, scales.row, scales.rows, paired};
}

// Those of a row tile's block of 128 rows, of which none ends within a tile; `second`: of up rows.
__device__ __forceinline__ const float* block_scales(const ScalePlace& place, int row_tile, int second) {
  const int row = min(row_tile * (place.paired ? kTileRows / 2 : kTileRows), place.rows - 1);
  return place.first + second * place.half + row / 128 * place.row;
}

// That of one of a thread's four rows: `block` of its two of 16, 32 apart, `second` of two rows in it.
__device__ __forceinline__ float row_scale(const ScalePlace& place, int row_tile, int block, int second) {
  const int g = lane_of_warp() / 4, sixteen = kTileRows / 16 * row_tile + threadIdx.x / 32 % 2 + 2 * block;
  const int row = place.paired ? 8 * sixteen + g : 16 * sixteen + 2 * g + second;
  return __ldg(place.first + second * place.half + min(row, place.rows - 1) * place.row);   // padded rows: any
}

// Asks for the block scales of a unit, one thread, long before they are needed.
template <Kind kKind>
__device__ __forceinline__ void prefetch_scales(const Args& args, const Work& work, int expert, int gemm, int end) {
  constexpr int kLine = 128 / sizeof(float);
  const ScalePlace place = scale_place<kKind>(args, expert, gemm);
#pragma unroll 1
  for (int block = work.part * work.part_tiles / 2; block < end / 2; block += kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(block_scales(place, work.row_tile, 0) + block));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(block_scales(place, work.row_tile, 1) + block));
  }
}

}  // namespace moeq::sm90::few
