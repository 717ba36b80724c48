"""A scale of weights that is NaN: kernels may read a number there, so nothing is prepared."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import Case, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.prepared.problem import settings_of
from torch_moe_ops.prepared.tensors import _check_scales, tensors_of

SCALED = [scheme.name for scheme in SCHEMES.values() if scheme.scales is not None]
LAYER = Case(experts=3, hidden=128, inter=128)


def _spoiled(scheme: str, name: str, dtype: torch.dtype | None = None, bits: int = 0x7F) -> moe.RawWeights:
    """A layer whose last expert has one scale that is NaN."""
    raw = make_raw(dataclasses.replace(LAYER, scheme=scheme))
    scale = getattr(raw, name).clone()
    if dtype is not None:
        scale = scale.to(dtype)
    if scale.dtype == torch.float8_e4m3fn:
        _last(scale.view(torch.uint8)).fill_(bits)
    elif scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        _last(scale.view(torch.uint8)).fill_(255)
    else:
        _last(scale).fill_(float("nan"))
    return dataclasses.replace(raw, **{name: scale})


def _last(scale: Tensor) -> Tensor:
    return scale[(-1,) * scale.ndim]


def _refused(name: str) -> Any:
    return pytest.raises(ValueError, match=f"{name} must hold no NaN, got one in expert 2")


def _layouts() -> list[tuple[str, str, str, str]]:
    """Backend, scheme, and an activation format and a weight policy that it lays the scheme out for."""
    found = []
    for name, backend in BACKENDS.items():
        for scheme in SCALED:
            for act in SCHEMES[scheme].act_formats:
                for policy in SCHEMES[scheme].policies if act == "fp8" else ("exact",):
                    problem = Problem(scheme, act, weight_policy=policy)
                    if all(r.unmet(problem) is None for r in backend.requires if r.of_format):
                        found.append((name, scheme, act, policy))
    return list({layout[:2]: layout for layout in found}.values())


@pytest.mark.parametrize(("backend", "scheme", "act", "policy"), _layouts())
def test_no_backend_lays_it_out(backend: str, scheme: str, act: str, policy: str) -> None:
    """Also where the backend does not run here."""
    options = {"activation": None, "num_experts": None, "local_expert_offset": 0, "swiglu": (None, None, None)}
    options |= {"act_format": act, "weight_policy": policy, "router_weight_on_input": False}
    for name in ("w13_scale", "w2_scale"):
        raw = _spoiled(scheme, name)
        with _refused(name):
            tensors_of(raw, BACKENDS[backend], settings_of(raw, **options), torch.device("cpu"))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_prepare_and_update_refuse_it(backend: str, bits: int) -> None:
    raw = _spoiled("nvfp4", "w2_scale", bits=bits)
    with _refused("w2_scale"):
        moe.prepare(raw, act_format="none", backend=backend)
    w = moe.prepare(make_raw(LAYER), act_format="none", backend=backend)
    before = {name: t.clone() for name, t in w.tensors().items()}
    with _refused("w2_scale"):
        w.update_(raw)
    assert all(torch.equal(t.view(torch.uint8), w.tensors()[name].view(torch.uint8)) for name, t in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_of_every_float_dtype(dtype: torch.dtype) -> None:
    with _refused("w13_scale"):
        moe.prepare(_spoiled("int4", "w13_scale", dtype), act_format="none", backend="reference")


def test_shapes_alone_are_not_asked() -> None:
    raw = make_raw(LAYER)
    assert raw.w13_scale is not None
    _check_scales(SimpleNamespace(w13_scale=raw.w13_scale.to("meta"), w2_scale=None))
