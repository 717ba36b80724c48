// Integer products on any machine.
#define MOEQ_ISA integers_portable
#include "integers_portable.h"
#include "integer_dot.h"
#include "integers.h"

namespace moeq::cpu {

Dot portable_integer_dot(const DotKey& key) { return MOEQ_ISA::find_integer_dot(key); }

}  // namespace moeq::cpu
