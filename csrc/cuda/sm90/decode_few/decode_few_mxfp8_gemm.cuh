// Products of MXFP8 weights, in the layout of w4a8_layout.h, with 16-bit tokens: codes times their powers of two are
// exact in bfloat16.
#pragma once
#include "../device/async.cuh"
#include "../formats/weights_e4m3.cuh"
#include "decode_few_gemm.cuh"

namespace moeq::sm90::few {

template <>
struct Multiplier<Mxfp8Format> {
  uint32_t at, exponents_at;   // in a stage: of this lane's row of the first half of a tile, and of its exponents

  __device__ __forceinline__ explicit Multiplier(const Args& args)
      : at(threadIdx.x / 32 % 2 * 2048 + matrix_row(lane_of_warp())),
        exponents_at(args.stage_tiles * kFp8TileBytes + exponents_offset(threadIdx.x % 64)) {}

  template <Kind kKind>
  __device__ __forceinline__ void begin_unit(const Args&, const Fixed&, const Work&, int) {}
  __device__ __forceinline__ void expect_tile(int) {}
  __device__ __forceinline__ void finish_unit(const Place&, Sums&) const {}

  __device__ __forceinline__ void multiply(uint32_t stage, const Place& place, int, int done, int first, int tiles,
                                           Sums& sums) {
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += place.workers) {
      const uint32_t codes = (stage + tile / 2 * (2 * kFp8TileBytes) + at) ^ (tile % 2 * 64);
      const uint32_t exponents = stage + exponents_at + tile * Mxfp8Format::kTileScaleBytes;
      const uint32_t row = place.row + (done + tile) * 128;
      const uint4 b[2] = {load_16(row), load_16(row + 16)};
      const uint2 steps[4] = {{b[0].x, b[0].y}, {b[0].z, b[0].w}, {b[1].x, b[1].y}, {b[1].z, b[1].w}};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Raises raise = raises_of(load_scales<uint16_t>(exponents + i * (Mxfp8Format::kTileScaleBytes / 2)));
        const uint4 low = load_matrices(codes + i * 4096), high = load_matrices(codes + i * 4096 + 1024);
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const E4m3Halves l = decode_e4m3_in_order(low_words[step], raise.low);
          const E4m3Halves h = decode_e4m3_in_order(high_words[step], raise.high);
          const uint32_t a[4] = {l.first, h.first, l.second, h.second};
          decode::multiply_add(sums.v[i], a, steps[step].x, steps[step].y);
        }
      }
    }
  }
};

}  // namespace moeq::sm90::few
