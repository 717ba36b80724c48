"""What prepare and restore return is memory of its own: writing into one side changes nothing on the other."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import product

import pytest
import torch
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.prepare import problem_of, settings_of
from torch_moe_ops.schemes import SCHEMES, ZERO_POINT_DTYPES

DEVICES = (("cpu", None), ("cuda", (9, 0)), ("cuda", (10, 0)))


def _raw(case: Case, zero_points: bool, seed: int = 0) -> moe.RawWeights:
    raw = make_raw(dataclasses.replace(case, seed=seed))
    if case.scheme == "fp8" and case.input_scale == "tensor":  # a scale for each matrix, as kernels of FlashInfer want
        raw = dataclasses.replace(raw, w13_scale=raw.w13_scale[:, :1, 0] + 0, w2_scale=raw.w2_scale[:, :1, 0] + 0)
    if zero_points:
        dtype = ZERO_POINT_DTYPES[case.scheme]
        points = {n: torch.full_like(getattr(raw, n), 3 + seed, dtype=dtype) for n in ("w13_scale", "w2_scale")}
        raw = dataclasses.replace(raw, **{n.replace("scale", "zero_point"): t for n, t in points.items()})
    return raw


@cache
def _layer_of(backend: str, scheme: str) -> tuple[Case, bool] | None:
    """A layer that the backend runs where it is at home, with as many tensors as it takes; None: no such scheme."""
    found = SCHEMES[scheme]
    acts = [(a, p) for p in found.policies for a in (found.act_formats if p == "exact" else ("fp8",))]
    points = (True, False) if found.has_zero_point else (False,)
    for zero, bias, scales, (act, policy) in product(points, (True, False), ("tensor", "none"), acts):
        case = Case(scheme, act, bias=bias, input_scale=scales, experts=2, hidden=256, inter=256, weight_policy=policy)
        settings = settings_of(
            raw := _raw(case, zero), activation="silu", act_format=act, num_experts=None, local_expert_offset=0,
            swiglu=(None,) * 3, router_weight_on_input=False, weight_policy=policy,
        )  # fmt: skip
        problem = problem_of(raw, settings, torch.device("cpu"))
        at = [dataclasses.replace(problem, device=device, capability=capability) for device, capability in DEVICES]
        if any(BACKENDS[backend].fits_anywhere(p) for p in at):
            return case, zero
    return None


def _prepared(backend: str, case: Case, raw: moe.RawWeights, monkeypatch: pytest.MonkeyPatch) -> moe.PreparedWeights:
    """Prepared on this CPU, whatever the backend's home is."""
    monkeypatch.setitem(BACKENDS, backend, dataclasses.replace(BACKENDS[backend], requires=()))
    return moe.prepare(raw, act_format=case.act_format, backend=backend, weight_policy=case.weight_policy)


def _storages(weights: moe.RawWeights | moe.PreparedWeights) -> dict[int, str]:
    return {t.untyped_storage().data_ptr(): name for name, t in weights.tensors().items()}


def _copied(raw: moe.RawWeights) -> moe.RawWeights:
    return dataclasses.replace(raw, **{name: t.clone() for name, t in raw.tensors().items()})


@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - {"cuda_sm90_folded"}))  # folded weights are not restored
def test_an_update_leaves_what_was_restored_and_what_was_prepared(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [layer for scheme in SCHEMES if (layer := _layer_of(backend, scheme))]
    assert layers
    for case, zero in layers:
        _update_and_compare(backend, case, zero, monkeypatch)


def _update_and_compare(backend: str, case: Case, zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, new = _raw(case, zero), _raw(case, zero, seed=1)
    given, wanted = _copied(raw), _copied(new)
    w = _prepared(backend, case, raw, monkeypatch)
    back = moe.restore(w)
    assert back.equal(given)
    for one, other in ((raw, w), (back, w), (back, raw)):
        shared = _storages(one).keys() & _storages(other).keys()
        assert not shared, (case.scheme, [(_storages(one)[s], _storages(other)[s]) for s in shared])
    w.update_(new)
    assert raw.equal(given), (case.scheme, "prepare's argument")
    assert back.equal(given), (case.scheme, "what restore returned before")
    assert new.equal(wanted) and moe.restore(w).equal(wanted)


def test_every_backend_and_scheme_has_such_a_layer() -> None:
    covered = {pair for pair in product(BACKENDS, SCHEMES) if _layer_of(*pair)}
    assert {name for name, _ in covered} == BACKENDS.keys()
    for backend in ("reference", "cpu", "triton"):
        assert {scheme for name, scheme in covered if name == backend} == SCHEMES.keys()
    assert all(_layer_of("reference", scheme)[0].bias for scheme in SCHEMES)
    assert all(_layer_of("reference", scheme)[1] for scheme in ("int4", "int8"))


def test_rows_that_are_views_of_a_larger_tensor_are_copied() -> None:
    """A rank's share is a view: another address than its tensor's, the same memory."""
    case = Case(experts=6, bias=True, input_scale="tensor")
    raw, new = (make_raw(dataclasses.replace(case, seed=seed)) for seed in (0, 1))
    given = _copied(raw)
    shares = [dataclasses.replace(r, **{n: t[2:4] for n, t in r.tensors().items() if t.ndim}) for r in (raw, new)]
    w = moe.prepare(shares[0], backend="reference", act_format="nvfp4")
    assert not _storages(raw).keys() & _storages(w).keys()
    w.update_(shares[1])
    assert raw.equal(given) and moe.restore(w).equal(shares[1])
