"""Bad input: for every op a table of (what is changed, the message). Nothing crashes, nothing is silent."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_calls import PLAIN, WRONG, Wrong, right_call, wrong_call
from samples import overload, routed_sample

from torch_moe_ops.core.schemas import SCHEMAS, arguments
from torch_moe_ops.ops import moe, moe_routed

# Those of one scheme each. The others: test_backward_op.py, test_lora_op.py.
EXPERT_OPS = [op for op in SCHEMAS if op.partition(".")[0].endswith(("moe", "moe_routed"))]
# Form of an expert op -> the checks that it makes, in order.
CHECKS = {
    "moe_routed": ("plan_of", "check_experts", "check_topk"),
    "moe_routed.out": ("plan_of", "check_experts", "check_topk", "check_out"),
    "moe": ("check_route", "plan_of", "check_experts"),
}


def as_fake(op: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """The same call on tensors without data."""
    mode = torch._subclasses.FakeTensorMode()
    fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    fake_keywords = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
    with mode:
        overload(op)(*fake, **fake_keywords)


@pytest.mark.parametrize("row", WRONG, ids=str)
def test_message(row: Wrong) -> None:
    args, keywords = wrong_call(row)
    with pytest.raises(RuntimeError) as caught:
        overload(row.op)(*args, **keywords)
    message = str(caught.value)
    assert message.startswith(f"moeq::{row.op.removesuffix('.out')}: "), message
    assert row.told in message, message
    with pytest.raises(RuntimeError) as of_fake:
        as_fake(row.op, args, keywords)
    assert row.told in str(of_fake.value), str(of_fake.value)


@pytest.mark.parametrize("how", ["kernel", "fake"])
@pytest.mark.parametrize("op", EXPERT_OPS)
def test_expert_ops_share_their_checks(op: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one op stands for all of a form in the table; each check is told the op's own name."""
    seen: list[tuple[str, str]] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda op, *args, **keywords: seen.append((name, op)) or real(op, *args, **keywords)

    for module, name in itertools.product((moe, moe_routed), {name for names in CHECKS.values() for name in names}):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    args, keywords = right_call(op, op.rpartition("moe")[0].rstrip("_") or "plain")
    if how == "fake":
        as_fake(op, args, keywords)
    else:
        overload(op)(*args, **keywords)
    form = "moe" + op.rpartition("moe")[2]
    assert seen == [(name, op.removesuffix(".out")) for name in CHECKS[form]]


def test_every_op_has_a_row() -> None:
    ops = {row.op for row in WRONG}
    assert ops | set(EXPERT_OPS) | {"moe_routed_backward", "moe_routed_lora_backward"} == set(SCHEMAS)
    assert {op.rpartition("moe")[2] for op in ops.intersection(EXPERT_OPS)} == {"", "_routed", "_routed.out"}
    assert {op for op in EXPERT_OPS if op.endswith("moe_routed")} <= ops


def test_mixed_devices_name_the_argument() -> None:
    args, keywords = right_call("nvfp4_moe_routed", "nvfp4")
    names, _ = arguments("nvfp4_moe_routed")
    for name in ("w13", "g1_alphas", "topk_ids"):
        values = list(args)
        values[names.index(name)] = values[names.index(name)].to("meta")
        with pytest.raises(RuntimeError):
            torch.ops.moeq.nvfp4_moe_routed(*values, **keywords)


@pytest.mark.parametrize("argument", ["hidden_states", "w13_bias", "topk_weights"])
def test_out_must_not_share_memory(argument: str) -> None:
    case = dataclasses.replace(PLAIN, dtype=torch.float32)
    args, keywords = routed_sample(case, "reference")
    names, _ = arguments("moe_routed")
    shared = torch.zeros(5 * 40 + 500)
    value = args[names.index(argument)]
    inside = shared[: value.numel()].view(value.shape).copy_(value)
    values = list(args)
    values[names.index(argument)] = inside
    out = shared[: 5 * 40].view(5, 40)
    with pytest.raises(RuntimeError, match="out must not share memory with an argument"):
        torch.ops.moeq.moe_routed.out(*values, **keywords, out=out)
