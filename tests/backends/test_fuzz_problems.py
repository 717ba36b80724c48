"""The program that tries random problems: a slice of it on `cpu`, and that it finds and repeats what is wrong."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import fuzz_problems
import pytest
import torch
from fuzz_problems import Layer, compare, parts, run, solve
from gpu_layers import Format, Sizes, make_raw
from torch import Tensor

import torch_moe_ops as moe

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")


def test_random_problems_on_cpu() -> None:
    report = run("cpu", 1, range(60), 1, False, math.inf)
    assert report.solved == 60 and not report.misses, report.misses


@pytest.mark.parametrize("factor", (1.02, math.nan))
def test_what_is_wrong_is_found_and_repeated(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = moe.fused_moe_routed

    def wrong(x: Tensor, ids: Tensor, weights: Tensor, w: moe.PreparedWeights, **options: Any) -> Tensor:
        out = right(x, ids, weights, w, **options)
        return out * factor if w.backend == "cpu" and w.activation == "silu" else out

    monkeypatch.setattr(moe, "fused_moe_routed", wrong)
    monkeypatch.setattr(fuzz_problems, "layer_bound", lambda *arguments: 0.01)
    report = run("cpu", 1, range(60), 1, False, math.inf)
    assert report.misses and all("activation='silu'" in miss["what"] for miss in report.misses)
    again = solve("cpu", "cpu", 1, report.misses[0]["index"], 1, False)
    assert again is not None and dataclasses.asdict(again) == report.misses[0]


def test_a_crash_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_problems, "make_raw", lambda *arguments: 1 / 0)
    report = run("cpu", 1, range(2), 1, False, math.inf)
    assert len(report.misses) == 2 and "ZeroDivisionError" in report.misses[0]["what"]


def test_nan_and_infinity_must_show_where_they_belong() -> None:
    want = torch.tensor([1.0, math.inf, math.nan])
    assert compare(want.clone(), want, 1e-3) == 0
    for wrong in ([1.0, math.inf, 3.0], [1.0, 2.0, math.nan], [math.nan, math.inf, math.nan]):
        assert compare(torch.tensor(wrong), want, 1e-3) == math.inf
    assert compare(torch.tensor([math.inf], dtype=torch.float16), torch.tensor([1e9]), 1e-3) == 0


def test_problems_are_of_every_kind() -> None:
    drawn = [Layer.drawn(random.Random(str(i)), "cpu", "cpu") for i in range(3000)]
    assert {layer.fmt for layer in drawn} == set(fuzz_problems.formats_of("cpu", "cpu"))
    assert {layer.sizes.top_k for layer in drawn} >= {1, 22} and {m for layer in drawn for m in layer.tokens} >= {0, 1}
    assert len({layer.sizes.activation for layer in drawn}) == len(fuzz_problems.ACTIVATIONS)


def test_parts_cover_all_problems_and_keep_groups_together() -> None:
    found = parts(0, 1050, 4, 100)
    assert [i for part in found for i in part] == list(range(1050))
    assert all(part.start % 100 == 0 for part in found) and len(found) <= 4


def test_rows_of_the_intermediate_are_counted_once() -> None:
    """A bound falls with their number: repeated and foreign ids must not tighten it."""
    ids = torch.tensor([[1, 1, 9, 8], [0, 2, 2, 2], [-1, 9, 2**31 - 1, -(2**31)]], dtype=torch.int32)
    assert fuzz_problems._rows(ids, 1, 8) == 3
    assert fuzz_problems._rows(ids[:0], 1, 8) == 0


def test_the_oracle_of_rounded_weights_rounds_them_once() -> None:
    fmt = Format(fuzz_problems.ROUNDS_WEIGHTS, "int4", "none", "none", "exact")
    raw = make_raw(fmt, Sizes(4, 2, 256, 128, bias=True, activation="swigluoai"), "cpu")
    layer = {"num_experts": 5, "local_expert_offset": 1, "swiglu_limit": 3.0}
    w = fuzz_problems._oracle(raw, fmt, "cpu", layer)
    exact, _ = moe.dequantize_experts(raw)
    assert (w.scheme, w.num_experts, w.local_expert_offset, w.swiglu_limit) == ("none", 5, 1, 3.0)
    assert torch.equal(w.w13, exact.bfloat16()) and not torch.equal(w.w13.float(), exact.float())
    assert raw.w13_bias is not None and w.w13_bias is not None and torch.equal(w.w13_bias, raw.w13_bias)
