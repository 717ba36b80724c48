"""Every Triton kernel compiles for every target, on a machine that has none of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_programs import BACKWARD_KERNELS, KERNELS, LARGE_SHARED_KERNELS, words_of

pytest.importorskip("triton")

# What the tensor cores of each target are fed with.
PRODUCTS = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
# Triton 3.6 has no product of int8 among Blackwell's newest instructions, 3.9 has.
INT8_OF_SM100 = {"mma.sync", "tcgen05.mma"}
# Cases come in quarters. 8.9 and 12.0 halve them: they have the same products and types.
QUARTERS = {80: range(4), 89: (0, 2), 90: range(4), 100: range(4), 120: (1, 3)}
# (part, parts) of a backward pass: targets with mma.sync, whose variants are the same, make a third each, besides every
# kernel once and all that decode weights.
BACKWARD_PARTS = {80: (0, 3), 89: (1, 3), 90: (0, 1), 100: (0, 1), 120: (2, 3)}
LARGE_SHARED = {90, 100}
AHEAD = 3 * (128 + 256) * 64 * 2  # bytes of three steps, which a product at least copies ahead on SM90

pytestmark = pytest.mark.slow
capabilities = pytest.mark.parametrize("capability", PRODUCTS)


@pytest.mark.parametrize(
    ("capability", "quarter"), [(target, quarter) for target in QUARTERS for quarter in QUARTERS[target]]
)
def test_experts(capability: int, quarter: int, tmp_path: Path) -> None:
    lines = words_of("triton_aot.py", tmp_path, capability, quarter, 4)
    assert {line[0] for line in lines} == KERNELS
    for name, how, kind, *products in lines:
        if how == "ptx" and name.startswith("gemm"):
            expected = INT8_OF_SM100 if kind == "int8" and capability == 100 else {PRODUCTS[capability]}
            assert expected.intersection(products), (name, kind, products)


@capabilities
def test_routing(capability: int, tmp_path: Path) -> None:
    """With the warp's own reductions in the top-k."""
    lines = words_of("triton_routing_aot.py", tmp_path, capability)
    assert len(lines) == 6
    assert all(int(redux) >= 2 for _, _, redux, _ in lines)


def test_targets_that_deal_variants_out_have_the_same(tmp_path: Path) -> None:
    dealt = [target for target, (_, parts) in BACKWARD_PARTS.items() if parts > 1]
    found = [words_of("triton_backward_aot.py", tmp_path, target) for target in dealt]
    assert {line[0] for line in found[0]} == BACKWARD_KERNELS
    assert sorted(BACKWARD_PARTS[target] for target in dealt) == [(part, len(dealt)) for part in range(len(dealt))]
    assert all(lines == found[0] for lines in found)


@capabilities
def test_backward(capability: int, tmp_path: Path) -> None:
    """Products of a backward pass copy both factors ahead, whichever way the weights lie."""
    lines = words_of("triton_backward_aot.py", tmp_path, capability, *BACKWARD_PARTS[capability])
    few_ranks = LARGE_SHARED_KERNELS if capability in LARGE_SHARED else set()
    assert {line[0] for line in lines} == BACKWARD_KERNELS | few_ranks
    for name, backend, scheme, shared, *products in lines:
        if name == "grouped_kernel":
            assert PRODUCTS[capability] in products, (backend, scheme, products)
            if capability == 90 and scheme != "int8":  # whose layer is too small for that
                assert int(shared) >= AHEAD, (backend, scheme, shared)
