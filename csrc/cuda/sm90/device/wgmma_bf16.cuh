// The tensor cores' products of bfloat16, and of float16 for weights of 8 bits and NVFP4: K-steps of weights in
// registers or in shared memory, and those of adapters, each with a branch over the widths of a tile of tokens.
#pragma once
#include <cstdint>

// clang-format off
// The accumulators of so many tokens, from operand 0 on; those of a second tile of 64 rows beside a first one of up to
// 32 and up to 192 tokens.
#define MOEQ_D8 "%0, %1, %2, %3"
#define MOEQ_D16 MOEQ_D8 ", %4, %5, %6, %7"
#define MOEQ_D24 MOEQ_D16 ", %8, %9, %10, %11"
#define MOEQ_D32 MOEQ_D24 ", %12, %13, %14, %15"
#define MOEQ_D40 MOEQ_D32 ", %16, %17, %18, %19"
#define MOEQ_D48 MOEQ_D40 ", %20, %21, %22, %23"
#define MOEQ_D56 MOEQ_D48 ", %24, %25, %26, %27"
#define MOEQ_D64 MOEQ_D56 ", %28, %29, %30, %31"
#define MOEQ_D72 MOEQ_D64 ", %32, %33, %34, %35"
#define MOEQ_D80 MOEQ_D72 ", %36, %37, %38, %39"
#define MOEQ_D88 MOEQ_D80 ", %40, %41, %42, %43"
#define MOEQ_D96 MOEQ_D88 ", %44, %45, %46, %47"
#define MOEQ_D104 MOEQ_D96 ", %48, %49, %50, %51"
#define MOEQ_D112 MOEQ_D104 ", %52, %53, %54, %55"
#define MOEQ_D120 MOEQ_D112 ", %56, %57, %58, %59"
#define MOEQ_D128 MOEQ_D120 ", %60, %61, %62, %63"
#define MOEQ_D136 MOEQ_D128 ", %64, %65, %66, %67"
#define MOEQ_D144 MOEQ_D136 ", %68, %69, %70, %71"
#define MOEQ_D152 MOEQ_D144 ", %72, %73, %74, %75"
#define MOEQ_D160 MOEQ_D152 ", %76, %77, %78, %79"
#define MOEQ_D168 MOEQ_D160 ", %80, %81, %82, %83"
#define MOEQ_D176 MOEQ_D168 ", %84, %85, %86, %87"
#define MOEQ_D184 MOEQ_D176 ", %88, %89, %90, %91"
#define MOEQ_D192 MOEQ_D184 ", %92, %93, %94, %95"
#define MOEQ_NEXT_OF_32_8 "%16, %17, %18, %19"
#define MOEQ_NEXT_OF_32_16 MOEQ_NEXT_OF_32_8 ", %20, %21, %22, %23"
#define MOEQ_NEXT_OF_32_24 MOEQ_NEXT_OF_32_16 ", %24, %25, %26, %27"
#define MOEQ_NEXT_OF_32_32 MOEQ_NEXT_OF_32_24 ", %28, %29, %30, %31"
#define MOEQ_NEXT_OF_192_8 "%96, %97, %98, %99"
#define MOEQ_NEXT_OF_192_16 MOEQ_NEXT_OF_192_8 ", %100, %101, %102, %103"
#define MOEQ_NEXT_OF_192_24 MOEQ_NEXT_OF_192_16 ", %104, %105, %106, %107"
#define MOEQ_NEXT_OF_192_32 MOEQ_NEXT_OF_192_24 ", %108, %109, %110, %111"
#define MOEQ_NEXT_OF_192_40 MOEQ_NEXT_OF_192_32 ", %112, %113, %114, %115"
#define MOEQ_NEXT_OF_192_48 MOEQ_NEXT_OF_192_40 ", %116, %117, %118, %119"
#define MOEQ_NEXT_OF_192_56 MOEQ_NEXT_OF_192_48 ", %120, %121, %122, %123"
#define MOEQ_NEXT_OF_192_64 MOEQ_NEXT_OF_192_56 ", %124, %125, %126, %127"
#define MOEQ_NEXT_OF_192_72 MOEQ_NEXT_OF_192_64 ", %128, %129, %130, %131"
#define MOEQ_NEXT_OF_192_80 MOEQ_NEXT_OF_192_72 ", %132, %133, %134, %135"
#define MOEQ_NEXT_OF_192_88 MOEQ_NEXT_OF_192_80 ", %136, %137, %138, %139"
#define MOEQ_NEXT_OF_192_96 MOEQ_NEXT_OF_192_88 ", %140, %141, %142, %143"
#define MOEQ_NEXT_OF_192_104 MOEQ_NEXT_OF_192_96 ", %144, %145, %146, %147"
#define MOEQ_NEXT_OF_192_112 MOEQ_NEXT_OF_192_104 ", %148, %149, %150, %151"
#define MOEQ_NEXT_OF_192_120 MOEQ_NEXT_OF_192_112 ", %152, %153, %154, %155"
#define MOEQ_NEXT_OF_192_128 MOEQ_NEXT_OF_192_120 ", %156, %157, %158, %159"
#define MOEQ_NEXT_OF_192_136 MOEQ_NEXT_OF_192_128 ", %160, %161, %162, %163"
#define MOEQ_NEXT_OF_192_144 MOEQ_NEXT_OF_192_136 ", %164, %165, %166, %167"
#define MOEQ_NEXT_OF_192_152 MOEQ_NEXT_OF_192_144 ", %168, %169, %170, %171"
#define MOEQ_NEXT_OF_192_160 MOEQ_NEXT_OF_192_152 ", %172, %173, %174, %175"
#define MOEQ_NEXT_OF_192_168 MOEQ_NEXT_OF_192_160 ", %176, %177, %178, %179"
#define MOEQ_NEXT_OF_192_176 MOEQ_NEXT_OF_192_168 ", %180, %181, %182, %183"
#define MOEQ_NEXT_OF_192_184 MOEQ_NEXT_OF_192_176 ", %184, %185, %186, %187"
#define MOEQ_NEXT_OF_192_192 MOEQ_NEXT_OF_192_184 ", %188, %189, %190, %191"

