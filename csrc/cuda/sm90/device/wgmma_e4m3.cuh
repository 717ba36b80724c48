// The fp8 multiplications of the tensor cores: d[64 rows, tokens] = a[64, 128] * b[128, tokens], in e4m3 with float32
// sums, asynchronous, the last of four steps of 32 in K in a group of its own.
//
// a: four registers a step, or in shared memory; b: in shared memory (K-major, swizzled over 128 bytes). `index`
// chooses the number of tokens. The branch is inside the assembly because the compiler gives the accumulators of each
// instruction that it sees registers of their own.
#pragma once
#include <cstdint>

#include "wgmma_bf16.cuh"

namespace moeq::sm90::w4a8 {

// clang-format off
#define MOEQ_STEP(width, a, b, add)                                                                       \
  "wgmma.mma_async.sync.aligned.m64n" #width "k32.f32.e4m3.e4m3 {" MOEQ_D##width "}, " a ", " b ", " add ", 1, 1; "
#define MOEQ_STEP_OF_SECOND(a, b, add)                                                                    \
  "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%8, %9, %10, %11, %12, %13, %14, %15}, " a ", " b ", " add ", 1, 1; "
#define MOEQ_COMMIT "wgmma.commit_group.sync.aligned; "
#define MOEQ_TILE(width, a0, a1, a2, a3)                                                                  \
  "w" #width ": wgmma.fence.sync.aligned; "                                                               \
  MOEQ_STEP(width, a0, "b0", "add") MOEQ_STEP(width, a1, "b1", "1") MOEQ_STEP(width, a2, "b2", "1") MOEQ_COMMIT \
  MOEQ_STEP(width, a3, "b3", "1") MOEQ_COMMIT "bra.uni done; "

// Tokens of one instruction: a tile of up to 160 takes one a step, a wider one two.
#define MOEQ_SINGLE_NAMES "w16, w32, w48, w64, w80, w96, w104, w112, w120, w128, w136, w144, w152, w160"
#define MOEQ_SINGLE(...)                                                                                  \
  MOEQ_TILE(16, __VA_ARGS__) MOEQ_TILE(32, __VA_ARGS__) MOEQ_TILE(48, __VA_ARGS__) MOEQ_TILE(64, __VA_ARGS__)    \
  MOEQ_TILE(80, __VA_ARGS__) MOEQ_TILE(96, __VA_ARGS__) MOEQ_TILE(104, __VA_ARGS__) MOEQ_TILE(112, __VA_ARGS__)  \
  MOEQ_TILE(120, __VA_ARGS__) MOEQ_TILE(128, __VA_ARGS__) MOEQ_TILE(136, __VA_ARGS__) MOEQ_TILE(144, __VA_ARGS__) \
  MOEQ_TILE(152, __VA_ARGS__) MOEQ_TILE(160, __VA_ARGS__)
#define MOEQ_SHORT_NAMES "w8, w16, w24, w32, w40, w48, w56, w64, w72"
#define MOEQ_SHORT(...)                                                                                   \
  MOEQ_TILE(8, __VA_ARGS__) MOEQ_TILE(16, __VA_ARGS__) MOEQ_TILE(24, __VA_ARGS__) MOEQ_TILE(32, __VA_ARGS__)     \
  MOEQ_TILE(40, __VA_ARGS__) MOEQ_TILE(48, __VA_ARGS__) MOEQ_TILE(56, __VA_ARGS__) MOEQ_TILE(64, __VA_ARGS__)    \
  MOEQ_TILE(72, __VA_ARGS__)
#define MOEQ_HALF_NAMES "w88, w96, w104, w112, w120, w128"
#define MOEQ_HALF(...)                                                                                    \
  MOEQ_TILE(88, __VA_ARGS__) MOEQ_TILE(96, __VA_ARGS__) MOEQ_TILE(104, __VA_ARGS__) MOEQ_TILE(112, __VA_ARGS__)  \
  MOEQ_TILE(120, __VA_ARGS__) MOEQ_TILE(128, __VA_ARGS__)

// `add` is never true, which the compiler must not know: results that nothing is added to would get registers of their
// own.
#define MOEQ_BEGIN(b, index, names)                                                                       \
  "{ .reg .b64 a1, a2, a3, b0, b1, b2, b3; .reg .pred add; setp.lt.s32 add, " index ", 0; "               \
  "mov.b64 b0, " b "; add.s64 b1, " b ", 2; add.s64 b2, " b ", 4; add.s64 b3, " b ", 6; "                 \
  "targets: .branchtargets " names "; "
#define MOEQ_BRANCH(index) "brx.idx.uni " index ", targets; "
#define MOEQ_END "done: }"
// A descriptor of weights in shared memory, and those of its later steps.
#define MOEQ_SHARED(a) "add.s64 a1, " a ", 2; add.s64 a2, " a ", 4; add.s64 a3, " a ", 6; "

__device__ __forceinline__ void multiply_single(float (&d)[80], const uint32_t (*a)[4], uint64_t b, int index) {
  asm volatile(
    MOEQ_BEGIN("%96", "%97", MOEQ_SINGLE_NAMES) MOEQ_BRANCH("%97")
    MOEQ_SINGLE("{%80, %81, %82, %83}", "{%84, %85, %86, %87}", "{%88, %89, %90, %91}", "{%92, %93, %94, %95}") MOEQ_END
    : MOEQ_OUT64(0), MOEQ_OUT16(64) : MOEQ_IN16(a), "l"(b), "r"(index));
}

__device__ __forceinline__ void multiply_half(float (&d)[64], const uint32_t (*a)[4], uint64_t b, int index) {
  asm volatile(
    MOEQ_BEGIN("%80", "%81", MOEQ_HALF_NAMES) MOEQ_BRANCH("%81")
    MOEQ_HALF("{%64, %65, %66, %67}", "{%68, %69, %70, %71}", "{%72, %73, %74, %75}", "{%76, %77, %78, %79}") MOEQ_END
    : MOEQ_OUT64(0) : MOEQ_IN16(a), "l"(b), "r"(index));
}

// Up to 72 tokens.
__device__ __forceinline__ void multiply_short(float (&d)[36], const uint32_t (*a)[4], uint64_t b, int index) {
  asm volatile(
    MOEQ_BEGIN("%52", "%53", MOEQ_SHORT_NAMES) MOEQ_BRANCH("%53")
    MOEQ_SHORT("{%36, %37, %38, %39}", "{%40, %41, %42, %43}", "{%44, %45, %46, %47}", "{%48, %49, %50, %51}") MOEQ_END
    : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT4(32) : MOEQ_IN16(a), "l"(b), "r"(index));
}

// Of as many tokens as the compiler knows, so that no step looks for its instruction, and all steps one group.
template <int tokens>
struct KnownProduct;

#define MOEQ_PLAIN(...) __VA_ARGS__
#define MOEQ_KNOWN(width, outs, a0, a1, a2, a3, b0, b1, b2, b3)                                           \
  template <>                                                                                             \
  struct KnownProduct<width> {                                                                            \
    static __device__ __forceinline__ void start(float (&d)[width / 2], const uint32_t (*a)[4], uint64_t b) { \
      asm volatile("wgmma.fence.sync.aligned; "                                                           \
        MOEQ_STEP(width, a0, b0, "0") MOEQ_STEP(width, a1, b1, "1") MOEQ_STEP(width, a2, b2, "1")         \
        MOEQ_STEP(width, a3, b3, "1") MOEQ_COMMIT                                                         \
        : MOEQ_PLAIN outs : MOEQ_IN16(a), "l"(b), "l"(b + 2), "l"(b + 4), "l"(b + 6) : "memory");         \
    }                                                                                                     \
  };
MOEQ_KNOWN(16, (MOEQ_OUT4(0), MOEQ_OUT4(4)), "{%8, %9, %10, %11}", "{%12, %13, %14, %15}",
           "{%16, %17, %18, %19}", "{%20, %21, %22, %23}", "%24", "%25", "%26", "%27")
MOEQ_KNOWN(32, (MOEQ_OUT16(0)), "{%16, %17, %18, %19}", "{%20, %21, %22, %23}",
           "{%24, %25, %26, %27}", "{%28, %29, %30, %31}", "%32", "%33", "%34", "%35")
MOEQ_KNOWN(48, (MOEQ_OUT16(0), MOEQ_OUT4(16), MOEQ_OUT4(20)), "{%24, %25, %26, %27}", "{%28, %29, %30, %31}",
           "{%32, %33, %34, %35}", "{%36, %37, %38, %39}", "%40", "%41", "%42", "%43")
MOEQ_KNOWN(64, (MOEQ_OUT16(0), MOEQ_OUT16(16)), "{%32, %33, %34, %35}", "{%36, %37, %38, %39}",
           "{%40, %41, %42, %43}", "{%44, %45, %46, %47}", "%48", "%49", "%50", "%51")
MOEQ_KNOWN(80, (MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT4(32), MOEQ_OUT4(36)), "{%40, %41, %42, %43}", "{%44, %45, %46, %47}",
           "{%48, %49, %50, %51}", "{%52, %53, %54, %55}", "%56", "%57", "%58", "%59")
MOEQ_KNOWN(88, (MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT4(32), MOEQ_OUT4(36), MOEQ_OUT4(40)), "{%44, %45, %46, %47}", "{%48, %49, %50, %51}",
           "{%52, %53, %54, %55}", "{%56, %57, %58, %59}", "%60", "%61", "%62", "%63")
MOEQ_KNOWN(96, (MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32)), "{%48, %49, %50, %51}", "{%52, %53, %54, %55}",
           "{%56, %57, %58, %59}", "{%60, %61, %62, %63}", "%64", "%65", "%66", "%67")
