// Compiled with the flags of this instruction set only (setup.py). Its tiles serve operands in bf16; all else is that
// of avx512bf16.
#define MOEQ_ISA amx
#define MOEQ_BF16
#define MOEQ_TILES
#include "simd_avx512.h"
#include "tiles_amx.h"
#include "tile_table.h"

namespace moeq::cpu {

const IsaTable& amx_table() {
  static const IsaTable table = MOEQ_ISA::make_tile_table(
      "amx", avx512bf16_table(), [](const DotKey& key) { return MOEQ_ISA::find_tile_dot(key, avx512bf16_table()); });
  return table;
}

}  // namespace moeq::cpu
