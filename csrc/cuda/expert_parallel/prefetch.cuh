// What is read after an exchange, weights whose place is known before it, on its way into the L2 meanwhile.
#pragma once
#include <cstdint>

namespace moeq::ep {

struct Soon {
  static constexpr int kParts = 2;
  const uint8_t* parts[kParts];
  int64_t bytes[kParts];  // multiples of 16; 0: nothing
};

// By all threads of a launch; nothing waits for it.
__device__ __forceinline__ void prefetch(const Soon& soon) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int64_t kPiece = 8192;
  const int64_t step = int64_t{gridDim.x} * blockDim.x * kPiece;
  // Neighbouring pieces by different blocks.
  const int64_t first = (int64_t{threadIdx.x} * gridDim.x + blockIdx.x) * kPiece;
#pragma unroll
  for (int part = 0; part < Soon::kParts; ++part) {
    for (int64_t at = first; at < soon.bytes[part]; at += step) {
      const int64_t left = soon.bytes[part] - at;
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(soon.parts[part] + at),
                   "r"(static_cast<uint32_t>(left < kPiece ? left : kPiece))
                   : "memory");
    }
  }
#endif
}

}  // namespace moeq::ep
