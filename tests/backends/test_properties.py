"""What holds for every layer: properties over schemes, activation formats and backends.

Hypothesis draws what is run, sizes and a seed; the seed makes the elements. On `cpu` equal means bit for bit. On
`reference`, whose matrix products are the library's own and may add in another order for another batch, it means
1e-6; hidden states are float32 there, and one row may show a code of the intermediate that fell on the other side of
a rounding boundary.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Case, make_batch, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import registry
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import SCHEMES

CLOSE = 1e-6
# One code of one intermediate, in a row of the sizes drawn here.
ONE_CODE = 0.2


def _subjects(backend: str) -> list[tuple[str, str, str]]:
    """(scheme, act_format, weight_policy) of everything that a backend runs on this machine."""
    found = []
    for scheme in SCHEMES.values():
        for act in scheme.act_formats:
            for policy in scheme.policies if act == "fp8" else ("exact",):
                problem = moe.Problem(scheme.name, act, hidden_size=64, intermediate_size=64, weight_policy=policy)
                if not moe.explain(problem).against[backend]:
                    found.append((scheme.name, act, policy))
    return found


SUBJECTS = {name: found for name in registry.BACKENDS if (found := _subjects(name))}
BACKENDS = tuple(dict.fromkeys(("reference", "cpu", *SUBJECTS)))  # those that run on a CPU, and why one does not
backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(b, marks=[] if b in SUBJECTS else pytest.mark.skip(reason=f"{b} runs nothing here"))
        for b in BACKENDS
    ],
)


def sizes(scheme: str, largest: int = 5) -> st.SearchStrategy[int]:
    unit = max(SCHEMES[scheme].size_multiple, 8)
    return st.integers(1, largest).map(lambda n: n * unit)


@st.composite
def layers(draw: st.DrawFn, backend: str, **fixed: Any) -> Case:
    """Any layer that the backend runs. `fixed` fields are not drawn."""
    scheme, act, policy = draw(st.sampled_from(SUBJECTS[backend]))
    static = act in SCHEMES[scheme].static_acts
    any_dtype = backend == "cpu"
    fields: dict[str, Any] = {
        "tokens": draw(st.integers(1, 9)),
        "experts": (experts := draw(st.integers(1, 6))),
        "top_k": draw(st.integers(1, experts)),
        "hidden": draw(sizes(scheme)),
        "inter": draw(sizes(scheme)),
        "activation": draw(st.sampled_from(list(ACTIVATIONS))),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])) if any_dtype else torch.float32,
        "bias": draw(st.booleans()),
        "per_half": draw(st.booleans()),
        "input_scale": draw(st.sampled_from(["none", "tensor", "expert"])) if static else "none",
        "seed": draw(st.integers(0, 999)),
    }
    return Case(scheme, act, weight_policy=policy, **{**fields, **fixed})


def prepared(raw: moe.RawWeights, case: Case, backend: str, **options: Any) -> moe.PreparedWeights:
    policy = case.weight_policy
    return moe.prepare(raw, act_format=case.act_format, backend=backend, weight_policy=policy, **options)


def run(w: moe.PreparedWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32)


def assert_same(got: Tensor, want: Tensor, backend: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    if backend == "cpu":
        assert torch.equal(got, want)
        return
    errors = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1).clamp_min(1e-30)
    beyond = errors[errors > CLOSE]
    assert len(beyond) <= 1 and (beyond < ONE_CODE).all(), errors


def assert_adds_up(parts: list[Tensor], want: Tensor) -> None:
    """In float32, so relative to the size of what is added."""
    total = sum(part.double() for part in parts)
    scale = sum(part.double().norm() for part in parts)
    assert (total - want.double()).norm() <= CLOSE * scale  # type: ignore[operator, union-attr]


# -- quantizers --------------------------------------------------------------------------------------------------------

# scheme: values along K that share a scale (0: the row, or 128 of it), and the largest error of one of them, as a
# fraction of their largest magnitude. From the elements: half of the widest step over the largest element, twice that
# where a block scale is the next power of two above, more where the scale itself is rounded to e4m3 or bfloat16.
ERRORS = {
    "nvfp4": (16, (1 / 6) * (17 / 16) + 1 / 16),
    "mxfp4": (32, 2 * 1 / 6),
    "mxfp8": (32, 2 * 16 / 448),
    "mxfp6_e3m2": (32, 2 * 2 / 28),
    "mxfp6_e2m3": (32, 2 * 0.25 / 7.5),
    "mxint4": (32, (0.5 + 2.0**-5) / 7.5 * 1.01),  # the quotient is rounded to bfloat16 before it is to an integer
    "int4": (0, (0.5 + 2.0**-5) / 7.5 * 1.01),
    "fp8": (0, 16 / 448 * 1.0001),
    "fp8_block": (128, 16 / 448 * 1.0001),
    "int8": (0, 0.5 / 127.5 * 1.0001),
    "none": (1, 0.0),
}


def random_weights(scheme: str, hidden: int, inter: int, seed: int) -> tuple[Tensor, Tensor]:
    """Magnitudes over many octaves, and some zeros."""
    g = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        spread = torch.randn(shape, generator=g) * torch.exp2(torch.randn(shape[:2], generator=g))[..., None]
        return spread * (torch.rand(shape, generator=g) > 0.05)

    return make(2, 2 * inter, hidden), make(2, hidden, inter)


def blocks(scheme: str, w: Tensor) -> Tensor:
    """[E, rows, blocks, block] of a weight [E, rows, K]; a partial tile at the edge becomes a block of its own."""
    size = ERRORS[scheme][0] or (128 if scheme.startswith("int") and w.shape[2] % 128 == 0 else w.shape[2])
    padded = torch.nn.functional.pad(w, (0, -w.shape[2] % size))
    return padded.unflatten(2, (-1, size))


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 999))
def test_round_trip_stays_within_half_a_step(scheme: str, data: st.DataObject, seed: int) -> None:
    weights = random_weights(scheme, data.draw(sizes(scheme, 9)), data.draw(sizes(scheme, 9)), seed)
    raw = moe.quantize_experts(*weights, scheme)
    for w, back in zip(weights, moe.dequantize_experts(raw), strict=True):
        error, largest = blocks(scheme, (back - w).abs()), blocks(scheme, w.abs()).amax(3, keepdim=True)
        if scheme == "fp8_block":  # a tile spans rows too
            largest = largest.amax(1, keepdim=True)
        # The smallest nvfp4 block scale, 2^-9 of scale_2 = amax / 2688, cannot follow smaller blocks.
        floor = w.abs().amax() / 2688 * 2.0**-9 if scheme == "nvfp4" else 0.0
        assert (error <= ERRORS[scheme][1] * largest + floor).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 999))
def test_quantization_keeps_the_order_within_a_block(scheme: str, data: st.DataObject, seed: int) -> None:
    weights = random_weights(scheme, data.draw(sizes(scheme, 9)), data.draw(sizes(scheme, 9)), seed)
    for w, back in zip(weights, moe.dequantize_experts(moe.quantize_experts(*weights, scheme)), strict=True):
        order = blocks(scheme, w).argsort(3)
        assert (blocks(scheme, back).gather(3, order).diff(dim=3) >= 0).all()


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "none"])
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 999))
def test_what_is_representable_comes_back_exactly(scheme: str, data: st.DataObject, seed: int) -> None:
    """Powers of two as scales: quantizing twice is quantizing once."""
    weights = random_weights(scheme, data.draw(sizes(scheme)), data.draw(sizes(scheme)), seed)
    once = moe.dequantize_experts(moe.quantize_experts(*weights, scheme))
    twice = moe.dequantize_experts(moe.quantize_experts(*once, scheme))
    assert torch.equal(once[0], twice[0]) and torch.equal(once[1], twice[1])


# -- layers ------------------------------------------------------------------------------------------------------------


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_restore_inverts_prepare(backend: str, data: st.DataObject) -> None:
    case = data.draw(layers(backend))
    raw = make_raw(case)
    assert moe.restore(prepared(raw, case, backend)).equal(raw)


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_order_of_tokens_does_not_matter(backend: str, data: st.DataObject) -> None:
    case = data.draw(layers(backend))
    w, (x, ids, weights) = prepared(make_raw(case), case, backend), make_batch(case)
    order = torch.randperm(case.tokens, generator=torch.Generator().manual_seed(case.seed))
    assert_same(run(w, x[order], ids[order], weights[order]), run(w, x, ids, weights)[order], backend)


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_order_of_experts_does_not_matter(backend: str, data: st.DataObject) -> None:
    case = data.draw(layers(backend))
    raw, (x, ids, weights) = make_raw(case), make_batch(case)
    order = torch.randperm(case.experts, generator=torch.Generator().manual_seed(case.seed))
    moved: dict[str, Any] = {name: t[order] for name, t in raw.tensors().items() if t.ndim}
    new_ids = order.argsort()[ids.long()]
    want = run(prepared(raw, case, backend), x, ids, weights)
    got = run(prepared(dataclasses.replace(raw, **moved), case, backend), x, new_ids, weights)
    assert_same(got, want, backend)


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_a_token_does_not_depend_on_its_neighbours(backend: str, data: st.DataObject) -> None:
    case = data.draw(layers(backend))
    w, (x, ids, weights) = prepared(make_raw(case), case, backend), make_batch(case)
    whole, cut = run(w, x, ids, weights), data.draw(st.integers(0, case.tokens - 1))
    one = slice(cut, cut + 1)
    assert_same(run(w, x[one], ids[one], weights[one]), whole[one], backend)
    rest = slice(cut, None)
    assert_same(run(w, x[rest], ids[rest], weights[rest]), whole[rest], backend)


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_runs_and_thread_counts_agree_bit_for_bit(backend: str, data: st.DataObject) -> None:
    """Thread counts on `cpu` only: the reference's matrix products are not ours."""
    case = data.draw(layers(backend))
    w, batch = prepared(make_raw(case), case, backend), make_batch(case)
    first = run(w, *batch)
    assert torch.equal(run(w, *batch), first)
    if backend == "cpu":
        try:
            for threads in (2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(run(w, *batch), first)
        finally:
            torch.set_num_threads(1)


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_the_output_is_linear_in_the_routing_weights(backend: str, data: st.DataObject) -> None:
    case = data.draw(layers(backend))
    w, (x, ids, a) = prepared(make_raw(case), case, backend), make_batch(case)
    b = torch.randn(a.shape, generator=torch.Generator().manual_seed(case.seed))
    of_a, of_b = run(w, x, ids, a), run(w, x, ids, b)
    assert torch.equal(run(w, x, ids, -2 * a), -2 * of_a)
    assert_adds_up([of_a, of_b], run(w, x, ids, a + b))


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_expert_shards_add_up(backend: str, data: st.DataObject) -> None:
    case = data.draw(layers(backend, experts=6, top_k=4))
    raw, batch = make_raw(case), make_batch(case)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, 5), min_size=1, max_size=3))), 6]
    parts = []
    for start, stop in pairwise(cuts):
        mine: dict[str, Any] = {name: t[start:stop] for name, t in raw.tensors().items() if t.ndim}
        local = dataclasses.replace(raw, **mine)
        parts.append(run(prepared(local, case, backend, num_experts=6, local_expert_offset=start), *batch))
    assert_adds_up(parts, run(prepared(raw, case, backend), *batch))


