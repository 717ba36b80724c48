// The products of one tile: mma.m16n8k16 with the weights as A and up to 8 * kGroups tokens as B. Four warps multiply a
// tile, 16 of its 64 rows each.
#pragma once
#include "decode_feed.cuh"
#include "../formats/formats.cuh"

namespace moeq::sm90::decode {

template <int kGroups>
struct Sums {
  float v[kGroups][4];  // of group i: rows g, g, g + 8, g + 8; tokens 8 * i + 2 * c, and one more, twice
};

#define MOEQ_MULTIPLY_ADD(types)                                             \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." types                         \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// Products of bfloat16, or of float16.
template <bool kHalf = false>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf) {
    MOEQ_MULTIPLY_ADD("f16.f16");
  } else {
    MOEQ_MULTIPLY_ADD("bf16.bf16");
  }
}
#undef MOEQ_MULTIPLY_ADD

// Adds sums that lack their rows' scales.
template <class Factors>
__device__ __forceinline__ void add_scaled(float (&d)[4], const float (&unscaled)[4], const Factors& factors) {
  d[0] = __fmaf_rn(unscaled[0], factors.low, d[0]);
  d[1] = __fmaf_rn(unscaled[1], factors.low, d[1]);
  d[2] = __fmaf_rn(unscaled[2], factors.high, d[2]);
  d[3] = __fmaf_rn(unscaled[3], factors.high, d[3]);
}

// What a thread needs to know of the row tile it sums.
template <int kGroups>
struct RowTile {
  int entry, row_tile;
  Entry what;
  int groups;
  int scale_offset;  // of this thread's scales in a stage
  int row_offset[kGroups];  // of this thread's token
};

template <class Format, int kGroups>
__device__ __forceinline__ void open_entry(const Shared& s, const Ring& ring, RowTile<kGroups>& tile_row, int entry) {
  const int lane = threadIdx.x % 32;
  tile_row.entry = entry;
  tile_row.scale_offset = ring.stage_tiles * kTileCodeBytes + Format::scale_offset(threadIdx.x % 128);
  tile_row.what = s.entries[entry];
  tile_row.groups = (tile_row.what.count + kGroupTokens - 1) / kGroupTokens;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    // Columns without a token repeat the last one: their sums are not used.
    const int token = min(i * kGroupTokens + lane / 4, tile_row.what.count - 1);
    tile_row.row_offset[i] = ring.weight_bytes + token * ring.row_bytes + lane % 4 * 32;
  }
}

// Where this thread's 16 values of K of a group's token lie, or zeros for them.
template <int kGroups>
__device__ __forceinline__ const uint8_t* row_of(const uint8_t* stage, int tile, const RowTile<kGroups>& tile_row,
                                                 const uint32_t* zeros, int group) {
  return zeros != nullptr ? reinterpret_cast<const uint8_t*>(zeros) : stage + tile_row.row_offset[group] + tile * 128;
}

// Of a format whose sums are scaled: one group of tokens after another, as sums that lack their scales take registers.
template <class Format, int kGroups>
__device__ __forceinline__ void multiply_scaled(const uint8_t* stage, int tile, const RowTile<kGroups>& tile_row,
                                                const uint32_t* zeros, const uint4& codes,
                                                const typename Format::ScaleWord& word, Sums<kGroups>& sums) {
  const typename Format::Scales scales = Format::scales(word);
  uint32_t a[4][4];
  Format::decode(codes.x, scales, a[0]);
  Format::decode(codes.y, scales, a[1]);
  Format::decode(codes.z, scales, a[2]);
  Format::decode(codes.w, scales, a[3]);
  const typename Format::Factors factors = Format::factors(word);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (i == 0 || i < tile_row.groups) {
      const uint4* row = reinterpret_cast<const uint4*>(row_of(stage, tile, tile_row, zeros, i));
      const uint4 b[2] = {row[0], row[1]};
      float unscaled[4] = {};
      multiply_add(unscaled, a[0], b[0].x, b[0].y);
      multiply_add(unscaled, a[1], b[0].z, b[0].w);
      multiply_add(unscaled, a[2], b[1].x, b[1].y);
      multiply_add(unscaled, a[3], b[1].z, b[1].w);
      add_scaled(sums.v[i], unscaled, factors);
    }
  }
}

// Of any other.
template <class Format, int kGroups>
__device__ __forceinline__ void multiply_decoded(const uint8_t* stage, int tile, const RowTile<kGroups>& tile_row,
                                                 const uint32_t* zeros, const uint4& codes,
                                                 const typename Format::ScaleWord& scale_word, Sums<kGroups>& sums) {
  const typename Format::Scales scales = Format::scales(scale_word);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  const uint8_t* rows[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    rows[i] = row_of(stage, tile, tile_row, zeros, i);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 b[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i == 0 || i < tile_row.groups) {
        b[i] = *reinterpret_cast<const uint4*>(rows[i] + 16 * half);
      }
    }
    uint32_t first[4], second[4];
    Format::decode(words[2 * half], scales, first);
    Format::decode(words[2 * half + 1], scales, second);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      if (i == 0 || i < tile_row.groups) {
        multiply_add(sums.v[i], first, b[i].x, b[i].y);
        multiply_add(sums.v[i], second, b[i].z, b[i].w);
      }
    }
  }
}

// `zeros` is not null where this thread's 16 values of K lie beyond the operand's end.
template <class Format, int kGroups>
__device__ __forceinline__ void multiply_tile(const uint8_t* stage, int tile, const RowTile<kGroups>& tile_row,
                                              const uint32_t* zeros, Sums<kGroups>& sums) {
  const int thread = threadIdx.x % 128;
  const uint4 codes = *reinterpret_cast<const uint4*>(stage + tile * kTileCodeBytes + 16 * thread);
  const uint8_t* scale_at = stage + tile_row.scale_offset + tile * Format::kTileScaleBytes;
  const auto scale_word = *reinterpret_cast<const typename Format::ScaleWord*>(scale_at);
  if constexpr (kScalesSums<Format>) {
    multiply_scaled<Format>(stage, tile, tile_row, zeros, codes, scale_word, sums);
  } else {
    multiply_decoded<Format>(stage, tile, tile_row, zeros, codes, scale_word, sums);
  }
}

template <int kGroups>
__device__ __forceinline__ void clear(Sums<kGroups>& sums) {
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums.v[i][j] = 0.0f;
    }
  }
}

}  // namespace moeq::sm90::decode