// A macro for each width up to the most, and the widths' labels.
#define MOEQ_TO_32(M, ...) M(8, __VA_ARGS__) M(16, __VA_ARGS__) M(24, __VA_ARGS__) M(32, __VA_ARGS__)
#define MOEQ_TO_72(M, ...)                                                                                \
  MOEQ_TO_32(M, __VA_ARGS__) M(40, __VA_ARGS__) M(48, __VA_ARGS__) M(56, __VA_ARGS__) M(64, __VA_ARGS__)  \
  M(72, __VA_ARGS__)
#define MOEQ_TO_96(M, ...)                                                                                \
  MOEQ_TO_72(M, __VA_ARGS__) M(80, __VA_ARGS__) M(88, __VA_ARGS__) M(96, __VA_ARGS__)
#define MOEQ_TO_144(M, ...)                                                                               \
  MOEQ_TO_96(M, __VA_ARGS__) M(104, __VA_ARGS__) M(112, __VA_ARGS__) M(120, __VA_ARGS__) M(128, __VA_ARGS__) \
  M(136, __VA_ARGS__) M(144, __VA_ARGS__)
#define MOEQ_TO_160(M, ...) MOEQ_TO_144(M, __VA_ARGS__) M(152, __VA_ARGS__) M(160, __VA_ARGS__)
#define MOEQ_TO_192(M, ...)                                                                               \
  MOEQ_TO_160(M, __VA_ARGS__) M(168, __VA_ARGS__) M(176, __VA_ARGS__) M(184, __VA_ARGS__) M(192, __VA_ARGS__)
#define MOEQ_LABELS_32 "w8, w16, w24, w32"
#define MOEQ_LABELS_72 MOEQ_LABELS_32 ", w40, w48, w56, w64, w72"
#define MOEQ_LABELS_96 MOEQ_LABELS_72 ", w80, w88, w96"
#define MOEQ_LABELS_144 MOEQ_LABELS_96 ", w104, w112, w120, w128, w136, w144"
#define MOEQ_LABELS_160 MOEQ_LABELS_144 ", w152, w160"
#define MOEQ_LABELS_192 MOEQ_LABELS_160 ", w168, w176, w184, w192"