@backends
@pytest.mark.parametrize("top_k", [1, 2, 22])
@settings(max_examples=20)
@given(data=st.data())
def test_slots_add_up_duplicates_included(backend: str, top_k: int, data: st.DataObject) -> None:
    case = data.draw(layers(backend, experts=24 if top_k == 22 else 3, top_k=top_k, tokens=3))
    w, (x, _, weights) = prepared(make_raw(case), case, backend), make_batch(case)
    g = torch.Generator().manual_seed(case.seed)
    ids = torch.randint(case.experts, (3, top_k), generator=g, dtype=torch.int32)
    ids[0] = ids[0, 0]  # one expert in every slot
    whole = run(w, x, ids, weights)
    slots = [run(w, x, ids[:, j : j + 1].contiguous(), weights[:, j : j + 1].contiguous()) for j in range(top_k)]
    assert_adds_up(slots, whole)
    if top_k == 2:
        summed = run(w, x[:1], ids[:1, :1].contiguous(), weights[:1].sum(1, keepdim=True))
        assert_adds_up([summed], whole[:1])


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_foreign_ids_contribute_nothing(backend: str, data: st.DataObject) -> None:
    """Whatever their value; a token with nothing else gives exact zeros, and disturbs nobody, even with NaN in it."""
    case = data.draw(layers(backend, tokens=4))
    offset, total = 3, case.experts + 5
    raw, (x, ids, weights) = make_raw(case), make_batch(case)
    w = prepared(raw, case, backend, num_experts=total, local_expert_offset=offset)
    clean = run(w, x, ids + offset, weights)
    foreign = torch.tensor([-1, -(2**31), 2**31 - 1, 0, offset - 1, offset + case.experts, total - 1, total])
    ids = ids + offset
    ids[2] = foreign[torch.randint(len(foreign), ids[2].shape)].to(torch.int32)
    x, weights = x.clone(), weights.clone()
    x[2] = weights[2] = float("nan")
    got = run(w, x, ids, weights)
    assert torch.equal(got[2], torch.zeros(case.hidden))
    others = torch.tensor([0, 1, 3])
    assert_same(got[others], clean[others], backend)