MOEQ_KNOWN(104, (MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32), MOEQ_OUT4(48)), "{%52, %53, %54, %55}", "{%56, %57, %58, %59}",
           "{%60, %61, %62, %63}", "{%64, %65, %66, %67}", "%68", "%69", "%70", "%71")
MOEQ_KNOWN(112, (MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32), MOEQ_OUT4(48), MOEQ_OUT4(52)), "{%56, %57, %58, %59}", "{%60, %61, %62, %63}",
           "{%64, %65, %66, %67}", "{%68, %69, %70, %71}", "%72", "%73", "%74", "%75")
MOEQ_KNOWN(120, (MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32), MOEQ_OUT4(48), MOEQ_OUT4(52), MOEQ_OUT4(56)), "{%60, %61, %62, %63}", "{%64, %65, %66, %67}",
           "{%68, %69, %70, %71}", "{%72, %73, %74, %75}", "%76", "%77", "%78", "%79")
MOEQ_KNOWN(128, (MOEQ_OUT64(0)), "{%64, %65, %66, %67}", "{%68, %69, %70, %71}",
           "{%72, %73, %74, %75}", "{%76, %77, %78, %79}", "%80", "%81", "%82", "%83")
MOEQ_KNOWN(136, (MOEQ_OUT64(0), MOEQ_OUT4(64)), "{%68, %69, %70, %71}", "{%72, %73, %74, %75}",
           "{%76, %77, %78, %79}", "{%80, %81, %82, %83}", "%84", "%85", "%86", "%87")