// Accumulators d[i] and on as operands.
#define MOEQ_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOEQ_OUT16(i) MOEQ_OUT4(i), MOEQ_OUT4(i + 4), MOEQ_OUT4(i + 8), MOEQ_OUT4(i + 12)
#define MOEQ_OUT64(i) MOEQ_OUT16(i), MOEQ_OUT16(i + 16), MOEQ_OUT16(i + 32), MOEQ_OUT16(i + 48)
// A step's operand in registers a[0] to a[3].
#define MOEQ_IN4(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])
#define MOEQ_IN16(a) MOEQ_IN4((a)[0]), MOEQ_IN4((a)[1]), MOEQ_IN4((a)[2]), MOEQ_IN4((a)[3])
// clang-format on

namespace moeq::sm90 {

// The tensor cores' products of bfloat16: K-steps of weights in registers or in shared memory, and those of adapters,
// each with a branch over the widths of a tile of tokens.

// The upper word of the operand's description: atoms of 1024 bytes one after another, swizzled over 128 bytes.
constexpr uint32_t kTokenOperandHigh = 1u << 30 | 1024 / 16;

// Of a product's factors. Float16 holds all values of e4m3 codes, too, and takes fewer operations to make of them.
enum class Factors { kBfloat16, kFloat16 };

// clang-format off
#define MOEQ_TYPES "bf16.bf16"   // until it is defined anew, as macros are expanded where they are used
// One product of 16 in K. `end`: what the instruction says of b's order, and of a's where it is in shared memory.
#define MOEQ_PRODUCT_ON(width, sums, a, b, adds, end) \
  "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." MOEQ_TYPES " {" sums "}, " a ", " b ", " adds ", 1, 1, " end "; "
#define MOEQ_PRODUCT(width, sums, a, b, end) MOEQ_PRODUCT_ON(width, sums, a, b, "1", end)
#define MOEQ_STEP(width, sums, a0, a1, a2, a3, b0, b1, b2, b3, end)                                        \
  MOEQ_PRODUCT(width, sums, a0, b0, end) MOEQ_PRODUCT(width, sums, a1, b1, end)                            \
  MOEQ_PRODUCT(width, sums, a2, b2, end) MOEQ_PRODUCT(width, sums, a3, b3, end)
#define MOEQ_WIDTH(width, products) \
  "w" #width ": wgmma.fence.sync.aligned; " products "wgmma.commit_group.sync.aligned; bra.uni done; "
#define MOEQ_BEGIN "{ .reg .b64 a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7; .reg .b32 low; "
#define MOEQ_DESCRIPTOR(name, base, offset, high) \
  "add.u32 low, " base ", " #offset "; mov.b64 " name ", {low, " high "}; "
#define MOEQ_TOKENS(base, high)                                                                            \
  MOEQ_DESCRIPTOR("b0", base, 0, high) MOEQ_DESCRIPTOR("b1", base, 2, high)                                \
  MOEQ_DESCRIPTOR("b2", base, 4, high) MOEQ_DESCRIPTOR("b3", base, 6, high)
// Of the next step, whose first one begins so many 16 bytes further, and so on.
#define MOEQ_NEXT_TOKENS(base, high, first, second, third, fourth)                                         \
  MOEQ_DESCRIPTOR("b4", base, first, high) MOEQ_DESCRIPTOR("b5", base, second, high)                       \
  MOEQ_DESCRIPTOR("b6", base, third, high) MOEQ_DESCRIPTOR("b7", base, fourth, high)
#define MOEQ_NEXT_TOKENS_96(base, high) MOEQ_NEXT_TOKENS(base, high, 768, 770, 772, 774)
#define MOEQ_NEXT_TOKENS_32(base, high) MOEQ_NEXT_TOKENS(base, high, 256, 258, 260, 262)
#define MOEQ_BRANCH(index, labels) "targets: .branchtargets " labels "; brx.idx.uni " index ", targets; "
#define MOEQ_END "done: }"

// d[64 rows, tokens] += a[64, 64] * b[64, tokens] for 8 * (index + 1) tokens, at most max_width: bfloat16 with float32
// sums, a in registers, b in shared memory (its address / 16; K-major, swizzled over 128 bytes, see kTokenOperandHigh).
// Asynchronous, one group. The branch is inside the assembly because the compiler gives the accumulators of each
// instruction that it sees registers of their own, and there are not enough. It also means that the compiler takes `a`
// for dead once the statement is over, while it is still read: see `keep`.
template <int max_width, Factors factors = Factors::kBfloat16>
__device__ __forceinline__ void multiply_step(float* d, const uint32_t (&a)[4][4], uint32_t b, int index);

#define MOEQ_ONE_STEP(width, ...) \
  MOEQ_WIDTH(width, MOEQ_STEP(width, MOEQ_D##width, __VA_ARGS__, "b0", "b1", "b2", "b3", "0"))

#define MOEQ_MULTIPLY_STEP_96 \
  asm volatile(                                                                                            \
    MOEQ_BEGIN MOEQ_TOKENS("%64", "%66") MOEQ_BRANCH("%65", MOEQ_LABELS_96)                                \
    MOEQ_TO_96(MOEQ_ONE_STEP, "{%48, %49, %50, %51}", "{%52, %53, %54, %55}",                              \
               "{%56, %57, %58, %59}", "{%60, %61, %62, %63}") MOEQ_END                                    \
    : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32)                                                        \
    : MOEQ_IN16(a), "r"(b), "r"(index), "r"(kTokenOperandHigh))

template <>
__device__ __forceinline__ void multiply_step<96>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_MULTIPLY_STEP_96;
}

#define MOEQ_MULTIPLY_STEP_72 \
  asm volatile(                                                                                            \
    MOEQ_BEGIN MOEQ_TOKENS("%52", "%54") MOEQ_BRANCH("%53", MOEQ_LABELS_72)                                \
    MOEQ_TO_72(MOEQ_ONE_STEP, "{%36, %37, %38, %39}", "{%40, %41, %42, %43}",                              \
               "{%44, %45, %46, %47}", "{%48, %49, %50, %51}") MOEQ_END                                    \
    : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT4(32)                                                         \
    : MOEQ_IN16(a), "r"(b), "r"(index), "r"(kTokenOperandHigh))

template <>
__device__ __forceinline__ void multiply_step<72>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_MULTIPLY_STEP_72;
}

