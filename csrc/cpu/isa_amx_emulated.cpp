// The tiles of AMX in software, on top of avx2: for tests, never chosen by itself.
#define MOEQ_ISA amx_emulated
#define MOEQ_TILES
#include "simd_avx2.h"
#include "tiles_emulated.h"
#include "tile_table.h"

namespace moeq::cpu {

const IsaTable& amx_emulated_table() {
  static const IsaTable table = MOEQ_ISA::make_tile_table(
      "amx_emulated", avx2_table(), [](const DotKey& key) { return MOEQ_ISA::find_tile_dot(key, avx2_table()); });
  return table;
}

}  // namespace moeq::cpu
