"""Layers with adapters against autograd through dequantized weights, forward and backward (support/straight_through.py)."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_cases import FORMATS, LARGE, LIMITS, backends_of, bounds_of, check_biases, differentiated, leaf, learning
from lora_cases import factors_of
from problems import Case, make_batch, make_raw
from straight_through import Leaves, layer_of
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.gradients import layer_pass, lora_layer, pairs, weights

FACTORS = ("a13", "b13", "a2", "b2")


def _wide(t: Tensor | None) -> Any:
    return leaf(t, torch.float32)


def _leaves(lora: moe.Lora, make: Any) -> moe.Lora:
    return dataclasses.replace(lora, **{name: make(getattr(lora, name)) for name in FACTORS})


def _lora_ids(case: Case, adapters: int) -> Tensor | None:
    if adapters == 1:
        return None
    g = torch.Generator().manual_seed(case.seed + 5)
    return torch.randint(-1, adapters + 1, (case.tokens,), generator=g)  # one number is nobody's


def _check(
    case: Case, backend: str, adapters: int = 1, only: tuple[str, ...] = FACTORS, rank: int = 3, **options: Any
) -> None:
    raw, constants = make_raw(case), options.pop("constants", (None, None, None))
    w = learning(case, backend, constants, **options)
    given = factors_of(raw, adapters, rank, case.dtype)
    given = replace(given, **{name: None for name in FACTORS if name not in only})
    lora, lora_ids = _leaves(given, leaf), _lora_ids(case, adapters)
    x, ids, topk = make_batch(case)
    x, topk = leaf(x), leaf(topk)
    out = moe.fused_moe_routed(x, ids, topk, w, lora=lora, lora_ids=lora_ids)
    grad = differentiated(out)

    leaves = Leaves(_wide(x), _wide(topk), _wide(raw.w13_bias), _wide(raw.w2_bias))
    wide = _leaves(given, _wide)
    of_tokens = torch.zeros(case.tokens, dtype=torch.int64) if lora_ids is None else lora_ids
    expected = layer_of(case, w, leaves, ids, constants, lora=wide, lora_ids=of_tokens)
    expected.backward(grad.float())
    _, moved = bounds_of(case)
    assert relative_l2(out, expected) <= moved
    assert relative_l2(x.grad, leaves.x.grad) <= moved
    assert relative_l2(topk.grad, leaves.weights.grad) <= moved
    for name in only:
        got, want = getattr(lora, name).grad, getattr(wide, name).grad
        assert got.dtype == case.dtype
        assert want.any() or case.tokens == 1  # whose adapter may be none
        assert relative_l2(got, want) <= moved, name
    if case.bias:
        check_biases(case, w, leaves.w13_bias.grad, leaves.w2_bias.grad, moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "act"), FORMATS)
def test_every_format(scheme: str, act: str, dtype: torch.dtype) -> None:
    case = replace(LARGE, scheme=scheme, act_format=act, dtype=dtype, bias=True, foreign=True)
    for backend in backends_of(case):
        _check(case, backend, adapters=2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    case = replace(LARGE, activation=activation, dtype=torch.float32, bias=True)
    _check(case, "cpu")
    if activation in LIMITS:
        _check(case, "reference", constants=LIMITS[activation], adapters=3)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1},
        {"tokens": 1, "top_k": 1, "experts": 1},
        {"hidden": 64, "inter": 16},
        {"scheme": "none", "hidden": 40, "inter": 24},  # padded by the layout
        {"scheme": "none", "hidden": 40, "inter": 24, "activation": "relu2_no_mul"},
        {"scheme": "fp8_block", "hidden": 200, "inter": 136},
        {"dtype": torch.float16},
        {"scheme": "nvfp4", "act_format": "nvfp4", "input_scale": "expert", "per_half": True},
    ],
    ids=str,
)
def test_sizes(backend: str, changes: dict[str, Any]) -> None:
    case = replace(LARGE, **{"dtype": torch.float32, "bias": True, **changes})
    _check(case, backend)
    _check(case, backend, adapters=2, rank=1)


@pytest.mark.parametrize("only", [("a13", "b13"), ("a2", "b2")])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_adapters_of_a_narrower_layer_that_the_layout_pads_alike(activation: str, only: tuple[str, str]) -> None:
    case = replace(LARGE, scheme="none", hidden=64, inter=30, activation=activation)
    other = factors_of(make_raw(replace(case, inter=26)), 1, 3, case.dtype)
    lora = replace(other, **{name: None for name in ("a13", "b13", "a2", "b2") if name not in only})
    w = moe.prepare(make_raw(case), act_format="none", activation=activation, backend="cpu")
    x, ids, topk_weights = make_batch(case)
    with pytest.raises(RuntimeError, match=r"lora\.(b13|a2) must have size \d+ in dimension \d, as the layer's inter"):
        moe.fused_moe_routed(x, ids, topk_weights, w, lora=lora)


@pytest.mark.parametrize("only", [("a13", "b13"), ("a2", "b2")])
def test_one_projection(only: tuple[str, ...]) -> None:
    for scheme in ("nvfp4", "none"):
        _check(replace(LARGE, scheme=scheme, inter=24 if scheme == "none" else 96, dtype=torch.float32), "cpu", 1, only)


def test_offsets_and_weighted_inputs() -> None:
    case = replace(LARGE, dtype=torch.float32, bias=True)
    _check(case, "cpu", num_experts=9, local_expert_offset=2)
    _check(replace(case, top_k=1), "cpu", adapters=2, router_weight_on_input=True)


@pytest.mark.parametrize("adapters", [1, 3])
def test_without_waiting_and_in_pieces(monkeypatch: pytest.MonkeyPatch, adapters: int) -> None:
    """As in a CUDA graph that is being captured, and with few experts and rows at once."""
    case = replace(LARGE, dtype=torch.float32, bias=True, foreign=True)
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", 2 * 3 * case.hidden * case.inter)  # two experts
    monkeypatch.setattr(layer_pass, "PIECE_ELEMENTS", 4 * 192)  # four rows
    _check(case, "cpu", adapters)
    real = pairs.sort_pairs
    monkeypatch.setattr(layer_pass, "sort_pairs", lambda *a: real(*a)._replace(host_ends=None))
    _check(case, "cpu", adapters)


def test_zero_tokens() -> None:
    case = replace(LARGE, tokens=0)
    raw = make_raw(case)
    lora = _leaves(factors_of(raw, 1, 3, case.dtype), leaf)
    x, ids, topk = make_batch(case)
    out = moe.fused_moe_routed(x, ids, topk, moe.prepare(raw, act_format="none"), lora=lora)
    assert out.shape == (0, case.hidden)
    out.sum().backward()
    assert all(not getattr(lora, name).grad.any() for name in FACTORS)


def test_gradcheck_in_float64() -> None:
    case = replace(LARGE, tokens=5, hidden=16, inter=16, experts=2, top_k=2, dtype=torch.float32, bias=True)
    raw = make_raw(case)
    w = moe.prepare(raw, act_format="none", backend="reference")
    given = factors_of(raw, 2, 1, torch.float64)
    x, ids, topk = make_batch(case)
    call, backend, sizes = _call_of(w, x.double(), ids, topk.double())
    ids_of_tokens = torch.tensor([0, 1, -1, 1, 0], dtype=torch.int32)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, topk: Tensor, *factors: Tensor) -> Tensor:
            ctx.save_for_backward(x, topk, *factors)
            arguments = lora_layer.LoraArguments(*factors, given.scaling, ids_of_tokens)
            return lora_layer.lora_layer(call._replace(hidden_states=x, topk_weights=topk), backend, sizes, arguments)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, topk, *factors = ctx.saved_tensors
            arguments = lora_layer.LoraArguments(*factors, given.scaling, ids_of_tokens)
            wanted = lora_layer.WantedLora(True, True, False, False, True, True, True, True)
            now = call._replace(hidden_states=x, topk_weights=topk)
            found = lora_layer.lora_gradients(now, backend, sizes, arguments, grad, wanted)
            return found[0], found[1], *found[4:]

    leaves = [leaf(t) for t in (x.double(), topk.double(), *(getattr(given, name) for name in FACTORS))]
    assert torch.autograd.gradcheck(Layer.apply, leaves)


def _call_of(w: moe.PreparedWeights, x: Tensor, ids: Tensor, topk: Tensor) -> Any:
    from torch_moe_ops.backends import BACKENDS
    from torch_moe_ops.core.activations import resolve_constants
    from torch_moe_ops.core.call import FIELDS, ExpertsCall
    from torch_moe_ops.core.layout import Sizes

    given = {name: getattr(w, name, None) for name in FIELDS}
    alpha, beta, limit = resolve_constants(w.activation)
    given |= {"hidden_states": x, "topk_ids": ids, "topk_weights": topk, "out_dtype": x.dtype}
    given |= {"swiglu_alpha": alpha, "swiglu_beta": beta, "swiglu_limit": limit}
    sizes = Sizes(w.num_local_experts, w.hidden_size, w.intermediate_size, True, w.w13.dtype)
    return ExpertsCall(**given), BACKENDS[w.backend], sizes


def _run(case: Case, lora: moe.Lora | None, lora_ids: Tensor | None = None, **options: Any) -> Tensor:
    x, ids, topk = make_batch(case)
    w = moe.prepare(make_raw(case), act_format=case.act_format)
    return moe.fused_moe_routed(x, ids, topk, w, lora=lora, lora_ids=lora_ids, **options)


def test_stacked_adapters_are_each_their_own() -> None:
    """Also of different ranks and scalings, one without w2's factors; a token without one has none."""
    case = replace(LARGE, dtype=torch.float32)
    raw = make_raw(case)
    single = [replace(factors_of(raw, 1, r, torch.float32, seed=r), scaling=0.3 * r) for r in (2, 5)]
    single.append(replace(factors_of(raw, 1, 3, torch.float32), a2=None, b2=None, scaling=1.5))
    lora_ids = torch.arange(case.tokens) % 4 - 1
    together = _run(case, moe.Lora.stack(single), lora_ids)
    alone = [_run(case, None), *(_run(case, lora) for lora in single)]
    expected = torch.stack(alone)[lora_ids + 1, torch.arange(case.tokens)]
    assert relative_l2(together, expected) <= 1e-6
    assert relative_l2(alone[0], alone[1]) > 1e-2


