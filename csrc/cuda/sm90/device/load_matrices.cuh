// Fragments of matrices from shared memory.
#pragma once
#include <cstdint>

namespace moeq::sm90 {

// Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8 and gets of each the two
// values 2 * (l % 4) of row l / 4. Volatile: it must not move across the barriers that say when the bytes are there.
__device__ __forceinline__ uint4 load_matrices(uint32_t address) {
  uint4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
               : "r"(address)
               : "memory");
  return m;
}

}  // namespace moeq::sm90
