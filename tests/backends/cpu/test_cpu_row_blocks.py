"""Several rows of an expert times two to four panels at a time (csrc/cpu/row_blocks.h), and what their memory costs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
import cpu_emulation as emulation
from cpu_cases import BF16, CASES, any_case
from cpu_problems import assert_close_by_rows

BLOCKS = "avx512bf16"  # the instruction set whose rows are multiplied so, from this many rows of an expert on:
FIRST = 4


@pytest.fixture(autouse=True)
def _isa() -> object:
    refusal = torch.ops.moeq_C.cpu_isa_refusal(BLOCKS)
    if refusal:
        pytest.skip(f"no {BLOCKS} here: {refusal}")
    before = torch.ops.moeq_C.cpu_isa()
    torch.ops.moeq_C.use_cpu_isa(BLOCKS)
    yield
    torch.ops.moeq_C.use_cpu_isa(before)


# 48: three panels of w2, the last one by itself; 80 and 208: ends within a step of 128.
ODD_SIZES = [(48, 80), (208, 144)]
OF_ANY_SIZE = [
    "none-bf16",
    "nvfp4-none",
    "nvfp4-nvfp4",
    *(c for c in CASES if not c.startswith("mx") and not CASES[c].get("group")),
]
LAYERS = [(case, (192, 64)) for case in CASES if case not in OF_ANY_SIZE]
LAYERS += [(case, sizes) for case in OF_ANY_SIZE for sizes in [(192, 64), *ODD_SIZES]]


@pytest.mark.parametrize(("case", "sizes"), LAYERS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_rows_have_the_bits_of_a_row_by_itself(case: str, activation: str, sizes: tuple[int, int]) -> None:
    problem = any_case(case, *sizes, activation=activation)
    x, _, _ = problem.tokens(140, 1, BF16)
    ids, weights = torch.zeros(140, 1, dtype=torch.int32), torch.ones(140, 1)
    alone = torch.cat([problem.run(x[i : i + 1], ids[:1], weights[:1]) for i in range(140)])
    for count in (2, FIRST - 1, *range(FIRST, 28), 33, 34, 41, 42, 127, 128, 129, 140):
        assert torch.equal(problem.run(x[:count], ids[:count], weights[:count]), alone[:count]), count


@pytest.mark.parametrize("sizes", [(16, 16), (80, 144), (2064, 48)], ids=str)
@pytest.mark.parametrize("case", ["none-bf16", "nvfp4-none", "fp8_block-fp8", "int4-zero-row"])
def test_blocks_are_right(case: str, sizes: tuple[int, int]) -> None:
    problem = any_case(case, *sizes)
    arguments = problem.tokens(77, 2, BF16)
    want = emulation.moe(problem.layer, *arguments)
    assert_close_by_rows(problem.run(*arguments), want, 3e-6, 5e-2)


def test_a_chunk_of_a_common_size_keeps_its_memory() -> None:
    """1024 tokens: 67 MB of expert outputs, which took a page fault for every 4 kB of every call."""
    resource = pytest.importorskip("resource")
    problem = any_case("none-bf16", 4096, 16)
    arguments = problem.tokens(1024, 4, BF16)
    problem.run(*arguments)
    faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        problem.run(*arguments)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults) < 6000, faults  # the result itself has 2048 pages