#define MOEQ_MULTIPLY_STEP_160 \
  asm volatile(                                                                                            \
    MOEQ_BEGIN MOEQ_TOKENS("%96", "%98") MOEQ_BRANCH("%97", MOEQ_LABELS_160)                               \
    MOEQ_TO_160(MOEQ_ONE_STEP, "{%80, %81, %82, %83}", "{%84, %85, %86, %87}",                             \
                "{%88, %89, %90, %91}", "{%92, %93, %94, %95}") MOEQ_END                                   \
    : MOEQ_OUT64(0), MOEQ_OUT16(64)                                                                        \
    : MOEQ_IN16(a), "r"(b), "r"(index), "r"(kTokenOperandHigh))

template <>
__device__ __forceinline__ void multiply_step<160>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_MULTIPLY_STEP_160;
}

template <>
__device__ __forceinline__ void multiply_step<144>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  asm volatile(
    MOEQ_BEGIN MOEQ_TOKENS("%88", "%90") MOEQ_BRANCH("%89", MOEQ_LABELS_144)
    MOEQ_TO_144(MOEQ_ONE_STEP, "{%72, %73, %74, %75}", "{%76, %77, %78, %79}",
                "{%80, %81, %82, %83}", "{%84, %85, %86, %87}") MOEQ_END
    : MOEQ_OUT64(0), MOEQ_OUT4(64), MOEQ_OUT4(68)
    : MOEQ_IN16(a), "r"(b), "r"(index), "r"(kTokenOperandHigh));
}

// Two steps, the tokens of the second where a stage of tokens of max_width has them.
template <int max_width, Factors factors = Factors::kBfloat16>
__device__ __forceinline__ void multiply_two_steps(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index);

