// The tile registers of AMX in software, to the bit: what tests run on machines without them.
#pragma once

#include <cmath>

#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int64_t kTileBytes = 1024;

struct TileShapes {
  int row_counts[8] = {};

  MOEQ_INLINE void set(int tile, int row_count) { row_counts[tile] = row_count; }
};

struct TileFile {
  TileShapes shapes;
  alignas(64) uint8_t rows[8][16][64];
};
inline TileFile& tile_file() {
  static thread_local TileFile file;
  return file;
}

MOEQ_INLINE void configure(const TileShapes& shapes) {
  tile_file().shapes = shapes;
  std::memset(tile_file().rows, 0, sizeof(TileFile::rows));
}
MOEQ_INLINE void release_tiles() { configure({}); }

template <int Tile>
__attribute__((noinline)) void zero_tile() {
  std::memset(tile_file().rows[Tile], 0, sizeof(TileFile::rows[Tile]));
}
template <int Tile>
__attribute__((noinline)) void load_tile(const void* p, int64_t stride) {
  zero_tile<Tile>();
  for (int row = 0; row < tile_file().shapes.row_counts[Tile]; ++row) {
    std::memcpy(tile_file().rows[Tile][row], static_cast<const uint8_t*>(p) + row * stride, 64);
  }
}
template <int Tile>
__attribute__((noinline)) void store_tile(void* p, int64_t stride) {
  for (int row = 0; row < tile_file().shapes.row_counts[Tile]; ++row) {
    std::memcpy(static_cast<uint8_t*>(p) + row * stride, tile_file().rows[Tile][row], 64);
  }
}

// Subnormal numbers count as zero, in operands and in results.
MOEQ_INLINE float flushed(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }
MOEQ_INLINE float bf16_operand(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof(half));
  const uint32_t bits = (uint32_t)half << 16;
  float v;
  std::memcpy(&v, &bits, sizeof(v));
  return flushed(v);
}

// Per result: the products of the first elements of all pairs in one chain of fused additions that starts at zero,
// those of the second elements in another; the sum of both joins the accumulator.
template <int Acc, int A, int B>
__attribute__((noinline)) void multiply_tiles() {
  TileFile& file = tile_file();
  for (int row = 0; row < file.shapes.row_counts[Acc]; ++row) {
    for (int column = 0; column < 16; ++column) {
      float sums[2] = {0.0f, 0.0f};
      for (int pair = 0; pair < 16; ++pair) {
        for (int i = 0; i < 2; ++i) {
          const float a = bf16_operand(&file.rows[A][row][4 * pair + 2 * i]);
          const float b = bf16_operand(&file.rows[B][pair][4 * column + 2 * i]);
          sums[i] = flushed(std::fma(a, b, sums[i]));
        }
      }
      float acc;
      std::memcpy(&acc, &file.rows[Acc][row][4 * column], sizeof(acc));
      acc = flushed(acc + flushed(sums[0] + sums[1]));
      std::memcpy(&file.rows[Acc][row][4 * column], &acc, sizeof(acc));
    }
  }
}

// Signed bytes of A times unsigned ones of B, in int32.
template <int Acc, int A, int B>
__attribute__((noinline)) void multiply_byte_tiles() {
  TileFile& file = tile_file();
  for (int row = 0; row < file.shapes.row_counts[Acc]; ++row) {
    for (int column = 0; column < 16; ++column) {
      int32_t acc;
      std::memcpy(&acc, &file.rows[Acc][row][4 * column], sizeof(acc));
      for (int quad = 0; quad < 16; ++quad) {
        for (int i = 0; i < 4; ++i) {
          acc += (int8_t)file.rows[A][row][4 * quad + i] * file.rows[B][quad][4 * column + i];
        }
      }
      std::memcpy(&file.rows[Acc][row][4 * column], &acc, sizeof(acc));
    }
  }
}

}  // namespace moeq::cpu::MOEQ_ISA
