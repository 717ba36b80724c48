"""No op has a derivative: asking for one is an error that names the op, however it is asked; a forward pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw
from samples import SAMPLES, overload, routed_sample
from torch import Tensor
from torch.autograd import forward_ad

import torch_moe_ops as moe
from torch_moe_ops.core.schemas import FAMILIES

CASE = Case(scheme="none", hidden=64, inter=32, dtype=torch.float32)
ARGS, KEYWORDS = routed_sample(CASE, "reference")
backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


def _layer(backend: str) -> Callable[[Tensor], Tensor]:
    args, keywords = routed_sample(CASE, backend)
    return lambda x: torch.ops.moeq.moe_routed(x, *args[1:], **keywords)


def _refused(op: str = "moe_routed") -> Any:
    return pytest.raises(RuntimeError, match=f"moeq::{op}: inputs must be detached from the graph")


def _leaf(value: Any) -> Any:
    return value.clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("name", sorted(SAMPLES))
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
    assert asked or name == "quantize_mxfp4"  # integers alone
    assert all(a.grad is None for a in args if isinstance(a, Tensor))


@backends
@pytest.mark.parametrize("which", ["hidden_states", "topk_weights", "w13", "w2", "w2_bias"])
def test_every_input_counts(backend: str, which: str) -> None:
    args, keywords = routed_sample(Case(scheme="none", hidden=64, inter=32, dtype=torch.float32, bias=True), backend)
    at = ["hidden_states", "", "", "topk_weights", "w13", "", "w2", "w2_bias"].index(which)
    leaf = args[at].clone().requires_grad_()
    out = torch.ops.moeq.moe_routed(*args[:at], leaf, *args[at + 1 :], **keywords)
    with _refused():
        (out.sum() + leaf.sum()).backward()
    with torch.no_grad():
        assert not torch.ops.moeq.moe_routed(*args[:at], leaf, *args[at + 1 :], **keywords).requires_grad


@backends
@pytest.mark.parametrize(
    "ask",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.vjp(f, x)[1](x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x[None]),
        lambda f, x: torch.autograd.functional.jvp(f, x, x),
        lambda f, x: torch.autograd.functional.vjp(f, x, x),
    ],
    ids=["grad", "vjp", "jvp", "jacfwd", "jacrev", "grad of each", "functional.jvp", "functional.vjp"],
)
def test_other_derivatives(backend: str, ask: Callable[..., Any]) -> None:
    with _refused():
        ask(_layer(backend), ARGS[0])


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
@pytest.mark.parametrize("family", ["", "nvfp4"])
def test_compiled(compiler: str, family: str) -> None:
    scheme = FAMILIES[family][0]
    case = Case(scheme=scheme.name, act_format=scheme.act_formats[0])
    w = moe.prepare(make_raw(case), act_format=case.act_format)
    x, ids, weights = make_batch(case)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=compiler)
    def layer(x: Tensor) -> Tensor:
        return moe.fused_moe_routed(x * 2, ids, weights, w) + x

    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    torch.testing.assert_close(out, moe.fused_moe_routed(x * 2, ids, weights, w) + x, rtol=0, atol=0)
    with _refused(f"{scheme.op_prefix}moe_routed"):
        out.sum().backward()
    assert leaf.grad is None
    assert not layer(x).requires_grad


def test_exported() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.moeq.moe_routed(x, *ARGS[1:], **KEYWORDS)

    program = torch.export.export(Layer(), (_leaf(ARGS[0]),))
    assert torch.ops.moeq.moe_routed.default in [node.target for node in program.graph.nodes]
    out = program.module()(_leaf(ARGS[0]))
    with _refused():
        out.sum().backward()


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