METHODS = ("default", "renormalize", "renormalize_naive", "deepseek_v3", "topk", "sigmoid", "llama4")


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_the_monolithic_op_is_route_and_the_routed_op(backend: str, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(METHODS))
    case = data.draw(layers(backend, **({"top_k": 1} if method == "llama4" else {})))
    on_input = method == "llama4"
    raw, (x, _, _) = make_raw(case), make_batch(case)
    g = torch.Generator().manual_seed(case.seed)
    logits = torch.randn(case.tokens, case.experts, generator=g)
    bias = torch.randn(case.experts, generator=g) if method == "deepseek_v3" else None
    routing = moe.Routing(method, case.top_k, bias=bias)
    w = prepared(raw, case, backend, router_weight_on_input=on_input)
    whole = moe.fused_moe(x, logits, w, routing=routing, out_dtype=torch.float32)
    assert torch.equal(whole, run(w, x, *moe.route(logits, routing)))


@backends
@settings(max_examples=80)
@given(data=st.data())
def test_a_weight_on_the_input_is_a_scaled_token(backend: str, data: st.DataObject) -> None:
    """x * w in float32, rounded once to x's dtype, and not weighted again."""
    case = data.draw(layers(backend, top_k=1))
    raw, (x, ids, weights) = make_raw(case), make_batch(case)
    on_input = prepared(raw, case, backend, router_weight_on_input=True)
    plain = prepared(raw, case, backend)
    scaled = (x.float() * weights).to(x.dtype)
    assert torch.equal(run(on_input, x, ids, weights), run(plain, scaled, ids, torch.ones_like(weights)))
