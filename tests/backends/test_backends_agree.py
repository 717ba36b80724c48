"""Every backend that runs on this machine's CPU against the oracle, from the registry: what a new one is held to first.

What each takes beyond the plain layer: biases, constants of activations, activations without a gate, scales of gate and up
that differ, zero points, ids of other ranks and of nobody, weights on the input, router in front, 16-bit intermediates. A
layer that its requirements refuse is none of its cells. And what changes no result: what the process sets, and a NaN or an
infinity in another token.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import Case, make_batch, make_raw
from tolerances import F32, layer_bound, relative_l2

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import SCHEMES, ZERO_POINT_DTYPES

PLAIN = Case(tokens=7, experts=4, top_k=2, hidden=64, inter=128)
# Name -> layer, and what `prepare` is told besides.
VARIANTS: dict[str, tuple[Case, dict[str, float]]] = {
    "plain": (PLAIN, {}),
    "bias": (dataclasses.replace(PLAIN, bias=True), {}),
    "foreign": (dataclasses.replace(PLAIN, foreign=True), {}),
    "scales of gate and up": (dataclasses.replace(PLAIN, per_half=True, bias=True), {}),
    "limit": (PLAIN, {"swiglu_limit": 0.5}),
    "constants": (
        dataclasses.replace(PLAIN, activation="swigluoai"),
        {"swiglu_alpha": 0.7, "swiglu_beta": -0.25, "swiglu_limit": 0.5},
    ),
    **{name: (dataclasses.replace(PLAIN, activation=name, bias=True), {}) for name in ACTIVATIONS if name != "silu"},
}
CELLS = [
    (backend, scheme.name, act)
    for backend in BACKENDS
    if backend != "reference"
    for scheme in SCHEMES.values()
    for act in scheme.act_formats
    if not moe.explain(moe.Problem(scheme.name, act, hidden_size=64, intermediate_size=128)).against[backend]
]


@pytest.mark.parametrize(("backend", "scheme", "act_format"), CELLS)
def test_every_variant(backend: str, scheme: str, act_format: str) -> None:
    ran = 0
    for name, (variant, constants) in VARIANTS.items():
        case = dataclasses.replace(variant, scheme=scheme, act_format=act_format)
        raw, (x, ids, weights) = make_raw(case), make_batch(case)
        for on_input in (False, True):
            if on_input:
                ids, weights = ids[:, :1], weights[:, :1]  # models that do so take one expert
            options = {"act_format": act_format, "router_weight_on_input": on_input, **constants}
            if moe.explain(raw, **options).against[backend]:
                continue
            mine, oracle = (moe.prepare(raw, backend=b, **options) for b in (backend, "reference"))
            got, want = (moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32) for w in (mine, oracle))
            bound = layer_bound(backend, act_format, torch.float32, ids.numel() * case.inter, case.activation)
            assert relative_l2(got, want) <= bound, (name, on_input)
            ran += 1
    assert ran


@pytest.mark.parametrize(("backend", "scheme", "act_format"), CELLS)
def test_nothing_that_the_process_sets_changes_a_result(backend: str, scheme: str, act_format: str) -> None:
    """numerics.md, "Layer": float32 products may be of bfloat16 or TF32 where the process allows it."""
    case = dataclasses.replace(PLAIN, scheme=scheme, act_format=act_format)
    w, (x, ids, weights) = moe.prepare(make_raw(case), act_format=act_format, backend=backend), make_batch(case)

    def call() -> torch.Tensor:
        return moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32)

    plain, before = call(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(call(), plain)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(call(), plain)


@pytest.mark.parametrize(("backend", "scheme", "act_format"), CELLS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_show_in_their_token_alone(backend: str, scheme: str, act_format: str, value: float) -> None:
    case = dataclasses.replace(PLAIN, scheme=scheme, act_format=act_format)
    raw, (x, ids, weights) = make_raw(case), make_batch(case)
    special = x.clone()
    special[2, 5] = value
    got, want = (
        moe.fused_moe_routed(special, ids, weights, moe.prepare(raw, act_format=act_format, backend=b))
        for b in (backend, "reference")
    )
    without = moe.fused_moe_routed(x, ids, weights, moe.prepare(raw, act_format=act_format, backend=backend))
    others = torch.arange(len(x)) != 2
    assert not got[2].isfinite().all() and not want[2].isfinite().all()
    assert torch.equal(got[others], without[others])


@pytest.mark.parametrize(("backend", "scheme", "act_format"), [c for c in CELLS if SCHEMES[c[1]].has_zero_point])
def test_zero_points(backend: str, scheme: str, act_format: str) -> None:
    case = dataclasses.replace(PLAIN, scheme=scheme, act_format=act_format)
    raw, (x, ids, weights) = make_raw(case), make_batch(case)
    dtype = ZERO_POINT_DTYPES[scheme]
    values = torch.arange(3, 14) if dtype == torch.uint8 else torch.arange(-40, 40)
    g = torch.Generator().manual_seed(3)
    zeros = {
        f"{name}_zero_point": values[torch.randint(len(values), scale.shape, generator=g)].to(dtype)
        for name, scale in (("w13", raw.w13_scale), ("w2", raw.w2_scale))
        if scale is not None
    }
    raw = dataclasses.replace(raw, **zeros)
    reasons = moe.explain(raw, act_format=act_format).against[backend]
    if reasons:
        pytest.skip("; ".join(reasons))
    mine, oracle = (moe.prepare(raw, backend=b, act_format=act_format) for b in (backend, "reference"))
    got, want = (moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32) for w in (mine, oracle))
    assert relative_l2(got, want) <= layer_bound(backend, act_format, torch.float32, ids.numel() * case.inter)


@pytest.mark.parametrize(
    ("backend", "scheme"), [(b, s) for b, s, act in CELLS if act == "none" and BACKENDS[b].accuracy == "strict"]
)
def test_the_intermediate_is_rounded_to_16_bits(backend: str, scheme: str) -> None:
    """Left in float32, each row of the result is 1e-3 away. Rounded, a value beside a tie moves a row now and then."""
    case = dataclasses.replace(PLAIN, scheme=scheme, tokens=31)
    raw, (x, ids, weights) = make_raw(case), make_batch(case)
    mine, oracle = (moe.prepare(raw, backend=b, act_format="none") for b in (backend, "reference"))
    got, want = (moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32) for w in (mine, oracle))
    assert ((got - want).norm(dim=1) / want.norm(dim=1)).median() <= F32


@pytest.mark.parametrize(("backend", "scheme", "act_format"), CELLS)
def test_behind_the_router(backend: str, scheme: str, act_format: str) -> None:
    """Monolithic, also with the method that weights the input, and on the experts of one rank."""
    case = dataclasses.replace(PLAIN, scheme=scheme, act_format=act_format)
    raw, (x, _, _) = make_raw(case), make_batch(case)
    logits = torch.randn(len(x), 2 * case.experts, generator=torch.Generator().manual_seed(2))
    prepared = [
        moe.prepare(raw, backend=b, act_format=act_format, num_experts=2 * case.experts, local_expert_offset=2)
        for b in (backend, "reference")
    ]
    for routing in (moe.Routing("renormalize", top_k=4), moe.Routing("llama4", top_k=1)):
        got, want = (moe.fused_moe(x, logits, w, routing=routing, out_dtype=torch.float32) for w in prepared)
        values = len(x) * routing.top_k * case.inter
        assert relative_l2(got, want) <= layer_bound(backend, act_format, torch.float32, values)


def test_there_is_something_to_compare() -> None:
    if not moe.explain(moe.Problem("nvfp4", hidden_size=64, intermediate_size=128)).against["cpu"]:
        assert {backend for backend, _, _ in CELLS} >= {"cpu"}
