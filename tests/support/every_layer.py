"""A layer for every pair of backend and scheme, prepared on this CPU whatever the backend's home is."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import product

import pytest
import torch
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemes import SCHEMES, ZERO_POINT_DTYPES
from torch_moe_ops.prepared.problem import problem_of, settings_of

DEVICES = (("cpu", None), ("cuda", (9, 0)), ("cuda", (10, 0)))


def raw_of(case: Case, zero_points: bool, seed: int = 0) -> moe.RawWeights:
    raw = make_raw(dataclasses.replace(case, seed=seed))
    if case.scheme == "fp8" and case.input_scale == "tensor":  # a scale for each matrix, as kernels of FlashInfer want
        raw = dataclasses.replace(raw, w13_scale=raw.w13_scale[:, :1, 0] + 0, w2_scale=raw.w2_scale[:, :1, 0] + 0)
    if zero_points:
        dtype = ZERO_POINT_DTYPES[case.scheme]
        points = {n: torch.full_like(getattr(raw, n), 3 + seed, dtype=dtype) for n in ("w13_scale", "w2_scale")}
        raw = dataclasses.replace(raw, **{n.replace("scale", "zero_point"): t for n, t in points.items()})
    return raw


@cache
def layer_of(backend: str, scheme: str) -> tuple[Case, bool] | None:
    """A layer that the backend runs where it is at home, with as many tensors as it takes; None: no such scheme."""
    found = SCHEMES[scheme]
    acts = [(a, p) for p in found.policies for a in (found.act_formats if p == "exact" else ("fp8",))]
    points = (True, False) if found.has_zero_point else (False,)
    for zero, bias, scales, (act, policy) in product(points, (True, False), ("tensor", "none"), acts):
        case = Case(scheme, act, bias=bias, input_scale=scales, experts=2, hidden=256, inter=256, weight_policy=policy)
        settings = settings_of(
            raw := raw_of(case, zero), activation="silu", act_format=act, num_experts=None, local_expert_offset=0,
            swiglu=(None,) * 3, router_weight_on_input=False, weight_policy=policy,
        )  # fmt: skip
        problem = problem_of(raw, settings, torch.device("cpu"), "standard")
        at = [dataclasses.replace(problem, device=device, capability=capability) for device, capability in DEVICES]
        if any(BACKENDS[backend].fits_anywhere(p) for p in at):
            return case, zero
    return None


def prepared_here(
    backend: str, case: Case, raw: moe.RawWeights, monkeypatch: pytest.MonkeyPatch
) -> moe.PreparedWeights:
    """Prepared on this CPU, whatever the backend's home is."""
    monkeypatch.setitem(BACKENDS, backend, dataclasses.replace(BACKENDS[backend], requires=()))
    return moe.prepare(raw, act_format=case.act_format, backend=backend, weight_policy=case.weight_policy)
