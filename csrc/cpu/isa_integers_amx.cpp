// Integer products by AMX-INT8 tiles, and few rows by AVX-512 VNNI; compiled with the flags of this instruction set
// only (setup.py).
#define MOEQ_ISA integers_amx
#define MOEQ_VNNI
#define MOEQ_TILES
#include "integers_avx512.h"
#include "tiles_amx.h"
#include "integer_tiles.h"
#include "integers.h"

namespace moeq::cpu {
namespace {

// One product of two tiles of bytes, all of them different enough to tell rows, columns and signs apart.
bool tiles_multiply_bytes() {
  using namespace MOEQ_ISA;
  alignas(64) int8_t rows[kTileRows][64];
  alignas(64) uint8_t weights[16][16][4];
  alignas(64) int32_t found[kTileRows][16];
  for (int row = 0; row < 16; ++row) {
    for (int i = 0; i < 64; ++i) {
      rows[row][i] = static_cast<int8_t>(row * 37 + i * 11 - 128);
      weights[row][i / 4][i % 4] = static_cast<uint8_t>(row * 29 + i * 53);
    }
  }
  configure_rows(kTileRows);
  using Registers = TileSums<1, 1, ByteProducts>;
  const uint8_t* const tiles[1] = {&weights[0][0][0]};
  int32_t* const sums[1] = {&found[0][0]};
  Registers::zero();
  Registers::add(tiles, reinterpret_cast<const uint8_t*>(rows), 64);
  Registers::store(sums);
  release_tiles();
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      int32_t sum = 0;
      for (int k = 0; k < 64; ++k) sum += rows[row][k] * weights[k / 4][column][k % 4];
      if (found[row][column] != sum) return false;
    }
  }
  return true;
}

}  // namespace

// Asked once: what tiles of bytes do is compared with plain integers before they are used.
bool amx_multiplies_bytes() {
  static const bool right = tiles_multiply_bytes();
  return right;
}

Dot amx_integer_dot(const DotKey& key) { return MOEQ_ISA::find_integer_dot(key); }

}  // namespace moeq::cpu
