// Units of K whose products with int8 activations are summed in int32: those of one group of weights, and of a long
// group, as that of a whole row may be, no more than int32 is sure to hold.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moeq::cpu {

constexpr int64_t kSpanUnits = 4096;
static_assert(kSpanUnits * 16 * 255 * 128 <= INT32_MAX, "a code less its zero point, times an element");

struct Span {
  int64_t begin;
  int64_t end;
  int64_t group;  // of weights, that it lies in
};

inline int64_t spans_of(int64_t units, int64_t group_units) {
  const int64_t of_group = (group_units + kSpanUnits - 1) / kSpanUnits;
  const int64_t rest = units % group_units;
  return units / group_units * of_group + (rest + kSpanUnits - 1) / kSpanUnits;
}

inline Span first_span(int64_t units, int64_t group_units) {
  return {0, std::min(kSpanUnits, std::min(group_units, units)), 0};
}

inline Span next_span(const Span& span, int64_t units, int64_t group_units) {
  const int64_t group_end = (span.group + 1) * group_units;
  const int64_t group = span.end < group_end ? span.group : span.group + 1;
  const int64_t end = std::min(span.end + kSpanUnits, std::min((group + 1) * group_units, units));
  return {span.end, end, group};
}

}  // namespace moeq::cpu
