"""Calls of a layer that are like an accepted one are compared, not checked: the same bits, the same errors."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
from typing import Any

import pytest
import torch
from accepted_calls import (
    CASE,
    MADE_AT_EACH_CALL,
    call_op,
    check_same,
    error_of,
    gradients,  # noqa: F401 (a fixture of every test)
    made_known,
    new_layer,
    runs_accepted,
)
from every_layer import layer_of, raw_of
from problems import Case, make_batch
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import cpu_accepted
from torch_moe_ops.core.call import WEIGHT_FIELDS
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.prepared import accepted, fused

# ---- what is run so


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_the_same_bits_as_the_op_for_other_tokens(scheme: str) -> None:
    case, zero = layer_of("cpu", scheme)
    w = new_layer(case, raw_of(case, zero))
    x, ids, weights = make_batch(case)
    moe.fused_moe_routed(x, ids, weights, w)
    assert runs_accepted(w, x, ids, weights) == (scheme not in MADE_AT_EACH_CALL)
    for tokens in (1, 2, len(x)):
        batch = x[:tokens].flip(0).contiguous(), ids[:tokens].contiguous(), weights[:tokens].contiguous()
        check_same(w, *batch)
        check_same(w, batch[0], batch[1].long(), batch[2].double())
        check_same(w, batch[0], batch[1][:, :1].contiguous(), batch[2][:, :1].contiguous())


@pytest.mark.parametrize("act_format", SCHEMES["nvfp4"].act_formats)
def test_activation_formats_are_kept(act_format: str) -> None:
    case = dataclasses.replace(CASE, act_format=act_format)
    batch = make_batch(case)
    w = new_layer(case)
    moe.fused_moe_routed(*batch, w)
    check_same(w, *batch)


def test_the_first_call_is_checked_and_the_next_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(CASE)
    w = new_layer()
    wanted = call_op(w, *batch)
    assert not runs_accepted(w, *batch)
    moe.fused_moe_routed(*batch, w)
    monkeypatch.setattr(fused, "_ROUTED", {})  # the op is not there any more
    assert moe.fused_moe_routed(*batch, w).equal(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    x, ids, weights = make_batch(CASE)
    w = made_known(new_layer(), x, ids, weights)
    for _ in range(3):
        out = moe.fused_moe_routed(x.to(dtype), ids, weights, w, out_dtype=out_dtype)
        assert out.dtype is (out_dtype or dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accepted, "TAKEN_BY", ())
            assert out.equal(moe.fused_moe_routed(x.to(dtype), ids, weights, w, out_dtype=out_dtype))
    assert runs_accepted(w, x.to(dtype), ids, weights) == (out_dtype is None or dtype is torch.bfloat16)


def test_options_are_the_ops() -> None:
    x, ids, weights = make_batch(CASE)
    w = made_known(new_layer(), x, ids, weights)
    out = torch.empty_like(x)
    assert moe.fused_moe_routed(x, ids, weights, w, out=out) is out
    assert out.equal(call_op(w, x, ids, weights))
    for wrong in ("float32", [torch.float32], torch.int8):
        with pytest.raises(Exception, match="nvfp4_moe_routed"):
            moe.fused_moe_routed(x, ids, weights, w, out_dtype=wrong)  # type: ignore[arg-type]


def test_more_dimensions_views_and_no_tokens() -> None:
    x, ids, weights = make_batch(CASE)
    w = made_known(new_layer(), x, ids, weights)
    wide = torch.cat([x, x], 1)[:, : x.shape[1]]
    turned = ids.t().contiguous().t(), weights.t().contiguous().t()
    assert not wide.is_contiguous() and not turned[0].is_contiguous()
    for batch in ((wide, ids, weights), (x, *turned), (x, turned[0], weights), (x, ids, turned[1])):
        assert not runs_accepted(w, *batch)
        check_same(w, *batch)
    check_same(w, torch._neg_view(x), ids, weights)
    one = torch.cat([x, x], 1)[:1, : x.shape[1]], ids[:1], weights[:1]  # contiguous, whatever its rows are apart
    assert one[0].stride() == (2 * x.shape[1], 1) and runs_accepted(w, *one)
    check_same(w, *one)
    assert moe.fused_moe_routed(x[:0], ids[:0], weights[:0], w).shape == (0, x.shape[1])
    assert moe.fused_moe_routed(x[None], ids[None], weights[None], w).equal(call_op(w, x, ids, weights)[None])


def test_inference_mode() -> None:
    x, ids, weights = make_batch(CASE)
    w = made_known(new_layer(), x, ids, weights)
    with torch.inference_mode():
        batch = x.clone(), ids.clone(), weights.clone()
        assert runs_accepted(w, *batch) and runs_accepted(w, x, ids, weights)
        check_same(w, *batch)
        check_same(w, x, ids, weights)
        assert moe.fused_moe_routed(*batch, w).is_inference()
    check_same(w, *batch)
    assert not moe.fused_moe_routed(*batch, w).is_inference()


def test_settings_of_the_process_count() -> None:
    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    isa, threads = torch.ops.moeq_C.cpu_isa(), torch.get_num_threads()
    try:
        torch.ops.moeq_C.use_cpu_isa("portable")
        torch.set_num_threads(3)
        check_same(w, *batch)
    finally:
        torch.ops.moeq_C.use_cpu_isa(isa)
        torch.set_num_threads(threads)
    with torch.autocast("cpu", torch.bfloat16):
        check_same(w, batch[0].float(), *batch[1:])
        check_same(w, *batch)


# ---- other arguments


def _bad(x: Tensor, ids: Tensor, weights: Tensor) -> dict[str, tuple[Any, Any, Any]]:
    return {
        "hidden size": (x[:, :-16].contiguous(), ids, weights),
        "one dimension": (x[0], ids, weights),
        "dtype": (x.int(), ids, weights),
        "ids of fewer tokens": (x, ids[:-1], weights),
        "ids and weights of fewer tokens": (x, ids[:-1], weights[:-1]),
        "ids of one dimension": (x, ids[:, 0].contiguous(), weights),
        "ids in float": (x, ids.float(), weights),
        "ids in int16": (x, ids.short(), weights),
        "no columns": (x, ids[:, :0], weights[:, :0]),
        "weights of fewer columns": (x, ids, weights[:, :-1].contiguous()),
        "weights turned": (x, ids, weights.t().contiguous()),
        "weights in int": (x, ids, weights.int()),
        "no tensor": (x, ids, None),
        "no ids": (x, None, weights),
        "no hidden states": (None, ids, weights),
        "a list": (x.tolist(), ids, weights),
        "another device": (x.to("meta"), ids, weights),
        "ids on another device": (x, ids.to("meta"), weights),
        "sparse": (x.to_sparse(), ids, weights),
        "sparse weights": (x, ids, weights.to_sparse()),
        "nested": (torch.nested.nested_tensor(list(x)), ids, weights),
        "bits": (x, torch.empty(ids.shape, dtype=torch.uint8).view(torch.bits8), weights),
        "memory is gone": (_without_memory(x), ids, weights),
    }


def _without_memory(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("name", sorted(_bad(*make_batch(CASE))))
def test_bad_arguments_get_the_errors_of_the_op(name: str) -> None:
    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    bad = _bad(*batch)[name]
    assert error_of(lambda: moe.fused_moe_routed(*bad, w)) == error_of(call_op, w, *bad)


# ---- other layers


def test_names_are_all_that_an_op_is_given_beside_tensors() -> None:
    for scheme, facts in SCHEMES.items():
        op = f"{facts.op_prefix}moe_routed"
        schema = getattr(torch.ops.moeq, op).default._schema
        plain = {a.name for a in schema.arguments if "Tensor" not in str(a.type)}
        assert plain - {"out_dtype", "element"} <= set(accepted.NAMES), scheme
        assert set(arguments(op)[0]) - plain - set(cpu_accepted._TOKENS) <= set(WEIGHT_FIELDS), scheme
    assert "scheme" in accepted.NAMES  # which says the element
    assert {"cpu"} == accepted.TAKEN_BY


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "gelu_tanh"},
        {"activation": "silu", "swiglu_limit": 0.25},
        {"swiglu_alpha": 0.5},
        {"swiglu_beta": 1.0},
        {"local_expert_offset": 1},
        {"num_experts": 1},
        {"num_experts": 0},
        {"act_format": "nvfp4"},
        {"act_format": "fp4"},
        {"backend": "reference"},
        {"backend": "triton"},
        {"scheme": "mxfp4"},
        {"scheme": "int4"},
        {"weight_policy": "decode"},
        {"router_weight_on_input": True},
    ],
    ids=str,
)
def test_another_name_is_another_call(change: dict[str, Any]) -> None:
    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    other = dataclasses.replace(w, **change)
    assert not runs_accepted(other, *batch) or other.num_experts == 0  # names that another test has too
    check_same(other, *batch)
    check_same(other, *batch)
    for name, value in change.items():  # which a frozen dataclass does not stop
        object.__setattr__(w, name, value)
    check_same(w, *batch)


def test_layers_of_several_sizes_with_the_same_names() -> None:
    small, large = (new_layer(Case(experts=4, top_k=2, inter=inter)) for inter in (64, 128))
    large = dataclasses.replace(large, num_experts=small.num_experts)
    batch = make_batch(CASE)
    for _ in range(3):
        for w in (small, large):
            check_same(w, *batch)
    assert runs_accepted(small, *batch) and runs_accepted(large, *batch)
    mixed = dataclasses.replace(small, w2=large.w2)
    assert not runs_accepted(mixed, *batch)
    check_same(mixed, *batch)


def test_a_tensor_more_or_less_or_in_another_place_is_another_call() -> None:
    """Of biases as long as each other, and of alphas that may be there or not."""
    case = Case("mxfp4", "none", experts=4, top_k=2, hidden=128, inter=64, bias=True)
    batch = make_batch(case)
    w = new_layer(case)
    assert w.w13_bias is not None and w.w2_bias is not None and w.w13_bias.shape == w.w2_bias.shape
    first = made_known(dataclasses.replace(w, w2_bias=None), *batch)
    for w13_bias, w2_bias in itertools.product((None, w.w13_bias), (None, w.w2_bias)):
        other = dataclasses.replace(first, w13_bias=w13_bias, w2_bias=w2_bias)
        if (w13_bias, w2_bias) != (first.w13_bias, None):
            assert not runs_accepted(other, *batch)
        check_same(other, *batch)
        check_same(other, *batch)
    for extra in ({"g1_alphas": torch.full((4,), 2.0)}, {"a1_gscale": torch.tensor(2.0)}, {"w13_zero_point": first.w2}):
        other = dataclasses.replace(first, **extra)
        assert not runs_accepted(other, *batch)
        check_same(other, *batch)  # which has no such argument


@pytest.mark.parametrize("duplicate", ["copy", "deepcopy", "save", "replace", "to"])
def test_copies_are_layers_of_their_own(duplicate: str) -> None:
    batch = make_batch(CASE)
    w = made_known(new_layer(), *batch)
    other = {"copy": copy.copy, "deepcopy": copy.deepcopy, "save": _saved, "replace": dataclasses.replace}.get(
        duplicate, lambda w: w.to("cpu")
    )(w)
    assert vars(other).keys() == vars(w).keys()
    check_same(other, *batch)
    other.w13.bitwise_xor_(1)
    check_same(other, *batch)
    check_same(w, *batch)


def _saved(w: moe.PreparedWeights) -> moe.PreparedWeights:
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    loaded: moe.PreparedWeights = torch.load(file, weights_only=False)
    return loaded