#define MOEQ_TWO_STEPS(width, a0, a1, a2, a3, ...)                                                         \
  MOEQ_WIDTH(width, MOEQ_STEP(width, MOEQ_D##width, a0, a1, a2, a3, "b0", "b1", "b2", "b3", "0")           \
                    MOEQ_STEP(width, MOEQ_D##width, __VA_ARGS__, "b4", "b5", "b6", "b7", "0"))

#define MOEQ_MULTIPLY_TWO_STEPS_96 \
  asm volatile(                                                                                            \
    MOEQ_BEGIN MOEQ_TOKENS("%80", "%82")                                                                   \
    MOEQ_NEXT_TOKENS_96("%80", "%82")                                                                      \
    MOEQ_BRANCH("%81", MOEQ_LABELS_96)                                                                     \
    MOEQ_TO_96(MOEQ_TWO_STEPS, "{%48, %49, %50, %51}", "{%52, %53, %54, %55}",                             \
               "{%56, %57, %58, %59}", "{%60, %61, %62, %63}",                                             \
               "{%64, %65, %66, %67}", "{%68, %69, %70, %71}", "{%72, %73, %74, %75}", "{%76, %77, %78, %79}") MOEQ_END \
    : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32)                                                        \
    : MOEQ_IN16(a[0]), MOEQ_IN16(a[1]), "r"(b), "r"(index), "r"(kTokenOperandHigh))

template <>
__device__ __forceinline__ void multiply_two_steps<96>(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index) {
  MOEQ_MULTIPLY_TWO_STEPS_96;
}

// The same, from zero. `add` is never true, which the compiler must not know: results that nothing is added to would get
// registers of their own.
template <int max_width, Factors factors = Factors::kBfloat16>
__device__ __forceinline__ void start_two_steps(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index);

#define MOEQ_FIRST_STEP(width, sums, a0, a1, a2, a3, b0, b1, b2, b3, end)                                  \
  MOEQ_PRODUCT_ON(width, sums, a0, b0, "add", end) MOEQ_PRODUCT(width, sums, a1, b1, end)                    \
  MOEQ_PRODUCT(width, sums, a2, b2, end) MOEQ_PRODUCT(width, sums, a3, b3, end)
#define MOEQ_FROM_ZERO(index) ".reg .pred add; setp.lt.s32 add, " index ", 0; "
#define MOEQ_FIRST_TWO_STEPS(width, a0, a1, a2, a3, ...)                                                   \
  MOEQ_WIDTH(width, MOEQ_FIRST_STEP(width, MOEQ_D##width, a0, a1, a2, a3, "b0", "b1", "b2", "b3", "0")     \
                    MOEQ_STEP(width, MOEQ_D##width, __VA_ARGS__, "b4", "b5", "b6", "b7", "0"))

#define MOEQ_START_TWO_STEPS_32 \
  asm volatile(                                                                                            \
    MOEQ_BEGIN MOEQ_FROM_ZERO("%49") MOEQ_TOKENS("%48", "%50")                                             \
    MOEQ_NEXT_TOKENS_32("%48", "%50")                                                                      \
    MOEQ_BRANCH("%49", MOEQ_LABELS_32)                                                                     \
    MOEQ_TO_32(MOEQ_FIRST_TWO_STEPS, "{%16, %17, %18, %19}", "{%20, %21, %22, %23}",                       \
               "{%24, %25, %26, %27}", "{%28, %29, %30, %31}",                                             \
               "{%32, %33, %34, %35}", "{%36, %37, %38, %39}", "{%40, %41, %42, %43}", "{%44, %45, %46, %47}") MOEQ_END \
    : MOEQ_OUT16(0)                                                                                        \
    : MOEQ_IN16(a[0]), MOEQ_IN16(a[1]), "r"(b), "r"(index), "r"(kTokenOperandHigh))

template <>
__device__ __forceinline__ void start_two_steps<32>(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index) {
  MOEQ_START_TWO_STEPS_32;
}

// One step of two tiles of weights: d[2][max_width / 2].
template <int max_width>
__device__ __forceinline__ void multiply_two_tiles(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index);

#define MOEQ_TWO_TILES(width, a0, a1, a2, a3, ...)                                                         \
  MOEQ_WIDTH(width, MOEQ_STEP(width, MOEQ_D##width, a0, a1, a2, a3, "b0", "b1", "b2", "b3", "0")           \
                    MOEQ_STEP(width, MOEQ_NEXT_OF_32_##width, __VA_ARGS__, "b0", "b1", "b2", "b3", "0"))

template <>
__device__ __forceinline__ void multiply_two_tiles<32>(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index) {
  asm volatile(
    MOEQ_BEGIN MOEQ_TOKENS("%64", "%66") MOEQ_BRANCH("%65", MOEQ_LABELS_32)
    MOEQ_TO_32(MOEQ_TWO_TILES, "{%32, %33, %34, %35}", "{%36, %37, %38, %39}",
               "{%40, %41, %42, %43}", "{%44, %45, %46, %47}",
               "{%48, %49, %50, %51}", "{%52, %53, %54, %55}", "{%56, %57, %58, %59}", "{%60, %61, %62, %63}") MOEQ_END
    : MOEQ_OUT16(0), MOEQ_OUT16(16)
    : MOEQ_IN16(a[0]), MOEQ_IN16(a[1]), "r"(b), "r"(index), "r"(kTokenOperandHigh));
}

// One step from zero, too.
template <int max_width, Factors factors = Factors::kBfloat16>
__device__ __forceinline__ void start_step(float* d, const uint32_t (&a)[4][4], uint32_t b, int index);

#define MOEQ_STEP_FROM_ZERO(width, ...) \
  MOEQ_WIDTH(width, MOEQ_FIRST_STEP(width, MOEQ_D##width, __VA_ARGS__, "b0", "b1", "b2", "b3", "0"))

#define MOEQ_START_STEP_96 \
  asm volatile(                                                                                            \
    MOEQ_BEGIN MOEQ_FROM_ZERO("%65") MOEQ_TOKENS("%64", "%66") MOEQ_BRANCH("%65", MOEQ_LABELS_96)          \
    MOEQ_TO_96(MOEQ_STEP_FROM_ZERO, "{%48, %49, %50, %51}", "{%52, %53, %54, %55}",                        \
               "{%56, %57, %58, %59}", "{%60, %61, %62, %63}") MOEQ_END                                    \
    : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32)                                                        \
    : MOEQ_IN16(a), "r"(b), "r"(index), "r"(kTokenOperandHigh))

template <>
__device__ __forceinline__ void start_step<96>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_START_STEP_96;
}

#define MOEQ_START_STEP_72 \
  asm volatile(                                                                                            \
    MOEQ_BEGIN MOEQ_FROM_ZERO("%53") MOEQ_TOKENS("%52", "%54") MOEQ_BRANCH("%53", MOEQ_LABELS_72)          \
    MOEQ_TO_72(MOEQ_STEP_FROM_ZERO, "{%36, %37, %38, %39}", "{%40, %41, %42, %43}",                        \
               "{%44, %45, %46, %47}", "{%48, %49, %50, %51}") MOEQ_END                                    \
    : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT4(32)                                                         \
    : MOEQ_IN16(a), "r"(b), "r"(index), "r"(kTokenOperandHigh))

template <>
__device__ __forceinline__ void start_step<72>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_START_STEP_72;
}

template <>
__device__ __forceinline__ void start_step<32>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  asm volatile(
    MOEQ_BEGIN MOEQ_FROM_ZERO("%33") MOEQ_TOKENS("%32", "%34") MOEQ_BRANCH("%33", MOEQ_LABELS_32)
    MOEQ_TO_32(MOEQ_STEP_FROM_ZERO, "{%16, %17, %18, %19}", "{%20, %21, %22, %23}",
               "{%24, %25, %26, %27}", "{%28, %29, %30, %31}") MOEQ_END
    : MOEQ_OUT16(0)
    : MOEQ_IN16(a), "r"(b), "r"(index), "r"(kTokenOperandHigh));
}

// What weights of 8 bits take of these, of float16.
#undef MOEQ_TYPES
#define MOEQ_TYPES "f16.f16"

template <>
__device__ __forceinline__ void multiply_step<96, Factors::kFloat16>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_MULTIPLY_STEP_96;
}

template <>
__device__ __forceinline__ void multiply_step<72, Factors::kFloat16>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_MULTIPLY_STEP_72;
}

template <>
__device__ __forceinline__ void multiply_step<160, Factors::kFloat16>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_MULTIPLY_STEP_160;
}

template <>
__device__ __forceinline__ void multiply_two_steps<96, Factors::kFloat16>(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index) {
  MOEQ_MULTIPLY_TWO_STEPS_96;
}

template <>
__device__ __forceinline__ void start_two_steps<32, Factors::kFloat16>(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index) {
  MOEQ_START_TWO_STEPS_32;
}

template <>
__device__ __forceinline__ void start_step<96, Factors::kFloat16>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_START_STEP_96;
}

template <>
__device__ __forceinline__ void start_step<72, Factors::kFloat16>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
  MOEQ_START_STEP_72;
}

#undef MOEQ_TYPES
#define MOEQ_TYPES "bf16.bf16"

// Waits for all products. What is done with these sums stays behind it.
template <int max_width>
__device__ __forceinline__ void wait_for_sums(float* d);

template <>
__device__ __forceinline__ void wait_for_sums<32>(float* d) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : MOEQ_OUT16(0)::"memory");
}

