// The same with tiles in software, on top of AVX2: for tests, never chosen by itself.
#define MOEQ_ISA integers_amx_emulated
#define MOEQ_TILES
#include "integers_avx2.h"
#include "tiles_emulated.h"
#include "integer_tiles.h"
#include "integers.h"

namespace moeq::cpu {

Dot amx_emulated_integer_dot(const DotKey& key) { return MOEQ_ISA::find_integer_dot(key); }

}  // namespace moeq::cpu
