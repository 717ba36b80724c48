// Sixteen consecutive elements as fp32, through 16-byte loads.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace moeq {

// Element types by storage: the kernels need their bits only, so no framework type enters device code.
struct Float32 {
  static constexpr int kPerLoad = 4;
  __device__ static void widen(uint4 raw, float* values) {
    values[0] = __uint_as_float(raw.x);
    values[1] = __uint_as_float(raw.y);
    values[2] = __uint_as_float(raw.z);
    values[3] = __uint_as_float(raw.w);
  }
};

// A bf16 number is the upper half of its fp32 number.
struct Bfloat16 {
  static constexpr int kPerLoad = 8;
  __device__ static void widen(uint4 raw, float* values) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};

struct Float16 {
  static constexpr int kPerLoad = 8;
  __device__ static void widen(uint4 raw, float* values) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2_raw pair{static_cast<unsigned short>(words[i] & 0xffffu),
                             static_cast<unsigned short>(words[i] >> 16)};
      const float2 wide = __half22float2(__half2(pair));
      values[2 * i] = wide.x;
      values[2 * i + 1] = wide.y;
    }
  }
};

// `source` is 16-byte aligned. All loads are issued before the first value is used.
template <typename Element>
__device__ __forceinline__ void load16(const uint4* __restrict__ source, float (&values)[16]) {
  constexpr int kLoads = 16 / Element::kPerLoad;
  uint4 raw[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    raw[i] = __ldg(source + i);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    Element::widen(raw[i], values + i * Element::kPerLoad);
  }
}

}  // namespace moeq
