"""Slots sorted by expert in one launch or in three, beside torch's sort; on the GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from triton_cases import DEVICE

from torch_moe_ops.backends.triton_engine.slots import MOST, MOST_OF_ONE_LAUNCH, sort_slots_on_gpu
from torch_moe_ops.gradients.pairs import sort_slots

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
LEAST, GREATEST = -(2**31), 2**31 - 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "offset", "numbers"),
    [
        (1, 1, 1, 0, 2),
        (1, 8, 128, 0, 128),
        (3, 3, 5, 4, 11),  # most of them foreign
        (43, 6, 7, 0, 7),  # more than one chunk
        (300, 2, 40, 1, 3),  # many of few experts
        (MOST_OF_ONE_LAUNCH // 8 + 1, 8, 60, 0, 60),  # three launches
        (1500, 3, 5, 4, 11),  # not a multiple of a block, most of them foreign
        (2100, 2, 1, 0, 2),
    ],
)
def test_as_torch_sorts(tokens: int, top_k: int, experts: int, offset: int, numbers: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, numbers, (tokens, top_k), generator=g, dtype=dtype).to(DEVICE)
    _compare(ids, offset, experts)


@pytest.mark.parametrize("offset", [0, GREATEST - 2])
@pytest.mark.parametrize("repeats", [1, MOST_OF_ONE_LAUNCH // 12 + 1])
def test_any_ids(offset: int, repeats: int) -> None:
    first = min(offset, GREATEST - 2)
    ids = torch.tensor(
        [[LEAST, GREATEST, -1], [first, first + 1, offset - 1], [first + 2, first, 2], [LEAST + 1, 0, 7]]
    )
    _compare(ids.int().repeat(repeats, 1).to(DEVICE), offset, 3)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes long in the interpreter")
@pytest.mark.parametrize("tokens", [16384, MOST // 8])
def test_many(tokens: int) -> None:
    g = torch.Generator().manual_seed(0)
    _compare(torch.randint(0, 300, (tokens, 8), generator=g, dtype=torch.int32).to(DEVICE), 20, 256)


def _compare(ids: torch.Tensor, offset: int, experts: int) -> None:
    found, expected = sort_slots_on_gpu(ids, offset, experts), sort_slots(ids, offset, experts)
    for name in ("order", "token", "expert", "ends"):
        assert torch.equal(getattr(found, name), getattr(expected, name).int()), name
    assert found.place is not None
    assert torch.equal(found.place, expected.places())
