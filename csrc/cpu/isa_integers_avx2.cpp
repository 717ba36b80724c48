// Integer products by AVX2; compiled with the flags of this instruction set only (setup.py).
#define MOEQ_ISA integers_avx2
#include "integers_avx2.h"
#include "integer_dot.h"
#include "integers.h"

namespace moeq::cpu {

Dot avx2_integer_dot(const DotKey& key) { return MOEQ_ISA::find_integer_dot(key); }

}  // namespace moeq::cpu
