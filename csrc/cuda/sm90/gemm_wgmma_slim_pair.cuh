// Generated: made by scripts/make_wgmma_header.py, which is where to change it; it repeats itself by design.
#pragma once
#include "gemm_wgmma.cuh"

// clang-format off
namespace moeq::sm90 {

template <>
__device__ __forceinline__ void multiply_two_tiles<32>(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index) {
  asm volatile(
    "{ .reg .b64 b0, b1, b2, b3; .reg .b32 low1, low2, low3; "
    "mov.b64 b0, {%64, %66}; "
    "add.u32 low1, %64, 2; "
    "mov.b64 b1, {low1, %66}; "
    "add.u32 low2, %64, 4; "
    "mov.b64 b2, {low2, %66}; "
    "add.u32 low3, %64, 6; "
    "mov.b64 b3, {low3, %66}; "
    "targets: .branchtargets w8, w16, w24, w32; "
    "brx.idx.uni %65, targets; "
    "w8: wgmma.fence.sync.aligned; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3}, {%32, %33, %34, %35}, b0, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3}, {%36, %37, %38, %39}, b1, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3}, {%40, %41, %42, %43}, b2, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3}, {%44, %45, %46, %47}, b3, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19}, {%48, %49, %50, %51}, b0, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19}, {%52, %53, %54, %55}, b1, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19}, {%56, %57, %58, %59}, b2, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19}, {%60, %61, %62, %63}, b3, 1, 1, 1, 0; "
    "wgmma.commit_group.sync.aligned; "
    "bra.uni done; "
    "w16: wgmma.fence.sync.aligned; "
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7}, {%32, %33, %34, %35}, b0, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7}, {%36, %37, %38, %39}, b1, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7}, {%40, %41, %42, %43}, b2, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7}, {%44, %45, %46, %47}, b3, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23}, {%48, %49, %50, %51}, b0, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23}, {%52, %53, %54, %55}, b1, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23}, {%56, %57, %58, %59}, b2, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23}, {%60, %61, %62, %63}, b3, 1, 1, 1, 0; "
    "wgmma.commit_group.sync.aligned; "
    "bra.uni done; "
    "w24: wgmma.fence.sync.aligned; "
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%32, %33, %34, %35}, b0, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%36, %37, %38, %39}, b1, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%40, %41, %42, %43}, b2, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%44, %45, %46, %47}, b3, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, {%48, %49, %50, %51}, b0, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, {%52, %53, %54, %55}, b1, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, {%56, %57, %58, %59}, b2, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27}, {%60, %61, %62, %63}, b3, 1, 1, 1, 0; "
    "wgmma.commit_group.sync.aligned; "
    "bra.uni done; "
    "w32: wgmma.fence.sync.aligned; "
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%32, %33, %34, %35}, b0, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%36, %37, %38, %39}, b1, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%40, %41, %42, %43}, b2, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%44, %45, %46, %47}, b3, 1, 1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%48, %49, %50, %51}, b0, 1, "
    "1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%52, %53, %54, %55}, b1, 1, "
    "1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%56, %57, %58, %59}, b2, 1, "
    "1, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
    "{%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%60, %61, %62, %63}, b3, 1, "
    "1, 1, 0; "
    "wgmma.commit_group.sync.aligned; "
    "bra.uni done; "
    "done: } "
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
      "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "r"(a[0][0][0]), "r"(a[0][0][1]), "r"(a[0][0][2]), "r"(a[0][0][3]), "r"(a[0][1][0]), "r"(a[0][1][1]),
      "r"(a[0][1][2]), "r"(a[0][1][3]), "r"(a[0][2][0]), "r"(a[0][2][1]), "r"(a[0][2][2]), "r"(a[0][2][3]),
      "r"(a[0][3][0]), "r"(a[0][3][1]), "r"(a[0][3][2]), "r"(a[0][3][3]), "r"(a[1][0][0]), "r"(a[1][0][1]),
      "r"(a[1][0][2]), "r"(a[1][0][3]), "r"(a[1][1][0]), "r"(a[1][1][1]), "r"(a[1][1][2]), "r"(a[1][1][3]),
      "r"(a[1][2][0]), "r"(a[1][2][1]), "r"(a[1][2][2]), "r"(a[1][2][3]), "r"(a[1][3][0]), "r"(a[1][3][1]),
      "r"(a[1][3][2]), "r"(a[1][3][3]), "r"(b), "r"(index), "r"(kTokenOperandHigh));
}

}  // namespace moeq::sm90
