"""Random gradients by the passes of a GPU (programs/fuzz_gradients.py), in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from fuzz_gradients import solve

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def test_random_gradients() -> None:
    found = [solve("triton", 21, i) for i in range(4)]
    assert all(ratio < 1 for ratio, _ in found), found


@pytest.mark.slow
def test_many_random_gradients() -> None:
    found = [solve("triton", 22, i) for i in range(8)]
    assert not [(ratio, what) for ratio, what in found if not ratio < 1]
