// A place in a ring of stages and the parity of the round.
#pragma once
#include <cstdint>

namespace moeq::sm90 {

template <int size>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == size) {
      slot = 0;
      parity ^= 1;
    }
  }
};

}  // namespace moeq::sm90