MOEQ_KNOWN(144, (MOEQ_OUT64(0), MOEQ_OUT4(64), MOEQ_OUT4(68)), "{%72, %73, %74, %75}", "{%76, %77, %78, %79}",
           "{%80, %81, %82, %83}", "{%84, %85, %86, %87}", "%88", "%89", "%90", "%91")
MOEQ_KNOWN(152, (MOEQ_OUT64(0), MOEQ_OUT4(64), MOEQ_OUT4(68), MOEQ_OUT4(72)), "{%76, %77, %78, %79}", "{%80, %81, %82, %83}",
           "{%84, %85, %86, %87}", "{%88, %89, %90, %91}", "%92", "%93", "%94", "%95")
MOEQ_KNOWN(160, (MOEQ_OUT64(0), MOEQ_OUT16(64)), "{%80, %81, %82, %83}", "{%84, %85, %86, %87}",
           "{%88, %89, %90, %91}", "{%92, %93, %94, %95}", "%96", "%97", "%98", "%99")
#undef MOEQ_KNOWN
#undef MOEQ_PLAIN

__device__ __forceinline__ void multiply_single(float (&d)[80], uint64_t a, uint64_t b, int index) {
  asm volatile(
    MOEQ_BEGIN("%81", "%82", MOEQ_SINGLE_NAMES) MOEQ_SHARED("%80") MOEQ_BRANCH("%82")
    MOEQ_SINGLE("%80", "a1", "a2", "a3") MOEQ_END
    : MOEQ_OUT64(0), MOEQ_OUT16(64) : "l"(a), "l"(b), "r"(index));
}

