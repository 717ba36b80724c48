// Integer products by AVX-512 VNNI; compiled with the flags of this instruction set only (setup.py).
#define MOEQ_ISA integers_avx512vnni
#define MOEQ_VNNI
#include "integers_avx512.h"
#include "integer_dot.h"
#include "integers.h"

namespace moeq::cpu {

Dot avx512vnni_integer_dot(const DotKey& key) { return MOEQ_ISA::find_integer_dot(key); }

}  // namespace moeq::cpu
