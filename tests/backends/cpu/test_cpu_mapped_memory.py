"""Memory that goes back to the system with its tensor."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import torch_moe_ops as moe
from torch_moe_ops.core.mapped_memory import mapped_empty

CPU = torch.device("cpu")


def test_large_tensors_are_written_and_read_like_others() -> None:
    large = mapped_empty((3, 1 << 19), torch.bfloat16, CPU)
    assert large.data_ptr() % 4096 == 0  # a mapping's
    assert torch.equal(large.fill_(2.5), torch.full((3, 1 << 19), 2.5, dtype=torch.bfloat16))
    assert mapped_empty((3, 4), torch.int32, torch.device("meta")).is_meta


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_experts_without_data_are_prepared() -> None:
    """What large tensors would be is found out without their memory: packing makes no tensor that has some."""
    pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
    raw = moe.quantize_experts(torch.randn(2, 1024, 1024), torch.randn(2, 1024, 512), scheme="mxint4")
    assert raw.w13.nbytes >= 1 << 20
    want = moe.prepare(raw, backend="cpu")
    with FakeTensorMode() as mode:
        fakes: dict[str, Tensor] = {name: mode.from_tensor(t) for name, t in raw.tensors().items()}
        got = moe.prepare(dataclasses.replace(raw, **fakes), backend="cpu")  # type: ignore[arg-type]
    assert isinstance(got.w13, FakeTensor)
    assert (got.w13.shape, got.w13.dtype) == (want.w13.shape, want.w13.dtype)