__device__ __forceinline__ void multiply_half(float (&d)[64], uint64_t a, uint64_t b, int index) {
  asm volatile(
    MOEQ_BEGIN("%65", "%66", MOEQ_HALF_NAMES) MOEQ_SHARED("%64") MOEQ_BRANCH("%66")
    MOEQ_HALF("%64", "a1", "a2", "a3") MOEQ_END
    : MOEQ_OUT64(0) : "l"(a), "l"(b), "r"(index));
}

// 128 columns of `b`; both factors in shared memory. never: negative at no time, which the compiler must not know.
__device__ __forceinline__ void multiply_128(float (&d)[64], uint64_t a, uint64_t b, int never) {
  asm volatile(
    "{ .reg .b64 a1, a2, a3, b1, b2, b3; .reg .pred add; setp.lt.s32 add, %66, 0; "
    "add.s64 b1, %65, 2; add.s64 b2, %65, 4; add.s64 b3, %65, 6; "
    MOEQ_SHARED("%64") "wgmma.fence.sync.aligned; "
    MOEQ_STEP(128, "%64", "%65", "add") MOEQ_STEP(128, "a1", "b1", "1") MOEQ_STEP(128, "a2", "b2", "1")
    MOEQ_STEP(128, "a3", "b3", "1") MOEQ_COMMIT "}"
    : MOEQ_OUT64(0) : "l"(a), "l"(b), "r"(never));
}

// Two times 64 rows of `a`, `second` the next ones, by 16 columns: d[0] to d[7] and d[8] to d[15].
__device__ __forceinline__ void multiply_two_16(float (&d)[16], uint64_t a, uint64_t second, uint64_t b, int never) {
  asm volatile(
    "{ .reg .b64 a1, a2, a3, c1, c2, c3, b1, b2, b3; .reg .pred add; setp.lt.s32 add, %19, 0; "
    "add.s64 b1, %18, 2; add.s64 b2, %18, 4; add.s64 b3, %18, 6; "
    "add.s64 c1, %17, 2; add.s64 c2, %17, 4; add.s64 c3, %17, 6; "
    MOEQ_SHARED("%16") "wgmma.fence.sync.aligned; "
    MOEQ_STEP(16, "%16", "%18", "add") MOEQ_STEP_OF_SECOND("%17", "%18", "add")
    MOEQ_STEP(16, "a1", "b1", "1") MOEQ_STEP_OF_SECOND("c1", "b1", "1")
    MOEQ_STEP(16, "a2", "b2", "1") MOEQ_STEP_OF_SECOND("c2", "b2", "1")
    MOEQ_STEP(16, "a3", "b3", "1") MOEQ_STEP_OF_SECOND("c3", "b3", "1") MOEQ_COMMIT "}"
    : MOEQ_OUT16(0) : "l"(a), "l"(second), "l"(b), "r"(never));
}

#undef MOEQ_STEP_OF_SECOND
#undef MOEQ_SHARED
#undef MOEQ_END
#undef MOEQ_BRANCH
#undef MOEQ_BEGIN
#undef MOEQ_SHORT
#undef MOEQ_SHORT_NAMES
#undef MOEQ_HALF
#undef MOEQ_HALF_NAMES
#undef MOEQ_SINGLE
#undef MOEQ_SINGLE_NAMES
#undef MOEQ_TILE
#undef MOEQ_COMMIT
#undef MOEQ_STEP
// clang-format on

}  // namespace moeq::sm90::w4a8
