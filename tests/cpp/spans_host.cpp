// The spans of K in which integer products are summed, behind a C interface.
#include "../../csrc/cpu/integer_spans.h"

extern "C" {

// Writes begin, end and group of each span; returns how many there are.
int spans(int64_t units, int64_t group_units, int64_t* out) {
  using namespace moeq::cpu;
  int count = 0;
  for (Span span = first_span(units, group_units); span.begin < units; span = next_span(span, units, group_units)) {
    *out++ = span.begin;
    *out++ = span.end;
    *out++ = span.group;
    ++count;
  }
  return count;
}

int number_of_spans(int64_t units, int64_t group_units) {
  return static_cast<int>(moeq::cpu::spans_of(units, group_units));
}
}
