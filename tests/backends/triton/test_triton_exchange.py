"""The kernels around an exchange of tokens against torch's own operations, bit for bit: on the GPU, else interpreted."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from torch_moe_ops.expert_parallel.placement import ExpertPlacement
from torch_moe_ops.transports import launch, nccl, placing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("rule", ["nearest", "spread"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places(rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = ExpertPlacement(((0, 1, 5, 3), (2, 3, 4, 0), (3, 0, 1)), rule)
    ids = torch.randint(-2, 9, (150, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
    ids[0] = torch.iinfo(dtype).max
    ids[1] = torch.iinfo(dtype).min
    for rank in range(3):
        tables = [t.to(DEVICE) for t in placement.tables(rank).values()]
        loads = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE)
        got = launch.place(ids.to(DEVICE), *tables, loads[0], rank)
        with monkeypatch.context() as patched:
            patched.setattr(launch, "has_kernels", lambda device: False)
            want = placing.place(ids.to(DEVICE), *tables, loads[1], rank)
        assert got.dtype == want.dtype == torch.int32
        assert torch.equal(got, want)
        assert torch.equal(loads[0], loads[1])
        assert loads[0].sum() > 0
    assert launch.place(ids[:0].to(DEVICE), *tables, loads[0], 0).shape == (0, 3)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_sums(parts: int, dtype: torch.dtype, out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(parts, 40, 72, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)
    for rows in (40, 7, 0):
        got = launch.ordered_sum(values[:, :rows], out_dtype)
        with monkeypatch.context() as patched:
            patched.setattr(launch, "has_kernels", lambda device: False)
            want = nccl.ordered_sum(values[:, :rows], out_dtype)
        assert got.dtype == want.dtype == out_dtype
        assert torch.equal(got, want)