def test_scalings_are_float32_whatever_the_default() -> None:
    one, before = factors_of(make_raw(LARGE), 1, 2, torch.float32), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        scaling = moe.Lora.stack([replace(one, scaling=0.3), one]).scaling
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.as_tensor(scaling), torch.tensor([0.3, one.scaling]))


def test_what_cannot_be_stacked() -> None:
    one = factors_of(make_raw(LARGE), 1, 2, torch.float32)
    for adapters in ([], [moe.Lora.stack([one, one]), one]):
        with pytest.raises(ValueError, match=r"Lora\.stack: adapters must be single ones, at least one, got"):
            moe.Lora.stack(adapters)
    with pytest.raises(ValueError, match=r"Lora\.stack: adapters must have factors, of one at least, got"):
        moe.Lora.stack([moe.Lora(), moe.Lora(scaling=2.0)])
    moved = one.to("meta", torch.bfloat16)
    assert {(getattr(moved, name).device.type, getattr(moved, name).dtype) for name in FACTORS} == {
        ("meta", torch.bfloat16)
    }


def test_results_are_the_same_bits_from_run_to_run() -> None:
    case = replace(LARGE, tokens=64)
    raw = make_raw(case)

    def once() -> list[Tensor]:
        lora = _leaves(factors_of(raw, 2, 4, case.dtype), leaf)
        out = _run(case, lora, _lora_ids(case, 2))
        out.sum().backward()
        return [out, *(getattr(lora, name).grad for name in FACTORS)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_monolithic_call_and_batches_of_sequences() -> None:
    case = replace(LARGE, tokens=36, dtype=torch.float32)
    raw = make_raw(case)
    lora, lora_ids = factors_of(raw, 2, 4, torch.float32), torch.arange(36) % 3 - 1
    w = moe.prepare(raw, act_format="none")
    x, logits = make_batch(case)[0], torch.randn(36, case.experts)
    routing = moe.Routing("renormalize", top_k=3)
    whole = moe.fused_moe(x, logits, w, routing=routing, lora=lora, lora_ids=lora_ids)
    ids, topk = moe.route(logits, routing)
    assert torch.equal(whole, moe.fused_moe_routed(x, ids, topk, w, lora=lora, lora_ids=lora_ids))
    shaped = moe.fused_moe(
        x.unflatten(0, (4, 9)),
        logits.unflatten(0, (4, 9)),
        w,
        routing=routing,
        lora=lora,
        lora_ids=lora_ids.unflatten(0, (4, 9)),
    )
    assert torch.equal(shaped.flatten(0, 1), whole)


def test_one_graph_each_way() -> None:
    """A training step with adapters under torch.compile(fullgraph=True): as in eager mode."""
    case = replace(LARGE, dtype=torch.float32)
    raw = make_raw(case)
    x, ids, topk = make_batch(case)
    w = moe.prepare(raw, act_format="none")
    given = factors_of(raw, 1, 4, torch.float32)

    def step(a13: Tensor, b13: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
        lora = moe.Lora(a13, b13, a2, b2, scaling=0.5)
        return moe.fused_moe_routed(x * 2, ids, topk, w, lora=lora).square().sum()

    found = []
    torch._dynamo.reset()
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [leaf(getattr(given, name)) for name in FACTORS]
        run(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"out": torch.zeros(37, 128)}, "out must be None with lora"),
        ({"hidden_states_scale": torch.zeros(37, 8)}, "hidden_states_scale must be None with lora"),
    ],
)
def test_what_it_does_not_take(options: dict[str, Any], told: str) -> None:
    lora = factors_of(make_raw(LARGE), 1, 4, torch.float32)
    with pytest.raises(ValueError, match=told):
        _run(LARGE, lora, **options)
    with pytest.raises(TypeError, match="lora must be a Lora, got dict"):
        _run(LARGE, {"a13": lora.a13})
    with pytest.raises(TypeError, match="lora must be a Lora, got NoneType"):
        _run(LARGE, None, torch.zeros(37, dtype=torch.int32))
    x, ids, weights = make_batch(LARGE)
    w = moe.prepare(make_raw(LARGE))
    for name, given in (("topk_ids", (None, weights)), ("topk_weights", (ids, None))):
        with pytest.raises(RuntimeError, match=f"moeq::moe_routed_lora: {name} must be a Tensor, got None"):
            moe.fused_moe_routed(x, *given, w, lora=lora)
    with pytest.raises(RuntimeError, match=r"moe_routed_lora.*Expected a value of type 'Optional.Tensor.'.*lora_a13"):
        moe.fused_moe_routed(x, ids, weights, w, lora=replace(lora, a13=1))
