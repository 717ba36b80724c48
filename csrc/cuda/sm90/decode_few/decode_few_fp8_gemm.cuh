// Products of e4m3 weights, in the layout of w4a8_layout.h, with tokens that hold e4m3 values, both exact in float16,
// or 16-bit ones, beside which codes become bfloat16; and of int8 ones, exact in bfloat16, too. The tensor cores add
// products in float32; scales multiply sums, of 64 values of K or of a whole unit.
#pragma once
#include "decode_few_gemm.cuh"
#include "../device/async.cuh"
#include "../formats/weights_int8.cuh"
#include "../formats/weights_packed.cuh"
#include "../numerics/act_rounding.cuh"

namespace moeq::sm90::few {

__device__ __forceinline__ float load_float(uint32_t at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at));
  return value;
}

// Sums of a unit times the scales of their rows and, where they have some, of their tokens.
template <bool kRounded>
__device__ __forceinline__ void scale_sums(const Place& place, const float (&weights)[2][2], Sums& sums) {
  float x[2] = {1.0f, 1.0f};
  if constexpr (kRounded) {
    x[0] = load_float(place.scales[0]);
    x[1] = load_float(place.scales[1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums.v[i][j] *= weights[i][j / 2] * x[j % 2];
    }
  }
}

// A 16 x 16 piece of a tile as an operand, of its lane's codes of rows g and g + 8, four of each, in the order of K:
// float16 or bfloat16.
template <bool kHalf, bool kIntegers>
__device__ __forceinline__ void multiply_codes(float (&d)[4], uint32_t low, uint32_t high, uint2 tokens) {
  if constexpr (kIntegers) {
    const E4m3Halves l = decode_int8_in_order(low), h = decode_int8_in_order(high);
    const uint32_t a[4] = {l.first, h.first, l.second, h.second};
    decode::multiply_add(d, a, tokens.x, tokens.y);
  } else if constexpr (kHalf) {
    const uint2 l = decode4_to_half(low), h = decode4_to_half(high);
    const uint32_t a[4] = {l.x, h.x, l.y, h.y};
    decode::multiply_add<true>(d, a, tokens.x, tokens.y);
  } else {
    const E4m3Halves l = decode_e4m3_in_order(low, kRaiseE4m3), h = decode_e4m3_in_order(high, kRaiseE4m3);
    const uint32_t a[4] = {l.first, h.first, l.second, h.second};
    decode::multiply_add(d, a, tokens.x, tokens.y);
  }
}

// kRounded: tokens hold e4m3 values as float16. kIntegers: codes are int8.
template <bool kGroups, bool kRounded, bool kIntegers>
struct ByteMultiplier {
  uint32_t at;  // of this lane's row of the first half of a tile
  const float* scales;  // kGroups: of gate and up rows, or all, which are `other` apart, `blocks` of each
  int other, blocks, kept;
  float weights[2][2];  // scales: of the two blocks of rows, and of their two rows; kGroups: weights[0], each lane's of
                        // the `kept`-th 32 blocks of K

  __device__ __forceinline__ explicit ByteMultiplier(const Args&)
      : scales(nullptr), other(0), blocks(0), kept(-1), weights{} {
    at = threadIdx.x / 32 % 2 * 2048 + matrix_row(lane_of_warp());
  }

  template <Kind kKind>
  __device__ __forceinline__ void begin_unit(const Args& args, const Fixed& fixed, const Work& work, int gemm) {
    const ScalePlace place = scale_place<kKind>(args, fixed.entries[work.entry].expert, gemm);
    if constexpr (kGroups) {
      scales = block_scales(place, work.row_tile, 0);
      other = place.half;
      blocks = place.row;
      kept = -1;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[i / 2][i % 2] = row_scale(place, work.row_tile, i / 2, i % 2);
      }
    }
  }

  // Loads the scales of 32 blocks of K, one for each lane, before the codes of a tile of 64 values of them are there:
  // a load for each tile would be waited for at each.
  __device__ __forceinline__ void expect_tile(int tile) {
    if constexpr (kGroups) {
      constexpr int kTiles = 32 * 128 / kTileK;
      if (tile / kTiles != kept) {
        kept = tile / kTiles;
        const int block = min(kept * 32 + lane_of_warp(), blocks - 1);
        weights[0][0] = __ldg(scales + block);
        weights[0][1] = __ldg(scales + other + block);
      }
    }
  }

  __device__ __forceinline__ void multiply(uint32_t stage, const Place& place, int begin, int done, int first,
                                           int tiles, Sums& sums) {
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += place.workers) {
      if (kGroups && tile != first) {
        expect_tile(begin + done + tile);
      }
      const uint32_t codes = (stage + tile / 2 * (2 * kFp8TileBytes) + at) ^ (tile % 2 * 64);
      const uint32_t row = place.row + (done + tile) * 128;
      const uint4 b[2] = {load_16(row), load_16(row + 16)};
      const uint2 steps[4] = {{b[0].x, b[0].y}, {b[0].z, b[0].w}, {b[1].x, b[1].y}, {b[1].z, b[1].w}};
      float x[2] = {1.0f, 1.0f}, of_rows[2] = {};
      if constexpr (kGroups) {
        const int lane = (begin + done + tile) / 2 % 32;
        of_rows[0] = __shfl_sync(0xffffffffu, weights[0][0], lane);
        of_rows[1] = __shfl_sync(0xffffffffu, weights[0][1], lane);
        if constexpr (kRounded) {
          x[0] = load_float(place.scales[0] + (done + tile) / 2 * 4);
          x[1] = load_float(place.scales[1] + (done + tile) / 2 * 4);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 low = load_matrices(codes + i * 4096), high = load_matrices(codes + i * 4096 + 1024);
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
        float part[4] = {};
        float (&to)[4] = kGroups ? part : sums.v[i];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          multiply_codes<kRounded, kIntegers>(to, low_words[step], high_words[step], steps[step]);
        }
        if constexpr (kGroups) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sums.v[i][j] = __fmaf_rn(part[j], of_rows[j / 2] * x[j % 2], sums.v[i][j]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void finish_unit(const Place& place, Sums& sums) const {
    if constexpr (!kGroups) {
      scale_sums<kRounded>(place, weights, sums);
    }
  }
};

template <bool kGroups, bool kRounded>
struct Multiplier<Fp8Format<kGroups, kRounded>> : ByteMultiplier<kGroups, kRounded, false> {
  using ByteMultiplier<kGroups, kRounded, false>::ByteMultiplier;
};

template <>
struct Multiplier<Int8Format> : ByteMultiplier<false, false, true> {
  using ByteMultiplier::ByteMultiplier;
};

// Products of MXFP8 weights, in the layout of w4a8_layout.h, with 16-bit tokens: codes times their powers of two are
// exact in bfloat16.
template <>
struct Multiplier<Mxfp8Format> {
  uint32_t at, exponents_at;  // in a stage: of this lane's row of the first half of a tile, and of its exponents

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

// Products of 4-bit weights that are rounded to e4m3 as policy `packed` has it, in the layout of w4a8_layout.h, with
// tokens that hold e4m3 values: exact in float16, which one instruction makes of two codes, and added in float32.
template <class Codes>
struct Multiplier<PackedFormat<Codes>> {
  using Format = PackedFormat<Codes>;
  int at, scales_at;  // of this thread in a stage
  float weights[2][2];  // powers of two: of the two blocks of rows, and of their two rows

  __device__ __forceinline__ explicit Multiplier(const Args& args)
      : at(threadIdx.x % 64 * 16),
        scales_at(args.stage_tiles * kTileCodeBytes + Codes::scales_of(threadIdx.x % 64)),
        weights{} {}

  template <Kind kKind>
  __device__ __forceinline__ void begin_unit(const Args& args, const Fixed& fixed, const Work& work, int gemm) {
    const uint8_t* strips = gemm == 0 ? args.p.w13_scale : args.p.w2_scale;
    const int row_tiles = gemm == 0 ? args.row_tiles[0] : args.row_tiles[1];
    const int scale_bytes = (gemm == 0 ? args.k_tiles[0] : args.k_tiles[1]) * Format::kTileScaleBytes;
    const int64_t row = static_cast<int64_t>(fixed.entries[work.entry].expert) * row_tiles + work.row_tile;
    // clang-format off: it takes the closing parenthesis for a cast's
    const uint8_t* exponents = strips + row * (scale_bytes + kBytesBehindRow<Format>) + scale_bytes +
                               threadIdx.x / 32 % 2 * 16 + lane_of_warp() / 4;
    // clang-format on
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int biased = __ldg(exponents + i / 2 * 32 + i % 2 * 8);
      weights[i / 2][i % 2] = Codes::row_power(biased);
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
        const uint32_t both =
            load_scales<uint32_t>(stage + scales_at + tile / 2 * Codes::kScaleBytes + i * (Codes::kScaleBytes / 2));
        const uint32_t scales = tile % 2 == 0 ? both : both >> 16;
        w4a8::Table tables[4];  // of rows g and g + 8; the others are nobody's
        w4a8::make_tables<Codes>(scales, tables);
        if (scales & 0x8080u) {
          tables[0] = w4a8::rounded_table<Codes>(scales & 255);
          tables[1] = w4a8::rounded_table<Codes>(scales >> 8 & 255);
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
          decode::multiply_add<true>(sums.v[i], a, steps[step].x, steps[step].y);
        }
      }
    }
  }

  __device__ __forceinline__ void finish_unit(const Place& place, Sums& sums) const {
    scale_sums<true>(place, weights, sums);
  }
};

}  // namespace moeq::sm90::few
