"""prepare, restore, update_, save, load: exact, and refusing what they cannot mean."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixture_layers import CHECKPOINTS, LAYERS
from hypothesis import given
from hypothesis import strategies as st
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.sm90 import scales
from torch_moe_ops.core.same_bits import same_bits
from torch_moe_ops.core.schemes import SCHEMES

RUNNABLE = [
    name
    for name in BACKENDS
    if not all(
        moe.explain(moe.Problem("nvfp4", act, hidden_size=64, intermediate_size=48)).against[name]
        for act in SCHEMES["nvfp4"].act_formats
    )
]
backends = pytest.mark.parametrize("backend", RUNNABLE)


def prepared(raw: moe.RawWeights, backend: str, **options: Any) -> moe.PreparedWeights:
    """By a backend that runs it, for the scheme's own activation format or the first other one that the backend runs.

    A test of what it refuses is skipped.
    """
    acts = (
        [{"act_format": options.pop("act_format")}]
        if "act_format" in options
        else [{}, *({"act_format": act} for act in SCHEMES[raw.scheme].act_formats)]
    )
    against = [moe.explain(raw, **act, **options).against[backend] for act in acts]
    if all(against):
        pytest.skip(f"{backend}: {'; '.join(against[0])}")
    return moe.prepare(raw, backend=backend, **acts[against.index([])], **options)


cases = st.builds(
    Case,
    scheme=st.sampled_from(["nvfp4", "none"]),
    experts=st.integers(1, 5),
    hidden=st.integers(1, 12).map(lambda n: 16 * n),
    inter=st.integers(1, 12).map(lambda n: 16 * n),
    activation=st.sampled_from(["silu", "relu2_no_mul"]),
    bias=st.booleans(),
    per_half=st.booleans(),
    input_scale=st.sampled_from(["none", "tensor", "expert"]),
    seed=st.integers(0, 1000),
)


@backends
@given(case=cases)
def test_restore_inverts_prepare(backend: str, case: Case) -> None:
    if case.scheme == "none":
        case = dataclasses.replace(case, input_scale="none")
    raw = make_raw(case)
    w = prepared(raw, backend)
    assert moe.restore(w).equal(raw)


@backends
@pytest.mark.parametrize(("hidden", "inter"), [(1, 1), (7, 9), (40, 24), (17, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_restore_of_unquantized_weights_of_any_size(backend: str, hidden: int, inter: int, dtype: torch.dtype) -> None:
    raw = make_raw(Case(scheme="none", hidden=hidden, inter=inter, dtype=dtype, bias=True))
    assert moe.restore(prepared(raw, backend)).equal(raw)


@backends
@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_restore_of_checkpoints(backend: str, name: str, layer: int) -> None:
    raw = moe.load_experts(CHECKPOINTS / name, layer=layer)
    assert moe.restore(prepared(raw, backend)).equal(raw)


@backends
def test_update_keeps_every_address(backend: str) -> None:
    case = Case(act_format="nvfp4", input_scale="expert", per_half=True, bias=True)
    w = prepared(make_raw(case), backend)
    before = {name: t.data_ptr() for name, t in w.tensors().items()}
    new = make_raw(dataclasses.replace(case, seed=99))
    x, ids, weights = make_batch(case)
    old_out = moe.fused_moe_routed(x, ids, weights, w)
    assert w.update_(new) is w
    assert {name: t.data_ptr() for name, t in w.tensors().items()} == before
    fresh = prepared(new, backend)
    out = moe.fused_moe_routed(x, ids, weights, w)
    assert torch.equal(out, moe.fused_moe_routed(x, ids, weights, fresh))
    assert not torch.equal(out, old_out)


def test_update_does_not_write_into_the_raw_weights_it_was_made_from() -> None:
    """The linear layout shares tensors with its source until then: an update must not reach it."""
    raw = make_raw(Case())
    kept = {name: t.clone() for name, t in raw.tensors().items()}
    w = moe.prepare(raw, backend="reference")
    w.update_(make_raw(Case(seed=5)))
    assert all(torch.equal(t.view(torch.uint8), raw.tensors()[name].view(torch.uint8)) for name, t in kept.items())


def test_update_refuses_another_problem() -> None:
    w = moe.prepare(make_raw(Case()))
    for case, text in (
        (Case(hidden=80), "hidden_size must be 64 as prepared, got 80"),
        (Case(experts=3), "num_experts must be 4 as prepared, got 3"),
        (Case(scheme="none"), "scheme must be 'nvfp4' as prepared, got 'none'"),
        (Case(bias=True), "w13_bias_dtype must be None as prepared"),
        (Case(per_half=True), "w13_scale_2 must be"),
        (Case(activation="gelu"), "activation must be 'silu' as prepared, got 'gelu'"),
    ):
        with pytest.raises(ValueError, match=text.split("[")[0]):
            w.update_(make_raw(case))


@backends
def test_save_and_load(backend: str, tmp_path: Path) -> None:
    case = Case(act_format="nvfp4", input_scale="expert", per_half=True, bias=True)
    w = prepared(make_raw(case), backend, num_experts=9, local_expert_offset=2)
    w.save(tmp_path / "layer.safetensors")
    again = moe.PreparedWeights.load(tmp_path / "layer.safetensors")
    assert again.metadata() == w.metadata()
    assert moe.restore(again).equal(moe.restore(w))


def test_raw_weights_save_and_load(tmp_path: Path) -> None:
    raw = make_raw(Case(input_scale="expert", per_half=True, bias=True, activation="swigluoai"))
    raw.save(tmp_path / "raw.safetensors")
    assert moe.RawWeights.load(tmp_path / "raw.safetensors").equal(raw)


def test_load_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "layer.safetensors"
    w = moe.prepare(make_raw(Case()), backend="reference")
    good = {name: t.contiguous() for name, t in w.tensors().items()}

    def refused(text: str, tensors: dict[str, torch.Tensor], **header: str) -> None:
        save_file(tensors, str(path), metadata=header)
        with pytest.raises(ValueError, match=text):
            moe.PreparedWeights.load(path)

    plain = w.metadata()
    refused("moeq_format must be 1, got None", good)
    refused("moeq must be the text of a JSON object, got None", good, moeq_format="1")
    refused("moeq must be a JSON object", good, moeq_format="1", moeq="{")
    old = json.dumps(plain | {"layout": "linear_v0"})
    refused("layout must be 'linear_v1' for backend 'reference', got 'linear_v0'", good, moeq_format="1", moeq=old)
    other = json.dumps(plain | {"backend": "x"})
    refused("backend must be one of .*, got 'x'", good, moeq_format="1", moeq=other)
    text = json.dumps(plain)
    refused("unknown \\['w99'\\]", good | {"w99": w.w2_scale_2.clone()}, moeq_format="1", moeq=text)
    refused("missing \\['w13'\\]", {n: t for n, t in good.items() if n != "w13"}, moeq_format="1", moeq=text)
    without = {n: t for n, t in good.items() if n != "w13_scale"}
    refused("w13_scale must have shape .*, got None", without, moeq_format="1", moeq=text)
    refused("w2 must have shape", good | {"w2": w.w2[:, :1].contiguous()}, moeq_format="1", moeq=text)
    path.write_bytes(b"garbage")
    with pytest.raises(ValueError, match="is truncated: the header length needs 8 bytes"):
        moe.PreparedWeights.load(path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activation": "nonsense"}, "activation must be one of"),
        ({"activation": "relu2_no_mul"}, "activation 'relu2_no_mul' needs w13 with only up rows"),
        ({"act_format": "nonsense"}, "act_format must be one of"),
        ({"weight_policy": "folded"}, "weight_policy must be one of \\['exact'\\]"),
        ({"num_experts": 3}, "num_experts must be at least 4"),
        ({"local_expert_offset": -1}, "local_expert_offset must be at least 0"),
        ({"local_expert_offset": 2, "num_experts": 5}, "num_experts must be at least 6"),
        ({"backend": "nonsense"}, "backend must be 'auto' or one of"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
    ],
)
def test_prepare_refuses(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        moe.prepare(make_raw(Case()), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("raw", None, "raw must be RawWeights, got NoneType"),
        ("num_experts", "8", "num_experts must be an int, got str"),
        ("num_experts", 8.0, "num_experts must be an int, got float"),
        ("local_expert_offset", 1.5, "local_expert_offset must be an int, got float"),
        ("local_expert_offset", True, "local_expert_offset must be an int, got bool"),
        ("swiglu_limit", "7", "swiglu_limit must be a number, got str"),
        ("swiglu_limit", torch.tensor(7.0), "swiglu_limit must be a number, got Tensor"),
    ],
)
def test_prepare_refuses_other_types(name: str, value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        moe.prepare(**({"raw": make_raw(Case())} | {name: value}))


def test_numbers_of_experts_may_be_of_other_libraries() -> None:
    w = moe.prepare(make_raw(Case()), num_experts=np.int64(9), local_expert_offset=torch.tensor(2))  # type: ignore[arg-type]
    assert (type(w.num_experts), w.num_experts, type(w.local_expert_offset), w.local_expert_offset) == (int, 9, int, 2)


def test_constants_come_from_the_checkpoint_unless_given() -> None:
    raw = dataclasses.replace(make_raw(Case(activation="swigluoai")), swiglu_limit=3.0)
    assert moe.prepare(raw).swiglu_limit == 3.0
    assert moe.prepare(raw, swiglu_limit=5.0).swiglu_limit == 5.0
    # Constants of one activation mean nothing to another.
    assert moe.prepare(raw, activation="silu").swiglu_limit is None


def test_moving_refuses_dtypes() -> None:
    w = moe.prepare(make_raw(Case()))
    for what in (w, moe.restore(w)):
        with pytest.raises((RuntimeError, TypeError)):
            what.to(torch.float16)  # type: ignore[arg-type]


def test_prepared_weights_carry_no_history() -> None:
    w13, w2 = torch.nn.Parameter(torch.randn(2, 8, 8)), torch.nn.Parameter(torch.randn(2, 8, 4))
    w = moe.prepare(moe.quantize_experts(w13, w2, "none"), backend="reference")
    assert not any(t.requires_grad for t in w.tensors().values())
    copy.deepcopy(w)


def test_dequantized_experts_are_float32_whatever_the_default() -> None:
    raw, before = make_raw(Case()), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert {t.dtype for t in moe.dequantize_experts(raw)} == {torch.float32}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("backend", "scheme"), [("cuda_sm90_folded", "nvfp4"), ("cuda_sm90_int4", "int4")])
def test_layouts_are_the_same_whatever_the_default(backend: str, scheme: str) -> None:
    """Whoever loads a model often has its dtype as default meanwhile; float16 has no 2^112."""
    raw, before = make_raw(Case(scheme=scheme, inter=64)), torch.get_default_dtype()
    scales._units.cache_clear()  # a first call
    try:
        torch.set_default_dtype(torch.float16)
        found = BACKENDS[backend].prepare(raw)
    finally:
        torch.set_default_dtype(before)
        scales._units.cache_clear()
    expected = BACKENDS[backend].prepare(raw)
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert all(same_bits(found[name], t) for name, t in expected.items())


def test_scalars_follow_the_stated_formulas() -> None:
    raw = make_raw(Case(input_scale="expert", per_half=True))
    w = moe.prepare(raw, act_format="nvfp4", backend="reference")
    assert torch.equal(w.g1_alphas, raw.a13_input_scale[:, None] * raw.w13_scale_2)
    assert torch.equal(w.a1_gscale, 1.0 / raw.a13_input_scale)
    assert torch.equal(w.g2_alphas, raw.a2_input_scale * raw.w2_scale_2)
    weight_only = moe.prepare(raw, act_format="none", backend="reference")
    assert torch.equal(weight_only.g1_alphas, raw.w13_scale_2)
    assert weight_only.a1_gscale is None and weight_only.a2_gscale is None


RAW_ERRORS = [
    ("w13_scale_2", lambda t: t * float("nan"), "w13_scale_2 must be finite and positive, got nan at"),
    ("w2_scale_2", lambda t: t * 0, "w2_scale_2 must be finite and positive, got 0.0 at"),
    ("a2_input_scale", lambda t: torch.tensor(float("inf")), "a2_input_scale must be finite and positive, got inf"),
    ("swiglu_limit", lambda t: -1.0, "swiglu_limit must be positive, got -1.0"),
    ("swiglu_alpha", lambda t: "7", "swiglu_alpha must be None or a number, got str"),
    ("w13_bias", lambda t: [1.0], "w13_bias must be a Tensor or None, got list"),
    ("w13", lambda t: t.to(torch.int64), "w13 must have a dtype of"),
    ("w13", lambda t: t[0], "w13 must have 3 dimensions"),
    ("w13", lambda t: t[:, :50], "w13 must have 2 \\* intermediate_size = 96 rows, or 48 where not gated, got 50"),
    ("w2", lambda t: t[:3], "w2 must hold 4 experts like w13"),
    ("w13_scale", lambda t: None, "w13_scale must be a torch.float8_e4m3fn Tensor of shape"),
    ("w13_scale", lambda t: t.float(), "w13_scale must have dtype torch.float8_e4m3fn"),
    ("w2_scale", lambda t: t[..., :-1], "w2_scale must have shape"),
    ("w13_scale_2", lambda t: t.flatten(), "w13_scale_2 must have shape"),
    ("w2_scale_2", lambda t: t.double(), "w2_scale_2 must have dtype torch.float32"),
    ("a13_input_scale", lambda t: torch.ones(3), "a13_input_scale must have shape \\(\\) or \\(4,\\)"),
    ("w13_bias", lambda t: torch.ones(4, 3), "w13_bias must have shape"),
    ("w2_bias", lambda t: torch.ones(4, 64, dtype=torch.int32), "w2_bias must have one of the dtypes"),
    ("activation", lambda t: "nonsense", "activation must be None or one of"),
    ("activation", lambda t: "relu2_no_mul", "activation must fit w13"),
    ("swiglu_limit", lambda t: float("nan"), "swiglu_limit must be None or a number"),
    ("scheme", lambda t: "nonsense", "scheme must be one of"),
]


@pytest.mark.parametrize(("field", "change", "text"), RAW_ERRORS)
def test_raw_weights_are_validated(field: str, change: object, text: str) -> None:
    raw = make_raw(Case())
    with pytest.raises((ValueError, TypeError), match=text):
        dataclasses.replace(raw, **{field: change(getattr(raw, field))})  # type: ignore[operator]
