// Products of NVFP4 weights that are rounded to e4m3 as policy `packed` has it, in the layout of w4a8_layout.h, with
// tokens that hold e4m3 values: exact in float16, which one instruction makes of two codes, and added in float32.
#pragma once
#include "decode_few_fp8_gemm.cuh"
#include "../formats/weights_packed.cuh"
#include "../numerics/act_rounding.cuh"

namespace moeq::sm90::few {

__device__ __forceinline__ void multiply_add_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
struct Multiplier<PackedFormat> {
  int at, scales_at;    // of this thread in a stage
  float weights[2][2];  // powers of two: of the two blocks of rows, and of their two rows

  __device__ __forceinline__ explicit Multiplier(const Args& args)
      : at(threadIdx.x % 64 * 16), scales_at(args.stage_tiles * kTileCodeBytes + threadIdx.x % 64 * 4), weights{} {}

  template <Kind kKind>
  __device__ __forceinline__ void begin_unit(const Args& args, const Fixed& fixed, const Work& work, int gemm) {
    const uint8_t* strips = gemm == 0 ? args.p.w13_scale : args.p.w2_scale;
    const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
    const int scale_bytes = (gemm == 0 ? args.k_tiles[0] : args.k_tiles[1]) * PackedFormat::kTileScaleBytes;
    const int64_t row = static_cast<int64_t>(fixed.entries[work.entry].expert) * row_tiles + work.row_tile;
    // clang-format off: it takes the closing parenthesis for a cast's
    const uint8_t* exponents = strips + row * (scale_bytes + kBytesBehindRow<PackedFormat>) + scale_bytes +
                               threadIdx.x / 32 % 2 * 16 + lane_of_warp() / 4;
    // clang-format on
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int biased = __ldg(exponents + i / 2 * 32 + i % 2 * 8);
      weights[i / 2][i % 2] = __int_as_float((biased - w4a8::kExponentBias + 127) << 23);
    }
  }
  __device__ __forceinline__ void expect_tile(int) {}

  __device__ __forceinline__ void multiply(uint32_t stage, const Place& place, int, int done, int first, int tiles,
                                           Sums& sums) {
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += place.workers) {
      const uint32_t row = place.row + (done + tile) * 128;
      const uint4 b[2] = {load_16(row), load_16(row + 16)};
      const uint2 steps[4] = {make_uint2(b[0].x, b[0].y), make_uint2(b[0].z, b[0].w), make_uint2(b[1].x, b[1].y),
                              make_uint2(b[1].z, b[1].w)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 codes = load_16(stage + at + tile * kTileCodeBytes + i * (kTileCodeBytes / 2));
        const uint32_t both = load_scales<uint32_t>(stage + scales_at + tile / 2 * w4a8::kScaleBytes + i * 256);
        const uint32_t scales = tile % 2 == 0 ? both : both >> 16;
        w4a8::Table tables[4];   // of rows g and g + 8; the others are nobody's
        w4a8::make_tables(scales, tables);
        if (scales & 0x8080u) {
          tables[0] = w4a8::rounded_table(scales & 255);
          tables[1] = w4a8::rounded_table(scales >> 8 & 255);
        }
        uint32_t low[4], high[4];
        w4a8::decode8(codes.x, tables[0], low[0], low[1]);
        w4a8::decode8(codes.y, tables[1], high[0], high[1]);
        w4a8::decode8(codes.z, tables[0], low[2], low[3]);
        w4a8::decode8(codes.w, tables[1], high[2], high[3]);
        __syncwarp();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const uint2 l = decode4_to_half(low[step]), h = decode4_to_half(high[step]);
          const uint32_t a[4] = {l.x, h.x, l.y, h.y};
          multiply_add_half(sums.v[i], a, steps[step].x, steps[step].y);
        }
      }
    }
  }

  __device__ __forceinline__ void finish_unit(const Place& place, Sums& sums) const {
    scale_sums(place, weights, sums);
  }
};

}  // namespace moeq::sm90::few
