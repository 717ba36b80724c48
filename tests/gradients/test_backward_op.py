"""`moeq::moe_routed_backward` refuses what the routed op refuses, in the same words, and what is wrong with its own."""

from __future__ import annotations

from typing import Any

import abuse
import pytest
import torch
from problems import Case
from samples import SAMPLES, as_bytes, overload, packed_case, packed_sample, routed_sample
from torch import Tensor

from torch_moe_ops.core.schemas import FAMILIES, arguments

OP = "moe_routed_backward"
NAMES, DEFAULTS = arguments(OP)


def _backward_of(family: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    names, defaults = arguments(f"{family}_moe_routed" if family else "moe_routed")
    given = dict(zip(names, (*args, *defaults[len(args) :]), strict=True)) | keywords
    given |= {"scheme": FAMILIES[family][0].name, "grad_output": torch.ones(args[2].shape[0], 64)}
    return {name: given.get(name) for name in NAMES} | {"wanted": [args[1] is None, True, False, False]}


def _error(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["", "nvfp4", "int4", "fp8_block"])
def test_it_refuses_what_the_routed_op_refuses(family: str, packed: bool) -> None:
    scheme = FAMILIES[family][0]
    case = packed_case(scheme, scheme.act_formats[0]) if packed else Case(scheme=scheme.name, inter=64, bias=True)
    if packed and case.act_format == "none":
        return
    args, keywords = (packed_sample if packed else routed_sample)(Case(**{**vars(case), "hidden": 64}), "reference")
    op, routed = overload(OP), f"{family}_moe_routed" if family else "moe_routed"
    names, _ = arguments(routed)
    given = _backward_of(family, args, keywords)
    op(**given)
    refused = 0
    for i, name in enumerate(names[: len(args)]):
        if not isinstance(args[i], Tensor):
            continue
        for what, change in abuse.wrong(args[i]):
            new = change(args[i])
            text = _error(lambda i=i, new=new: overload(routed)(*args[:i], new, *args[i + 1 :], **keywords))
            got = _error(lambda name=name, new=new: op(**{**given, name: new}))
            refused += bool(text)
            if name != "hidden_states" or text:
                assert got == text.replace(f"moeq::{routed}:", f"moeq::{OP}:"), f"{name} {what}"
            else:
                assert not got or got.startswith(f"moeq::{OP}: "), f"{name} {what}"
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("grad_output", torch.ones(5, 63), "grad_output must have shape (5, 64), got (5, 63)"),
        ("grad_output", torch.ones(5, 64).long(), "grad_output must have one of the dtypes"),
        ("grad_output", torch.ones(5, 64).double(), "grad_output must have one of the dtypes"),
        ("scheme", "fp7", "scheme must be one of"),
        ("backend", "none", "backend must be one of"),
        ("wanted", [True], "wanted must have 4 values"),
        ("wanted", [True, True, True, False], "w13_bias must be given where its gradient is wanted, got None"),
        ("topk_ids", torch.zeros(4, 2, dtype=torch.int32), "topk_ids must have num_tokens = 5 rows"),
    ],
)
def test_its_own_arguments(name: str, value: Any, told: str) -> None:
    args, keywords = routed_sample(Case(), "reference")
    given = _backward_of("nvfp4", args, keywords)
    overload(OP)(**given)
    with pytest.raises(RuntimeError) as caught:
        overload(OP)(**{**given, name: value})
    assert str(caught.value).startswith(f"moeq::{OP}: {told}")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError) as of_fake:
        overload(OP)(**{**given, name: value})
    assert told in str(of_fake.value)


def test_packed_hidden_states_are_no_leaf() -> None:
    case = packed_case(FAMILIES["nvfp4"][0], "nvfp4")
    args, keywords = packed_sample(Case(**{**vars(case), "hidden": 64}), "reference")
    given = _backward_of("nvfp4", args, keywords) | {"wanted": [True, False, False, False]}
    with pytest.raises(RuntimeError, match="hidden_states must be unquantized where their gradient is wanted"):
        overload(OP)(**given)


def test_results_lie_nowhere_else_and_those_not_asked_for_are_empty() -> None:
    args, _ = SAMPLES[OP]("cpu")[0]
    args = tuple(as_bytes(a) for a in args)
    given = dict(zip(NAMES, args, strict=True)) | {"wanted": [False, True, False, False]}
    found = overload(OP)(**given)
    assert [t.numel() for t in found] == [0, given["topk_weights"].numel(), 0, 0]
    assert {t.data_ptr() for t in found if t.numel()}.isdisjoint(t.data_ptr() for t in args if isinstance(t, Tensor))
