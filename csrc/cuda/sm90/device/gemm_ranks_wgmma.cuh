// The tensor cores' part of adapters: a branch over the widths of a tile of tokens, as gemm_wgmma.cuh has it.
#pragma once
#include <cstdint>

#include "wgmma_operands.h"

namespace moeq::sm90 {

// The upper word of the operand's description: atoms of 512 bytes one after another, swizzled over 64 bytes.
constexpr uint32_t kRanksOperandHigh = 2u << 30 | 512 / 16;

// clang-format off
#define MOEQ_TWICE(width, a)                                                                               \
  "w" #width ": wgmma.fence.sync.aligned; "                                                                \
  "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.bf16.bf16 {" MOEQ_D##width "}, " a ", b0, 1, 1, 1, 0; " \
  "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.bf16.bf16 {" MOEQ_D##width "}, " a ", b1, 1, 1, 1, 0; " \
  "wgmma.commit_group.sync.aligned; bra.uni done; "
#define MOEQ_TWICE_OF(base, index, high, labels, widths)                                                   \
  "{ .reg .b64 b0, b1; .reg .b32 low; mov.b64 b0, {" base ", " high "}; "                                  \
  "add.u32 low, " base ", 2; mov.b64 b1, {low, " high "}; "                                                \
  "targets: .branchtargets " labels "; brx.idx.uni " index ", targets; "                                   \
  widths "done: wgmma.wait_group.sync.aligned 0; }"

// d[64 rows, tokens] += a[64, 16] * (b[16, tokens] + c[16, tokens]) for 8 * (index + 1) tokens: bfloat16 with float32
// sums, a in registers; in shared memory rows of 64 bytes with b and c side by side (their address / 16; swizzled, see
// kRanksOperandHigh). Returns when all products are there, also those begun before.
template <int max_width>
__device__ __forceinline__ void multiply_ranks(float* d, const uint32_t (&a)[4], uint32_t b, int index);

template <>
__device__ __forceinline__ void multiply_ranks<32>(float* d, const uint32_t (&a)[4], uint32_t b, int index) {
  asm volatile(
    MOEQ_TWICE_OF("%20", "%21", "%22", MOEQ_LABELS_32, MOEQ_TO_32(MOEQ_TWICE, "{%16, %17, %18, %19}"))
    : MOEQ_OUT16(0)
    : MOEQ_IN4(a), "r"(b), "r"(index), "r"(kRanksOperandHigh) : "memory");
}

template <>
__device__ __forceinline__ void multiply_ranks<96>(float* d, const uint32_t (&a)[4], uint32_t b, int index) {
  asm volatile(
    MOEQ_TWICE_OF("%52", "%53", "%54", MOEQ_LABELS_96, MOEQ_TO_96(MOEQ_TWICE, "{%48, %49, %50, %51}"))
    : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32)
    : MOEQ_IN4(a), "r"(b), "r"(index), "r"(kRanksOperandHigh) : "memory");
}

template <>
__device__ __forceinline__ void multiply_ranks<160>(float* d, const uint32_t (&a)[4], uint32_t b, int index) {
  asm volatile(
    MOEQ_TWICE_OF("%84", "%85", "%86", MOEQ_LABELS_160, MOEQ_TO_160(MOEQ_TWICE, "{%80, %81, %82, %83}"))
    : MOEQ_OUT64(0), MOEQ_OUT16(64)
    : MOEQ_IN4(a), "r"(b), "r"(index), "r"(kRanksOperandHigh) : "memory");
}

#undef MOEQ_TWICE_OF
#undef MOEQ_TWICE
// clang-format on

}  // namespace moeq::sm90
