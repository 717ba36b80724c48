"""What the ops remember of earlier calls: in bounded memory, and by everything that it depends on."""

from __future__ import annotations

import pytest
import torch
from problems import Case
from samples import routed_sample

from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.ops import plan

CASE = Case(scheme="none", tokens=0, hidden=64, inter=32)
NAMES, _ = arguments("moe_routed")


@pytest.fixture(autouse=True)
def _empty() -> None:
    plan._PLANS.clear()


def test_plans_do_not_grow_without_bound() -> None:
    args, keywords = routed_sample(CASE, "reference")
    for i in range(plan.MAX_KEPT + 100):
        torch.ops.moeq.moe_routed(*args, **keywords, swiglu_limit=1.0 + i)
    assert 100 <= len(plan._PLANS) <= plan.MAX_KEPT


def test_tables_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_KEPT", 8)
    for inter in range(1, 21):
        args, keywords = routed_sample(Case(scheme="none", tokens=0, hidden=8, inter=inter), "reference")
        torch.ops.moeq.moe_routed(*args, **keywords)
    (only,) = plan._PLANS.values()
    assert 1 <= len(only.tables) <= 8


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int16])
def test_a_valid_call_lets_no_other_dtype_of_w2_pass(backend: str, dtype: torch.dtype) -> None:
    args, keywords = routed_sample(Case(scheme="none", hidden=64, inter=32), backend)
    torch.ops.moeq.moe_routed(*args, **keywords)
    at = NAMES.index("w2")
    wrong = (*args[:at], torch.zeros(args[at].shape, dtype=dtype), *args[at + 1 :])
    with pytest.raises(RuntimeError, match=r"moeq::moe_routed: w2 must have dtype torch\.bfloat16, got"):
        torch.ops.moeq.moe_routed(*wrong, **keywords)
