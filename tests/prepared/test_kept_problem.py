"""Prepared weights keep the problem that prepare had: explain, update_, save and load tell no other one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from every_layer import layer_of, prepared_here, raw_of
from paths import DATA
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemes import SCHEMES

SAVED = DATA / "prepared"


def _problem_of_raw(raw: moe.RawWeights, w: moe.PreparedWeights) -> moe.Problem:
    return moe.explain(raw, device=w.device, **w.options()).problem


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_explain_has_the_problem_of_prepare(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layers = [layer for scheme in SCHEMES if (layer := layer_of(backend, scheme))]
    assert layers
    for layer in layers:
        raw = raw_of(*layer)
        w = prepared_here(backend, layer[0], raw, monkeypatch)
        wanted = _problem_of_raw(raw, w)
        explained = moe.explain(w)
        assert (explained.problem, explained.chosen, explained.requested) == (wanted, backend, backend)
        assert w.to("meta").problem == dataclasses.replace(wanted, device="meta")
        w.save(tmp_path / "layer.safetensors")
        again = moe.PreparedWeights.load(tmp_path / "layer.safetensors")
        assert (again.problem, again.requested) == (wanted, backend)


@pytest.mark.parametrize(
    ("scheme", "scales", "text"),
    [
        ("int8", {"w13_scale": (4, 96, 1), "w2_scale": (4, 64, 1)}, "channel"),
        ("int8", {"w13_scale": (4, 96, 2), "w2_scale": (4, 64, 1)}, "group"),
        ("int4", {"w13_scale": (4, 96, 2), "w2_scale": (4, 64, 1)}, "float32 per 32, float32 per row"),
        ("fp8", {"w13_scale": (4, 2), "w2_scale": (4, 1)}, "half"),
        ("fp8", {"w13_scale": (4, 1), "w2_scale": (4, 1)}, "tensor"),
        ("fp8", {"w13_scale": (4, 96, 1), "w2_scale": (4, 64, 1)}, "channel"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_shares_a_scale(backend: str, scheme: str, scales: dict[str, tuple[int, ...]], text: str) -> None:
    if backend in moe.explain(moe.Problem(scheme)).against and moe.explain(moe.Problem(scheme)).against[backend]:
        pytest.skip(f"{backend} is not here")
    raw = make_raw(Case(scheme=scheme))
    raw = dataclasses.replace(raw, **{name: torch.rand(shape) + 0.5 for name, shape in scales.items()})
    w = moe.prepare(raw, backend=backend)
    assert w.problem.weight_scales == text
    assert moe.explain(w).problem == moe.explain(raw).problem


def test_the_backend_that_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_raw(Case())
    monkeypatch.delenv("MOEQ_BACKEND", raising=False)
    assert (moe.prepare(raw).requested, moe.explain(moe.prepare(raw)).requested) == ("auto", "auto")
    assert moe.explain(moe.prepare(raw, backend="reference")).requested == "reference"
    monkeypatch.setenv("MOEQ_BACKEND", "reference")
    w = moe.prepare(raw)
    monkeypatch.delenv("MOEQ_BACKEND")
    assert (w.requested, moe.explain(w).chosen) == ("reference", "reference")
    assert moe.explain(w, backend="auto").chosen == moe.prepare(raw).backend


def test_options_make_prepare_do_the_same_again() -> None:
    raw = make_raw(Case(activation="swigluoai", act_format="nvfp4", input_scale="expert"))
    w = moe.prepare(raw, act_format="none", num_experts=9, local_expert_offset=3, swiglu_limit=5.0, backend="reference")
    again = moe.prepare(moe.restore(w), backend=w.requested, **w.options())
    assert again.metadata() == w.metadata()
    assert moe.restore(again).equal(raw)


def test_update_refuses_another_problem_that_the_layout_packs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(scheme="int4", hidden=256, inter=256, experts=2)
    rows = {"w13_scale": (2, 512, 1), "w2_scale": (2, 256, 1)}
    scales = {name: torch.rand(shape) + 0.5 for name, shape in rows.items()}
    half = dataclasses.replace(make_raw(case), **{name: t.half() for name, t in scales.items()})
    points = {
        name.replace("scale", "zero_point"): torch.full(shape, 7, dtype=torch.uint8) for name, shape in rows.items()
    }
    other = dataclasses.replace(half, **points)
    w = prepared_here("cuda_sm90_int4", case, half, monkeypatch)
    text = "update_: weight_scales must be 'float16 per row' as prepared, got 'float16 per row with zero points'"
    with pytest.raises(ValueError, match=text):
        w.update_(other)
    assert moe.restore(w).equal(half), "nothing was written"


OLD = {
    "nvfp4_cpu": {"act_format": "nvfp4", "has_bias": True, "per_half_alphas": True, "input_scale": "expert"},
    "int4_cpu": {
        "weight_scales": "float16 per 32 with zero points, float16 per row with zero points",
        "constants": (1.702, 1.0, 5.0),
        "has_bias": True,
    },
    "int8_cpu": {"act_format": "int8", "weight_scales": "channel", "input_scale": "tensor"},
    "fp8_reference": {"act_format": "fp8", "weight_scales": "half"},
    "none_cpu": {"dtype": torch.float16},
}


@pytest.mark.parametrize("name", sorted(OLD))
def test_a_file_of_before_the_problem_was_kept_loads(name: str) -> None:
    """Version 0.1.0 wrote them, with RawWeights.save beside."""
    raw = moe.RawWeights.load(SAVED / f"{name}.raw.safetensors")
    w = moe.PreparedWeights.load(SAVED / f"{name}.safetensors")
    assert moe.restore(w).equal(raw)
    assert w.problem == _problem_of_raw(raw, w)
    assert {field: getattr(w.problem, field) for field in OLD[name]} == OLD[name]
    assert (w.requested, w.num_experts, w.local_expert_offset) == ("auto", 5, 2)
    fresh = moe.prepare(raw, backend=w.backend, **w.options())
    assert fresh.tensors().keys() == w.tensors().keys()
    for field, tensor in fresh.tensors().items():
        assert torch.equal(tensor.flatten().view(torch.uint8), w.tensors()[field].flatten().view(torch.uint8)), field


def test_an_object_of_before_the_problem_was_kept() -> None:
    w = moe.prepare(make_raw(Case(scheme="int8")), backend="reference")
    old = dataclasses.replace(w, posed="")
    assert (old.problem, old.requested) == (dataclasses.replace(w.problem, accuracy="strict"), "auto")
    assert old.update_(make_raw(Case(scheme="int8", seed=3))) is old


@pytest.mark.parametrize("posed", ["nonsense", "%7B%7D", "[]"])
def test_a_file_whose_problem_cannot_be_read_is_refused(posed: str, tmp_path: Path) -> None:
    w = dataclasses.replace(moe.prepare(make_raw(Case())), posed=posed)
    w.save(tmp_path / "layer.safetensors")
    with pytest.raises(ValueError, match=r"layer.safetensors: posed must be what prepare writes, got "):
        moe.PreparedWeights.load(tmp_path / "layer.safetensors")
