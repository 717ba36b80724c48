// Compiled with the flags of this instruction set only (setup.py). Everything that it includes lives
// in its own namespace, so that the linker cannot hand its code to a machine that lacks them.
#define MOEQ_ISA avx2
#include "simd_avx2.h"
#include "table.h"

namespace moeq::cpu {

const IsaTable& avx2_table() {
  static const IsaTable table = MOEQ_ISA::make_table("avx2");
  return table;
}

}  // namespace moeq::cpu
