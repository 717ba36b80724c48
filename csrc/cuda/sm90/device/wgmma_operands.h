// What the assembly of the tensor cores' instructions names: accumulators by the numbers of their operands, widths of a
// tile of tokens, operands. Macros, as an asm statement takes neither arrays nor loops.
#pragma once

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
#define MOEQ_TO_96(M, ...)                                                                                \
  MOEQ_TO_32(M, __VA_ARGS__) M(40, __VA_ARGS__) M(48, __VA_ARGS__) M(56, __VA_ARGS__) M(64, __VA_ARGS__)  \
  M(72, __VA_ARGS__) M(80, __VA_ARGS__) M(88, __VA_ARGS__) M(96, __VA_ARGS__)
#define MOEQ_TO_160(M, ...)                                                                               \
  MOEQ_TO_96(M, __VA_ARGS__) M(104, __VA_ARGS__) M(112, __VA_ARGS__) M(120, __VA_ARGS__) M(128, __VA_ARGS__) \
  M(136, __VA_ARGS__) M(144, __VA_ARGS__) M(152, __VA_ARGS__) M(160, __VA_ARGS__)
#define MOEQ_TO_192(M, ...)                                                                               \
  MOEQ_TO_160(M, __VA_ARGS__) M(168, __VA_ARGS__) M(176, __VA_ARGS__) M(184, __VA_ARGS__) M(192, __VA_ARGS__)
#define MOEQ_LABELS_32 "w8, w16, w24, w32"
#define MOEQ_LABELS_96 MOEQ_LABELS_32 ", w40, w48, w56, w64, w72, w80, w88, w96"
#define MOEQ_LABELS_160 MOEQ_LABELS_96 ", w104, w112, w120, w128, w136, w144, w152, w160"
#define MOEQ_LABELS_192 MOEQ_LABELS_160 ", w168, w176, w184, w192"

// Accumulators d[i] and on as operands.
#define MOEQ_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOEQ_OUT16(i) MOEQ_OUT4(i), MOEQ_OUT4(i + 4), MOEQ_OUT4(i + 8), MOEQ_OUT4(i + 12)
#define MOEQ_OUT64(i) MOEQ_OUT16(i), MOEQ_OUT16(i + 16), MOEQ_OUT16(i + 32), MOEQ_OUT16(i + 48)
// A step's operand in registers a[0] to a[3].
#define MOEQ_IN4(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])
#define MOEQ_IN16(a) MOEQ_IN4((a)[0]), MOEQ_IN4((a)[1]), MOEQ_IN4((a)[2]), MOEQ_IN4((a)[3])
// clang-format on
