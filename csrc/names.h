// Enums by the names that Python gives them. No include: kernels that are compiled for other instruction sets read
// this.
#pragma once

namespace moeq {

// Of each enum that has names (csrc/generated): kAll, in the enum's order.
template <class Enum>
struct Names;

// Returns false where the name is unknown.
template <class Enum, class String>
bool parse(const String& name, Enum& value) {
  int number = 0;
  for (const char* known : Names<Enum>::kAll) {
    if (name == known) {
      value = static_cast<Enum>(number);
      return true;
    }
    ++number;
  }
  return false;
}

}  // namespace moeq
