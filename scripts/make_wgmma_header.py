"""Writes csrc/cuda/sm90/gemm_wgmma_*.cuh. Usage: python scripts/make_wgmma_header.py"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "csrc" / "cuda" / "sm90"
# The most tokens of a tile, how many steps of 64 in K an asm statement does, and how many tiles of 64 weight rows.
TARGETS = {
    "gemm_wgmma_wide.cuh": (160, 1, 1),
    "gemm_wgmma_narrow.cuh": (96, 1, 1),
    "gemm_wgmma_narrow_pair.cuh": (96, 2, 1),
    "gemm_wgmma_slim_pair.cuh": (32, 1, 2),
}
HEADER = """\
// Generated: made by scripts/make_wgmma_header.py, which is where to change it; it repeats itself by design.
#pragma once
#include "gemm_wgmma.cuh"

// clang-format off
namespace moeq::sm90 {

template <>
"""
# Weights from shared memory too: the most tokens, how many tiles of 64 weight rows.
SHARED_TARGETS = {"gemm_wgmma_shared.cuh": (192, 2)}
TILE_BYTES = 64 * 64 * 2
DECLARATIONS = {
    (1, 1): "multiply_step<%d>(float* d, const uint32_t (&a)[4][4], uint32_t b, int index) {",
    (2, 1): "multiply_two_steps<%d>(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index) {",
    (1, 2): "multiply_two_tiles<%d>(float* d, const uint32_t (&a)[2][4][4], uint32_t b, int index) {",
}
FOOTER = """\
}

}  // namespace moeq::sm90
"""


def instructions(max_width: int, steps: int, tiles: int) -> Iterator[str]:
    """The assembly, an instruction or label a line."""
    sums, parts = max_width // 2, 4 * steps
    inputs = sums * tiles
    tokens, index, high = (f"%{inputs + 4 * parts * tiles + i}" for i in range(3))
    widths = range(8, max_width + 1, 8)
    lows = ", ".join(f"low{part}" for part in range(1, parts))
    yield "{ .reg .b64 " + ", ".join(f"b{part}" for part in range(parts)) + f"; .reg .b32 {lows};"
    yield f"mov.b64 b0, {{{tokens}, {high}}};"
    for part in range(1, parts):
        yield f"add.u32 low{part}, {tokens}, {part // 4 * max_width * 8 + part % 4 * 2};"
        yield f"mov.b64 b{part}, {{low{part}, {high}}};"
    yield "targets: .branchtargets " + ", ".join(f"w{width}" for width in widths) + ";"
    yield f"brx.idx.uni {index}, targets;"
    for width in widths:
        yield f"w{width}: wgmma.fence.sync.aligned;"
        for part in range(parts * tiles):
            results = ", ".join(f"%{part // parts * sums + i}" for i in range(width // 2))
            fragment = ", ".join(f"%{inputs + 4 * part + i}" for i in range(4))
            yield f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16"
            yield f"{{{results}}}, {{{fragment}}}, b{part % parts}, 1, 1, 1, 0;"
        yield "wgmma.commit_group.sync.aligned;"
        yield "bra.uni done;"
    yield "done: }"


def shared_instructions(max_width: int, tiles: int) -> Iterator[str]:
    """Those of a step of 64 in K with weights in shared memory."""
    sums = max_width // 2
    weights, tokens, index, high = (f"%{sums * tiles + i}" for i in range(4))
    operands = [(f"a{i}", weights, i // 4 * TILE_BYTES // 16 + i % 4 * 2) for i in range(4 * tiles)]
    operands += [(f"b{i}", tokens, i * 2) for i in range(4)]
    yield "{ .reg .b64 " + ", ".join(name for name, _, _ in operands) + "; .reg .b32 low;"
    for name, base, offset in operands:
        yield f"add.u32 low, {base}, {offset};"
        yield f"mov.b64 {name}, {{low, {high}}};"
    widths = range(8, max_width + 1, 8)
    yield "targets: .branchtargets " + ", ".join(f"w{width}" for width in widths) + ";"
    yield f"brx.idx.uni {index}, targets;"
    for width in widths:
        yield f"w{width}: wgmma.fence.sync.aligned;"
        for part in range(4 * tiles):
            results = ", ".join(f"%{part // 4 * sums + i}" for i in range(width // 2))
            yield f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16"
            yield f"{{{results}}}, a{part}, b{part % 4}, 1, 1, 1, 0, 0;"
        yield "wgmma.commit_group.sync.aligned;"
        yield "bra.uni done;"
    yield "done: }"


def statement(assembly: Iterator[str], outputs: int, inputs: str) -> Iterator[str]:
    """The asm statement; its outputs are d[0], d[1], ..."""
    yield "  asm volatile("
    for instruction in assembly:
        for piece in textwrap.wrap(instruction, 110):
            yield f'    "{piece} "'
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(outputs))
    yield from textwrap.wrap(": " + sums, 110, initial_indent="    ", subsequent_indent="      ")
    yield from textwrap.wrap(f": {inputs});", 110, initial_indent="    ", subsequent_indent="      ")


def function_body(max_width: int, steps: int, tiles: int) -> Iterator[str]:
    """The asm statement with weights in registers."""
    steps_of = [""] if steps * tiles == 1 else [f"[{which}]" for which in range(steps * tiles)]
    inputs = ", ".join(f'"r"(a{step}[{part}][{i}])' for step in steps_of for part in range(4) for i in range(4))
    operands = f'{inputs}, "r"(b), "r"(index), "r"(kTokenOperandHigh)'
    yield from statement(instructions(max_width, steps, tiles), max_width // 2 * tiles, operands)


def main() -> None:
    """Writes the headers."""
    for name, (max_width, steps, tiles) in TARGETS.items():
        declaration = "__device__ __forceinline__ void " + DECLARATIONS[steps, tiles] % max_width
        body = "\n".join(function_body(max_width, steps, tiles))
        (SOURCES / name).write_text(HEADER + declaration + "\n" + body + "\n" + FOOTER)
    for name, (max_width, tiles) in SHARED_TARGETS.items():
        declaration = f"multiply_shared<{max_width}>(float* d, uint32_t a, uint32_t b, int index) {{"
        operands = '"r"(a), "r"(b), "r"(index), "r"(kTokenOperandHigh)'
        body = "\n".join(statement(shared_instructions(max_width, tiles), max_width // 2 * tiles, operands))
        (SOURCES / name).write_text(f"{HEADER}__device__ __forceinline__ void {declaration}\n{body}\n{FOOTER}")


if __name__ == "__main__":
    main()
