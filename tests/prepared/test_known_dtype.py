"""The dtype of the hidden states, where a caller of `prepare` knows it, decides which backends may be taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_moe_ops as moe
from torch_moe_ops.prepared import problem as problems


@pytest.fixture
def raw() -> moe.RawWeights:
    torch.manual_seed(0)
    return moe.quantize_experts(torch.randn(4, 128, 64), torch.randn(4, 64, 64), scheme="nvfp4")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of `explain` is asked of such a GPU, though there may be none."""
    monkeypatch.setattr(problems, "device_fields", lambda device: {"device": "cuda", "capability": (9, 0)})


def test_backends_that_do_not_take_it_say_so(raw: moe.RawWeights, on_hopper: None) -> None:
    reason = "dtype must be torch.bfloat16, which is what the kernels read, got torch.float16"
    assert not any("dtype" in why for why in moe.explain(raw, dtype=torch.float16).against["cuda_sm90"])
    for name in ("cuda_sm90_int4", "cuda_sm90_packed", "cuda_sm90_folded", "cuda_sm90_bf16"):
        assert reason in moe.explain(raw, act_format="none", dtype=torch.float16).against[name], name
        for dtype in (None, torch.bfloat16):
            assert reason not in moe.explain(raw, act_format="none", dtype=dtype).against[name], name
    assert not any("dtype" in why for why in moe.explain(raw, dtype=torch.float16).against["triton"])


def test_it_is_kept(raw: moe.RawWeights, tmp_path: Path) -> None:
    w = moe.prepare(raw, dtype=torch.float16)
    assert w.problem.dtype == torch.float16 and w.options()["dtype"] == torch.float16
    w.save(tmp_path / "layer.safetensors")
    assert moe.PreparedWeights.load(tmp_path / "layer.safetensors").problem.dtype == torch.float16
    w.update_(raw)
    assert moe.prepare(raw, **w.options()).problem == w.problem
    assert moe.prepare(raw).problem.dtype is None


def test_unquantized_experts_know_their_own() -> None:
    raw = moe.RawWeights(scheme="none", w13=torch.randn(4, 64, 32).bfloat16(), w2=torch.randn(4, 32, 32).bfloat16())
    assert moe.prepare(raw, dtype=torch.float16).problem.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "float16"])
def test_others_are_refused(raw: moe.RawWeights, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"prepare: dtype must be None or one of \['torch.*'\], got "):
        moe.prepare(raw, dtype=dtype)
