"""NVFP4 W4A4 on `cpu` against the emulating oracle: random layers of the awkward sizes of real models."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from problems import Case, make_batch
from tolerances import W4A4, relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.activations import ACTIVATIONS

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")

# A sum that lands on the other side of a rounding boundary moves one code of one intermediate: with few tokens and a
# small intermediate size, that is more than W4A4. Rare: at most one problem of a group.
ONE_CODE = 5e-2

SMALL_HIDDEN, LARGE_HIDDEN = (64, 176, 240, 1008), (2304, 2688, 2816, 2880, 3584)
SMALL_INTER, LARGE_INTER = (16, 48, 176, 192), (352, 464, 640, 704, 768, 928, 1408, 1856)


def draw(rng: random.Random, activation: str, large: bool) -> Case:
    """One of the two sizes is large in the quick part, both may be in the slow part."""
    wide = rng.random() < 0.5
    hidden = LARGE_HIDDEN if wide or large else SMALL_HIDDEN
    inter = LARGE_INTER if not wide or large else SMALL_INTER
    experts = rng.randint(1, 4)
    return Case(
        "nvfp4",
        "nvfp4",
        tokens=rng.randint(1, 5),
        experts=experts,
        top_k=rng.randint(1, min(experts, 3)),
        hidden=rng.choice(hidden),
        inter=rng.choice(inter),
        activation=activation,
        dtype=rng.choice([torch.bfloat16, torch.float16, torch.float32]),
        bias=rng.random() < 0.5,
        per_half=rng.random() < 0.5,
        input_scale=rng.choice(["none", "tensor", "expert"]),
        seed=rng.randrange(10**6),
    )


def random_layer(case: Case) -> moe.RawWeights:
    """Every code and a range of block scales, drawn directly: quantizing weights of these sizes takes seconds."""
    g = torch.Generator().manual_seed(case.seed)
    halves = 2 if ACTIVATIONS[case.activation].is_gated else 1

    def positive(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g) + 0.5

    def weight(rows: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (case.experts, rows, k // 2), generator=g, dtype=torch.uint8)
        return codes, positive(case.experts, rows, k // 16).to(torch.float8_e4m3fn)

    (w13, w13_scale), (w2, w2_scale) = weight(halves * case.inter, case.hidden), weight(case.hidden, case.inter)
    raw = moe.RawWeights(
        "nvfp4",
        w13,
        w2,
        w13_scale,
        w2_scale,
        w13_scale_2=positive(case.experts, halves if case.per_half else 1) / (3 * case.hidden**0.5),
        w2_scale_2=positive(case.experts) / (3 * case.inter**0.5),
        activation=case.activation,
    )
    changes: dict[str, Tensor] = {}
    if case.bias:
        changes["w13_bias"] = torch.randn(case.experts, halves * case.inter, generator=g) / 4
        changes["w2_bias"] = torch.randn(case.experts, case.hidden, generator=g) / 4
    if case.input_scale != "none":
        shape = () if case.input_scale == "tensor" else (case.experts,)
        changes["a13_input_scale"] = positive(*shape) * 4 / 2688
        changes["a2_input_scale"] = positive(*shape) * 4 / 2688
    return dataclasses.replace(raw, **changes)  # type: ignore[arg-type]


def error(case: Case) -> float:
    raw, batch = random_layer(case), make_batch(case)
    got, want = (
        moe.fused_moe_routed(*batch, moe.prepare(raw, act_format="nvfp4", backend=backend))
        for backend in ("cpu", "reference")
    )
    assert got.dtype == want.dtype == case.dtype
    assert want.isfinite().all() and want.abs().max() > 0
    return relative_l2(got, want)


def check(activation: str, count: int, large: bool) -> None:
    rng = random.Random(f"{activation} {large}")
    cases = [draw(rng, activation, large) for _ in range(count)]
    errors = {case: error(case) for case in cases}
    beyond = {case: e for case, e in errors.items() if not e < W4A4}
    assert len(beyond) <= 1 and all(e < ONE_CODE for e in beyond.values()), beyond


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_cpu_agrees_with_the_oracle(activation: str) -> None:
    check(activation, 6, large=False)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_cpu_agrees_with_the_oracle_at_full_sizes(activation: str) -> None:
    check(activation, 14, large=True)
