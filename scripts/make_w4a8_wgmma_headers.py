"""Writes csrc/cuda/sm90/w4a8_wgmma_{packed,folded}.cuh. Usage: python scripts/make_w4a8_wgmma_headers.py"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

# Tokens of one instruction: a tile of up to 160 takes one a step, a wider one two.
WIDTHS = {
    "single": (16, 32, 48, 64, 80, 96, 104, 112, 120, 128, 136, 144, 152, 160),
    "half": (88, 96, 104, 112, 120, 128),
}
STEPS = 4  # of 32 in K, summed by the tensor cores
EARLY = 3  # of them in a group that is finished before the others
FOLDER = Path(__file__).resolve().parents[1] / "csrc" / "cuda" / "sm90"
HEADER = """\
// Made by scripts/make_w4a8_wgmma_headers.py.
#pragma once
#include <cstdint>

// clang-format off
namespace moeq::sm90::w4a8 {

constexpr int k%NAME%Steps = %STEPS%;   // of 32 in K, at once

// d[64 rows, tokens] = a[64, K] * b[K, tokens] of that many steps in e4m3 with float32 sums, asynchronous, the last
// step in a group of its own.
// a: %A%; b in shared memory (K-major, swizzled over 128 bytes). `index` chooses the number of
// tokens. The branch is inside the assembly because the compiler gives the accumulators of each instruction that it
// sees registers of their own.
"""
A_TEXT = {"packed": "four registers a step", "folded": "in shared memory as b is"}


def instructions(policy: str, widths: tuple[int, ...], results: int) -> Iterator[str]:
    """The assembly, an instruction or label a line."""
    inputs = 4 * STEPS if policy == "packed" else 1
    tokens, index = f"%{results + inputs}", f"%{results + inputs + 1}"
    yield "{ .reg .b64 b1, b2, b3, a1, a2, a3; .reg .pred add;"
    # Never true, which the compiler must not know: results that nothing is added to would get registers of their own.
    yield f"setp.lt.s32 add, {index}, 0;"
    for step in range(1, STEPS):
        yield f"add.s64 b{step}, {tokens}, {2 * step};"
        if policy == "folded":
            yield f"add.s64 a{step}, %{results}, {2 * step};"
    yield "targets: .branchtargets " + ", ".join(f"w{width}" for width in widths) + ";"
    yield f"brx.idx.uni {index}, targets;"
    for width in widths:
        yield f"w{width}: wgmma.fence.sync.aligned;"
        d = ", ".join(f"%{i}" for i in range(width // 2))
        for step in range(STEPS):
            if step == EARLY:
                yield "wgmma.commit_group.sync.aligned;"
            b = tokens if step == 0 else f"b{step}"
            if policy == "packed":
                a = "{" + ", ".join(f"%{results + 4 * step + i}" for i in range(4)) + "}"
            else:
                a = f"%{results}" if step == 0 else f"a{step}"
            yield f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3"
            yield f"{{{d}}}, {a}, {b}, {'1' if step else 'add'}, 1, 1;"
        yield "wgmma.commit_group.sync.aligned;"
        yield "bra.uni done;"
    yield "done: }"


def function(policy: str, kind: str) -> Iterator[str]:
    """One function: its signature and the asm statement."""
    widths = WIDTHS[kind]
    results = widths[-1] // 2
    a = "const uint32_t (*a)[4]" if policy == "packed" else "uint64_t a"
    yield f"__device__ __forceinline__ void multiply_{kind}(float (&d)[{results}], {a}, uint64_t b, int index) {{"
    yield "  asm volatile("
    for instruction in instructions(policy, widths, results):
        for piece in textwrap.wrap(instruction, 110):
            yield f'    "{piece} "'
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(results))
    operands = [f'"r"(a[{step}][{i}])' for step in range(STEPS) for i in range(4)] if policy == "packed" else ['"l"(a)']
    text = ", ".join([*operands, '"l"(b)', '"r"(index)'])
    yield from textwrap.wrap(": " + outputs, 110, initial_indent="    ", subsequent_indent="      ")
    yield from textwrap.wrap(f": {text});", 110, initial_indent="    ", subsequent_indent="      ")
    yield "}"


def main() -> None:
    """Writes both headers."""
    for policy in ("packed", "folded"):
        functions = "\n\n".join("\n".join(function(policy, kind)) for kind in WIDTHS)
        text = (
            HEADER.replace("%A%", A_TEXT[policy]).replace("%STEPS%", str(STEPS)).replace("%NAME%", policy.title())
            + functions
            + "\n\n}  // namespace moeq::sm90::w4a8\n"
        )
        (FOLDER / f"w4a8_wgmma_{policy}.cuh").write_text(text)


if __name__ == "__main__":
    main()
