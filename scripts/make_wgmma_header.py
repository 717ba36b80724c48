"""Writes csrc/cuda/sm90/gemm_wgmma.cuh. Usage: python scripts/make_wgmma_header.py"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTHS = range(8, 161, 8)
TARGET = Path(__file__).resolve().parents[1] / "csrc" / "cuda" / "sm90" / "gemm_wgmma.cuh"
RESULTS = WIDTHS[-1] // 2
FRAGMENTS = 16
TOKENS = f"%{RESULTS + FRAGMENTS}"
INDEX = f"%{RESULTS + FRAGMENTS + 1}"
HIGH = f"%{RESULTS + FRAGMENTS + 2}"
HEADER = """\
// Made by scripts/make_wgmma_header.py.
#pragma once
#include <cstdint>

// clang-format off
namespace moeq::sm90 {

// The upper word of the operand's description: atoms of 1024 bytes one after another, swizzled over 128 bytes.
constexpr uint32_t kTokenOperandHigh = 1u << 30 | 1024 / 16;

// d[64 rows, tokens] += a[64, 64] * b[64, tokens] for 8 * (index + 1) tokens: bfloat16 with float32 sums, a in
// registers, b in shared memory (its address / 16; K-major, swizzled over 128 bytes, see kTokenOperandHigh).
// Asynchronous, one group. The branch is inside the assembly because the compiler gives the accumulators of each
// instruction that it sees registers of their own, and there are not enough.
__device__ __forceinline__ void multiply_step(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {
"""
FOOTER = """\
}

}  // namespace moeq::sm90
"""


def instructions() -> Iterator[str]:
    """The assembly, an instruction or label a line."""
    yield "{ .reg .b64 b0, b1, b2, b3; .reg .b32 low1, low2, low3;"
    yield f"mov.b64 b0, {{{TOKENS}, {HIGH}}};"
    for step in range(1, 4):
        yield f"add.u32 low{step}, {TOKENS}, {2 * step};"
        yield f"mov.b64 b{step}, {{low{step}, {HIGH}}};"
    yield "targets: .branchtargets " + ", ".join(f"w{width}" for width in WIDTHS) + ";"
    yield f"brx.idx.uni {INDEX}, targets;"
    for width in WIDTHS:
        yield f"w{width}: wgmma.fence.sync.aligned;"
        results = ", ".join(f"%{i}" for i in range(width // 2))
        for step in range(4):
            fragment = ", ".join(f"%{RESULTS + 4 * step + i}" for i in range(4))
            yield f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16"
            yield f"{{{results}}}, {{{fragment}}}, b{step}, 1, 1, 1, 0;"
        yield "wgmma.commit_group.sync.aligned;"
        yield "bra.uni done;"
    yield "done: }"


def function_body() -> Iterator[str]:
    """The asm statement."""
    yield "  asm volatile("
    for instruction in instructions():
        for piece in textwrap.wrap(instruction, 110):
            yield f'    "{piece} "'
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(RESULTS))
    inputs = ", ".join(f'"r"(a[{step}][{i}])' for step in range(4) for i in range(4))
    yield from textwrap.wrap(": " + outputs, 110, initial_indent="    ", subsequent_indent="      ")
    yield from textwrap.wrap(
        f': {inputs}, "r"(b), "r"(index), "r"(kTokenOperandHigh));',
        110,
        initial_indent="    ",
        subsequent_indent="      ",
    )


def main() -> None:
    """Writes the header."""
    TARGET.write_text(HEADER + "\n".join(function_body()) + "\n" + FOOTER)


if __name__ == "__main__":
    main()
