// Tile registers of AMX: eight, each up to 16 rows of 64 bytes. Written as assembly because the compiler's own
// intrinsics do not tell it which memory they read and write.
#pragma once

#include "vec.h"

namespace moeq::cpu::MOEQ_ISA {

constexpr int64_t kTileBytes = 1024;

// Palette 1, as LDTILECFG reads it.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  MOEQ_INLINE void set(int tile, int row_count) {
    rows[tile] = static_cast<uint8_t>(row_count);
    row_bytes[tile] = row_count > 0 ? 64 : 0;
  }
};
static_assert(sizeof(TileShapes) == 64, "LDTILECFG reads 64 bytes");

// Gives the tiles their shapes, and zeros all of them.
MOEQ_INLINE void configure(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }
MOEQ_INLINE void release_tiles() { __asm__ volatile("tilerelease"); }

template <int Tile>
MOEQ_INLINE void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
template <int Tile>
MOEQ_INLINE void load_tile(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
MOEQ_INLINE void store_tile(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(Tile) : "memory");
}
// Acc [rows, 16] float32 += A [rows, 16 pairs] times B [16 pairs, 16 columns] of bf16.
template <int Acc, int A, int B>
MOEQ_INLINE void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Acc), "i"(A), "i"(B));
}
// Acc [rows, 16] int32 += A [rows, 16 quads] of signed bytes times B [16 quads, 16 columns] of unsigned ones.
template <int Acc, int A, int B>
MOEQ_INLINE void multiply_byte_tiles() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Acc), "i"(A), "i"(B));
}

}  // namespace moeq::cpu::MOEQ_ISA
