// Integer products by AVX-VNNI; compiled with the flags of this instruction set only (setup.py).
#define MOEQ_ISA integers_avxvnni
#define MOEQ_VNNI
#include "integers_avx2.h"
#include "integer_dot.h"
#include "integers.h"

namespace moeq::cpu {

Dot avxvnni_integer_dot(const DotKey& key) { return MOEQ_ISA::find_integer_dot(key); }

}  // namespace moeq::cpu
