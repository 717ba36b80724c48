"""What has no derivative: asking for one is an error that names the op, however it is asked; a forward pass runs.

The gradients that there are: tests/gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Case
from samples import SAMPLES, overload, packed_case, packed_sample, routed_sample
from torch import Tensor
from torch.autograd import forward_ad

import torch_moe_ops as moe
from torch_moe_ops.core.schemas import FAMILIES, arguments

CASE = Case(scheme="none", hidden=64, inter=32, dtype=torch.float32)
ARGS, KEYWORDS = routed_sample(CASE, "reference")
backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


def _layer(backend: str) -> Callable[[Tensor], Tensor]:
    args, keywords = routed_sample(CASE, backend)
    return lambda x: torch.ops.moeq.moe_routed(x, *args[1:], **keywords)


def _refused(op: str = "moe_routed", what: str = "inputs") -> Any:
    return pytest.raises(RuntimeError, match=f"moeq::{op}(_routed)?: {what} must be detached from the graph")


def _leaf(value: Any) -> Any:
    return value.clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


DIFFERENTIABLE = [name for name in SAMPLES if name.endswith(("moe", "moe_routed", "moe_routed_lora", "grouped_linear"))]


@pytest.mark.parametrize(
    "name", sorted(SAMPLES.keys() - {*DIFFERENTIABLE, "route", "route_hidden", "moe_hidden", "grouped_linear"})
)
def test_forward_runs_and_backward_names_the_op(name: str) -> None:
    args, keywords = SAMPLES[name]("cpu")[0]
    args = tuple(_leaf(a) for a in args)
    returned = overload(name)(*args, **keywords)
    results = keywords.get("out", returned)
    asked = 0
    for result in results if isinstance(results, tuple) else (results,):
        if result.is_floating_point():
            asked += 1
            with _refused(name.removesuffix(".out")):
                torch.autograd.backward(result, torch.ones_like(result), retain_graph=True)
        assert result.requires_grad == result.is_floating_point()
    assert asked or name in ("quantize_mxfp4", "ep_place")  # integers alone
    assert all(a.grad is None for a in args if isinstance(a, Tensor))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_weights_and_scales_have_none(name: str) -> None:
    """A gradient that lacks them would be silently wrong for whoever asked for it."""
    args, keywords = SAMPLES[name]("cpu")[0]
    for i, argument in enumerate(arguments(name)[0][: len(args)]):
        leaf = _leaf(args[i])
        if leaf is args[i] or argument in (
            "x",
            "hidden_states",
            "topk_weights",
            "router_logits",
            "w13_bias",
            "w2_bias",
            "lora_a13",
            "lora_b13",
            "lora_a2",
            "lora_b2",
        ):
            continue
        out = overload(name)(*args[:i], leaf, *args[i + 1 :], **keywords)
        with _refused(name, argument):
            out.sum().backward()
        x = _leaf(args[0])
        both = overload(name)(x, *args[1:i], leaf, *args[i + 1 :], **keywords)
        with _refused(name, argument):
            both.sum().backward()
        assert x.grad is None


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_packed_hidden_states_have_none(backend: str) -> None:
    scheme = FAMILIES["fp8"][0]
    args, keywords = packed_sample(packed_case(scheme, "fp8"), backend)
    codes = args[0].clone().requires_grad_()  # float8, so torch lets them
    out = torch.ops.moeq.fp8_moe_routed(codes, *args[1:], **keywords)
    with _refused("fp8_moe_routed", "hidden_states"):
        out.sum().backward()


@backends
@pytest.mark.parametrize(
    "ask",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
        lambda f, x: torch.autograd.functional.jvp(f, x, x),
    ],
    ids=["jvp", "jacfwd", "hessian", "functional.jvp"],
)
def test_forward_mode_and_second_derivatives(backend: str, ask: Callable[..., Any]) -> None:
    with _refused("moe_routed(_backward)?"):
        ask(_layer(backend), ARGS[0])


def test_quantizers_refuse_transforms() -> None:
    with _refused("dynamic_gscale_nvfp4"):
        torch.func.grad(lambda x: moe.dynamic_gscale_nvfp4(x).sum())(torch.randn(2, 16))


@backends
def test_forward_mode(backend: str) -> None:
    with forward_ad.dual_level():
        assert torch.equal(_layer(backend)(ARGS[0]), _layer(backend)(ARGS[0]))  # nothing was asked of it
        with _refused():
            _layer(backend)(forward_ad.make_dual(ARGS[0], ARGS[0]))
        with torch.no_grad(), _refused():
            _layer(backend)(forward_ad.make_dual(ARGS[0], ARGS[0]))


@backends
def test_transforms_of_something_else_run(backend: str) -> None:
    layer = _layer(backend)
    found = torch.func.grad(lambda z: (layer(ARGS[0]) * z).sum())(torch.ones(64))
    torch.testing.assert_close(found, layer(ARGS[0]).sum(0))
    torch.testing.assert_close(torch.func.vmap(layer)(ARGS[0][None])[0], layer(ARGS[0]))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(compiler: str) -> None:
    torch._dynamo.reset()
    w13 = _leaf(ARGS[4])

    @torch.compile(fullgraph=True, backend=compiler)
    def layer(x: Tensor) -> Tensor:
        return torch.ops.moeq.moe_routed(x * 2, *ARGS[1:4], w13, *ARGS[5:], **KEYWORDS) + x

    leaf = ARGS[0].clone().requires_grad_()
    out = layer(leaf)
    with _refused(what="w13"):
        out.sum().backward()
    assert leaf.grad is None


@backends
def test_out_counts_versions(backend: str) -> None:
    args, keywords = routed_sample(CASE, backend)
    out = torch.zeros(5, 64)
    p = torch.ones(5, 64, requires_grad=True)
    loss = (out * p).sum()  # saves `out`
    torch.ops.moeq.moe_routed.out(*args, **keywords, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@backends
def test_out_refuses_what_torch_refuses(backend: str) -> None:
    args, keywords = routed_sample(CASE, backend)
    op = torch.ops.moeq.moe_routed.out
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        op(*args, **keywords, out=torch.zeros(5, 64, requires_grad=True))
    with torch.inference_mode():
        of_inference = torch.zeros(5, 64)
        op(*args, **keywords, out=of_inference)
    before = of_inference.clone()
    with pytest.raises(RuntimeError, match="moeq::moe_routed: out must be no inference tensor outside inference mode"):
        op(torch.zeros(5, 64), *args[1:], **keywords, out=of_inference)
    assert torch.equal(of_inference, before)


@backends
def test_a_buffer_does_not_keep_the_graphs_of_all_steps(backend: str) -> None:
    args, keywords = routed_sample(CASE, backend)
    out, x = torch.zeros(5, 64), _leaf(args[0])
    for _ in range(3):
        torch.ops.moeq.moe_routed.out(x, *args[1:], **keywords, out=out)
    nodes = [node for node, _ in out.grad_fn.next_functions if node is not None]
    assert [type(node).__name__ for node in nodes] == ["AccumulateGrad"]
    with _refused():
        out.sum().backward()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"router_logits": torch.randn(3, 8)}, "num_experts must be 0 or 8"),
        ({"router_logits": torch.randn(2, 4)}, "router_logits must have num_tokens = 3 rows"),
        ({"top_k": 9}, "top_k must"),
    ],
    ids=["experts", "rows", "top_k"],
)
def test_a_wrong_call_fails_alike_where_a_gradient_is_wanted(changes: dict[str, Any], text: str) -> None:
    """A monolithic op runs as two then, which know less of the call."""
    w = moe.prepare(moe.quantize_experts(torch.randn(4, 64, 32), torch.randn(4, 32, 32), "int4"), backend="reference")
    given: dict[str, Any] = {"router_logits": torch.randn(3, 4), "top_k": 2} | changes
    texts = []
    for wanted in (False, True):
        x = torch.randn(3, 32).requires_grad_(wanted)
        with pytest.raises(RuntimeError, match=text) as error:
            torch.ops.moeq.int4_moe(
                x, None, given["router_logits"], None, *w.op_weights(), "reference", "default", given["top_k"],
                num_experts=w.num_experts,
            )  # fmt: skip
        texts.append(str(error.value))
    assert texts[0] == texts[1] and texts[0].startswith("moeq::int4_moe: ")


def test_weights_of_a_routing_may_be_scaled_in_place() -> None:
    """As models do after routing: only the ids are kept for the backward pass."""
    logits = torch.randn(3, 8, requires_grad=True)
    ids, weights = moe.route(logits, moe.Routing("renormalize", top_k=2))
    weights.mul_(2.0)
    weights[:, 0].sum().backward()
    assert logits.grad is not None and bool(logits.grad.any()) and ids.shape == (3, 2)