template <>
__device__ __forceinline__ void wait_for_sums<96>(float* d) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT16(32)::"memory");
}

template <>
__device__ __forceinline__ void wait_for_sums<72>(float* d) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : MOEQ_OUT16(0), MOEQ_OUT16(16), MOEQ_OUT4(32)::"memory");
}

template <>
__device__ __forceinline__ void wait_for_sums<144>(float* d) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : MOEQ_OUT64(0), MOEQ_OUT4(64), MOEQ_OUT4(68)::"memory");
}

// One step of two tiles again, with a in shared memory, too, like b: tiles of 64 rows, 8192 bytes each, one after another.
template <int max_width>
__device__ __forceinline__ void multiply_shared(float* d, uint32_t a, uint32_t b, int index);

#define MOEQ_TWO_SHARED(width, ...)                                                                        \
  MOEQ_WIDTH(width, MOEQ_STEP(width, MOEQ_D##width, "a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "0, 0") \
                    MOEQ_STEP(width, MOEQ_NEXT_OF_192_##width, "a4", "a5", "a6", "a7", "b0", "b1", "b2", "b3", "0, 0"))

template <>
__device__ __forceinline__ void multiply_shared<192>(float* d, uint32_t a, uint32_t b, int index) {
  asm volatile(
    MOEQ_BEGIN
    MOEQ_DESCRIPTOR("a0", "%192", 0, "%195") MOEQ_DESCRIPTOR("a1", "%192", 2, "%195")
    MOEQ_DESCRIPTOR("a2", "%192", 4, "%195") MOEQ_DESCRIPTOR("a3", "%192", 6, "%195")
    MOEQ_DESCRIPTOR("a4", "%192", 512, "%195") MOEQ_DESCRIPTOR("a5", "%192", 514, "%195")
    MOEQ_DESCRIPTOR("a6", "%192", 516, "%195") MOEQ_DESCRIPTOR("a7", "%192", 518, "%195")
    MOEQ_TOKENS("%193", "%195") MOEQ_BRANCH("%194", MOEQ_LABELS_192) MOEQ_TO_192(MOEQ_TWO_SHARED, ) MOEQ_END
    : MOEQ_OUT64(0), MOEQ_OUT64(64), MOEQ_OUT64(128)
    : "r"(a), "r"(b), "r"(index), "r"(kTokenOperandHigh));
}

#undef MOEQ_TWO_SHARED
#undef MOEQ_MULTIPLY_TWO_STEPS_96
#undef MOEQ_MULTIPLY_STEP_160
#undef MOEQ_MULTIPLY_STEP_96
#undef MOEQ_MULTIPLY_STEP_72
#undef MOEQ_START_TWO_STEPS_32
#undef MOEQ_START_STEP_96
#undef MOEQ_START_STEP_72
#undef MOEQ_STEP_FROM_ZERO
#undef MOEQ_TWO_TILES
#undef MOEQ_FIRST_TWO_STEPS
#undef MOEQ_FROM_ZERO
#undef MOEQ_FIRST_STEP
#undef MOEQ_TWO_STEPS
#undef MOEQ_ONE_STEP
#undef MOEQ_END
#undef MOEQ_BRANCH
#undef MOEQ_NEXT_TOKENS_32
#undef MOEQ_NEXT_TOKENS_96
#undef MOEQ_NEXT_TOKENS
#undef MOEQ_TOKENS
#undef MOEQ_DESCRIPTOR
#undef MOEQ_BEGIN
#undef MOEQ_WIDTH
#undef MOEQ_STEP
#undef MOEQ_PRODUCT
#undef MOEQ_PRODUCT_ON
#undef MOEQ_TYPES
// clang-format on

// The tensor cores' part of adapters: a branch over the widths of a tile of tokens, as wgmma_bf16.cuh has it.

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
