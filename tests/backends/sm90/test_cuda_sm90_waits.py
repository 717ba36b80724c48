"""The Hopper kernels' waits for other thread blocks: none is without end, and its end names the kernel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_library import device_program
from paths import ROOT
from sm90_cases import why_not_here

SOURCES = ROOT / "csrc" / "cuda"
REASON = why_not_here()
# What reads memory that other thread blocks write meanwhile.
LOOK = re.compile(r"\bld\.(?:acquire|relaxed|volatile)\.(?:gpu|global|sys)|\bvolatile\s+\w+\s*\*")
# Loops that go on until something is so: not those that count.
LOOP = re.compile(r"\bwhile\s*\(|\bdo\s*\{|\bfor\s*\([^;]*;[^;]*;\s*\)")
DEFINITION = re.compile(r"\b(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?\{")


def closed(text: str, at: int, pair: str) -> int:
    """Behind the bracket that closes the first one from `at` on."""
    depth, at = 1, text.index(pair[0], at) + 1
    while depth:
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        at += 1
    return at


def functions(text: str) -> Iterator[tuple[str, str]]:
    for found in DEFINITION.finditer(text):
        if found[1] not in ("if", "while", "for", "switch"):
            yield found[1], text[found.start() : closed(text, found.end() - 1, "{}")]


def loops(text: str) -> Iterator[str]:
    """Conditions and bodies."""
    for found in LOOP.finditer(text):
        if found[0].startswith("do"):
            end = text.index(";", closed(text, found.start(), "{}"))
        else:
            head = closed(text, found.start(), "()")
            block = text[head:].lstrip().startswith("{")
            end = closed(text, head, "{}") if block else text.index(";", head) + 1
        yield text[found.start() : end]


def polling_loops() -> list[tuple[str, str]]:
    """File and text of all loops that look at what other thread blocks write."""
    texts = {path: re.sub(r"//[^\n]*", "", path.read_text()) for path in sorted(SOURCES.rglob("*.cu*"))}
    lookers: set[str] = set()
    for _ in range(3):  # who calls one without a loop is one
        for text in texts.values():
            for name, body in functions(text):
                looks = LOOK.search(body) or any(re.search(rf"\b{known}\s*(?:<\w+>)?\(", body[1:]) for known in lookers)
                if looks and not LOOP.search(body) and "for (" not in body:
                    lookers.add(name)
    calls = re.compile(rf"\b(?:{'|'.join(sorted(lookers))})\s*(?:<\w+>)?\(")
    every = ((path.name, loop) for path, text in texts.items() for loop in loops(text))
    return [(name, loop) for name, loop in every if LOOK.search(loop) or calls.search(loop)]


def test_every_loop_that_looks_at_other_blocks_is_bounded() -> None:
    found = polling_loops()
    assert {name for name, _ in found} >= {"decode_kernel.cuh", "decode_exchange.cuh", "decode_few_hidden.cuh"}
    assert len(found) >= 5
    endless = [
        (name, loop)
        for name, loop in found
        if not re.search(r"\b(?:is_over|check_wait|give_up|patience\.wait)\(", loop)
    ]
    assert not endless


def test_persistent_kernels_call_nothing_that_serializes_their_products() -> None:
    """With a call in the kernel, ptxas lets each wgmma wait for the one before (C7510): the wait only leaves a mark."""
    persistent = [*sorted((SOURCES / "sm90").rglob("gemm_*.cu*")), SOURCES / "sm90" / "bf16" / "bf16.cu"]
    assert "gemm_kernel.cuh" in {path.name for path in persistent}
    for path in persistent:
        assert "give_up(" not in path.read_text(), path.name


def test_launches_that_write_by_ids_do_not_read_them_again() -> None:
    """Ids that change under a call must not lead out of an array: rows come from what the sorting launch has read."""
    reads = re.compile(r"\btopk_ids\s*\[|\blocal_expert\(")
    paths = [path for folder in ("prefill", "gemm", "w4a8") for path in (SOURCES / "sm90" / folder).iterdir()]
    assert len(paths) > 20
    readers = {path.name for path in paths if reads.search(path.read_text())}
    assert readers == {"prefill_plan.h", "combine.cu"}, "the first is what sorting launches share"


@pytest.mark.gpu
@pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")
@pytest.mark.parametrize(
    ("program", "which", "kernel"),
    [
        ("sm90_wait_decode.cu", "barrier", "decode_kernel"),
        ("sm90_wait_decode.cu", "launch", "decode_few_kernel"),
        ("sm90_wait_decode.cu", "sums", "decode_few_kernel"),
        ("sm90_wait_prefill.cu", "", "gemm_kernel"),
    ],
)
def test_a_wait_for_nothing_ends_within_seconds(program: str, which: str, kernel: str, tmp_path: Path) -> None:
    command = [str(device_program(program, tmp_path)), which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seconds = re.fullmatch(r"([0-9.]+) s: cudaErrorAssert\s*", done.stdout)
    assert seconds is not None, done
    assert 1 < float(seconds[1]) < 30, done
    assert done.stderr.count(kernel) == 1 and "block: [" in done.stderr, done
