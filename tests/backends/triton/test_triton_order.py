"""No Triton kernel touches memory before it waits, but for what the kernel in front is known to leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_programs import KERNELS, words_of

pytest.importorskip("triton")

PARTS = 4


def check(cache: Path, part: int, parts: int) -> set[str]:
    """The kernels of these cases, none of which is at fault."""
    lines = words_of("triton_order.py", cache, part, parts)
    faults = [" ".join(words) for words in lines if words[0] == "FAULT"]
    assert not faults
    assert any(words[1] != "0" for words in lines)  # early reads are seen at all
    return {name for words in lines for name in words[2:]}


def test_one_token_of_plain_weights(tmp_path: Path) -> None:
    """No launch of ours is in front of GEMM1: it read ids that a router was still writing."""
    assert check(tmp_path, 0, 100) >= {"gemm1_kernel", "gemm2_kernel", "combine_kernel", "route_kernel", "place_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_formats(part: int, tmp_path: Path) -> None:
    assert check(tmp_path, part, PARTS) >= KERNELS
