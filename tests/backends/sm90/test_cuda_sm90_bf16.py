"""The `cuda_sm90_bf16` backend: its choice of kernels anywhere, its kernels against the oracle on compute capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90_cases import ACTIVATIONS, make_call, relative_error, why_not_here
from tolerances import BF16
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cuda_sm90_bf16, linear, triton
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.problem import Problem

REASON = why_not_here()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
NAME = "cuda_sm90_bf16"

# experts, top_k, hidden, inter, tokens
SHAPES = (
    (8, 1, 128, 64, 3),
    (8, 2, 192, 176, 20),
    (4, 2, 80, 48, 1),
    (16, 4, 2880, 704, 300),
    (16, 4, 2688, 1856, 40),
    (60, 6, 2048, 1408, 33),
    (128, 8, 2048, 768, 64),
    (512, 22, 1024, 128, 17),
    (8, 2, 4096, 1024, 300),
    (2, 1, 512, 256, 1100),
    (4, 3, 272, 144, 1500),
)


def run(call: ExpertsCall) -> Tensor:
    """The kernels' output, from a buffer full of NaN."""
    out = torch.full(call.hidden_states.shape, float("nan"), dtype=call.out_dtype, device=call.w2.device)
    cuda_sm90_bf16.run_kernel(call, out)
    return out


def case(**fields: Any) -> ExpertsCall:
    return make_call("none", **{"hidden": 128, "inter": 64, "experts": 8} | fields)


def check(call: ExpertsCall, bound: float = BF16) -> None:
    error = relative_error(run(call), call)
    print(f"{tuple(call.w2.shape)} {call.activation} {error:.2e}")
    assert error < bound  # NaN where the output has one


class TestKernels:
    pytestmark = on_gpu

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_shapes(self, shape: tuple[int, ...]) -> None:
        check(case(**dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))))

    @pytest.mark.parametrize("tokens", range(1, 200, 9))
    def test_every_width_of_a_tile(self, tokens: int) -> None:
        check(case(experts=1, top_k=1, tokens=tokens))

    @pytest.mark.parametrize("out_dtype", (torch.float32, torch.float16))
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str, out_dtype: torch.dtype) -> None:
        check(case(activation=activation, bias=True, inter=176, hidden=272, tokens=150, out_dtype=out_dtype), 2e-3)

    def test_situ_of_tiny_numbers(self) -> None:
        call = case(activation="situ", inter=128, hidden=256, tokens=150, out_dtype=torch.float32)
        check(call._replace(hidden_states=call.hidden_states * 2.0**-20), 2e-3)

    @pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
    def test_foreign_ids(self, activation: str) -> None:
        call = case(activation=activation, tokens=70, foreign=True)
        out = run(call)
        assert not out[-1].any()  # every expert of the last token is foreign
        assert relative_error(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < BF16

    def test_router_weight_on_the_input(self) -> None:
        check(case(tokens=90, top_k=1, router_weight_on_input=True))

    def test_runs_are_bitwise_equal(self) -> None:
        call = case(hidden=1024, inter=320, experts=16, top_k=4, tokens=900)
        first = run(call)
        for _ in range(5):
            assert torch.equal(run(call), first)

    def test_a_nan_row_disturbs_no_other(self) -> None:
        call = case(tokens=60, inter=80)
        clean, others = run(call), torch.arange(60, device="cuda") != 33
        call.hidden_states[33] = float("nan")
        assert torch.equal(run(call)[others], clean[others])

    def test_what_lies_behind_the_weights_is_not_read(self) -> None:
        call = case(hidden=80, inter=48, tokens=100)
        beside: dict[str, Any] = {}
        for name in ("w13", "w2"):
            weight = getattr(call, name)
            buffer = torch.full((weight.numel() + 20_000,), float("nan"), dtype=weight.dtype, device="cuda")
            beside[name] = buffer[: weight.numel()].view(weight.shape).copy_(weight)
        check(call._replace(**beside))

    def test_a_check_names_the_op(self) -> None:
        with pytest.raises(RuntimeError, match="moeq_C::experts_sm90_bf16: activation must be a known name, got 'x'"):
            run(case()._replace(activation="x"))

    def test_a_layer_in_a_graph(self) -> None:
        g = torch.Generator().manual_seed(0)
        w13, w2 = torch.randn(8, 256, 192, generator=g) / 14, torch.randn(8, 192, 128, generator=g) / 11
        raw = moe.RawWeights("none", w13.bfloat16(), w2.bfloat16(), activation="silu").to("cuda")
        w = moe.prepare(raw)
        assert w.backend == NAME
        x, logits = torch.randn(600, 192, generator=g).bfloat16().cuda(), torch.randn(600, 8, generator=g).cuda()
        routing = moe.Routing("sigmoid_renorm", 2)
        want = moe.fused_moe(x, logits, w, routing=routing)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = moe.fused_moe(x, logits, w, routing=routing)
        graph.replay()
        assert torch.equal(out, want)
        oracle = moe.fused_moe(x, logits, moe.prepare(raw, backend="reference"), routing=routing).double()
        assert (out.double() - oracle).norm() < BF16 * oracle.norm()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose kernels were asked for, in place of running them."""
    names: list[str] = []
    monkeypatch.setattr(cuda_sm90_bf16, "run_kernel", lambda call, out: names.append("own"))
    monkeypatch.setattr(triton, "run", lambda call, out: names.append("triton"))
    return names


@pytest.mark.parametrize(("tokens", "own"), ((40, False), (159, False), (160, True), (4000, True)))
def test_few_tokens_are_for_triton(tokens: int, own: bool, chosen: list[str]) -> None:
    call = make_call("none", tokens=tokens, top_k=2, experts=8)
    assert cuda_sm90_bf16.min_tokens(8, 2) == 160
    cuda_sm90_bf16.run(call, torch.empty(0))
    assert chosen == ["own" if own else "triton"]


@pytest.mark.parametrize(("tokens", "own"), ((160, False), (639, False), (640, True)))
def test_tokens_are_shared_by_the_experts_of_all_ranks(tokens: int, own: bool, chosen: list[str]) -> None:
    call = make_call("none", tokens=tokens, top_k=2, experts=8)._replace(num_experts=32)
    cuda_sm90_bf16.run(call, torch.empty(0))
    assert chosen == ["own" if own else "triton"]


def test_float16_hidden_states_are_for_triton(chosen: list[str]) -> None:
    call = make_call("none", tokens=4000, top_k=2, experts=8)
    cuda_sm90_bf16.run(call._replace(hidden_states=call.hidden_states.half()), torch.empty(0))
    assert chosen == ["triton"] and set(BACKENDS[NAME].hidden_dtypes) >= {torch.float16, torch.bfloat16}


@pytest.mark.parametrize(
    ("fields", "text"),
    (
        ({}, ""),
        ({"hidden_size": 200}, "hidden_size must be a multiple of 16, got 200"),
        ({"intermediate_size": 72}, "intermediate_size must be a multiple of 16, got 72"),
        ({"dtype": torch.float16}, "dtype must be torch.bfloat16"),
        ({"capability": (10, 0)}, "compute capability must be (9, 0)"),
        ({"scheme": "nvfp4"}, "scheme must be one of ['none'], got 'nvfp4'"),
    ),
)
def test_requirements(fields: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {
        "scheme": "none",
        "device": "cuda",
        "capability": (9, 0),
        "dtype": torch.bfloat16,
        "num_experts": 8,
    }
    usual |= {"hidden_size": 256, "intermediate_size": 128}
    backend = BACKENDS[NAME]
    problem = Problem(**usual | fields)
    reasons = [r for need in backend.requires if not need.of_machine and (r := need.unmet(problem)) is not None]
    assert len(reasons) == (1 if text else 0) and all(text in reason for reason in reasons)
    assert backend.layout is linear.LINEAR and backend.auto


def test_the_op_takes_weights_as_they_are() -> None:
    with FakeTensorMode():
        x, ids, factors = torch.empty(5, 256).bfloat16(), torch.empty(5, 2, dtype=torch.int32), torch.empty(5, 2)
        weights = {"w13": torch.empty(4, 384, 256).bfloat16(), "w2": torch.empty(4, 256, 192).bfloat16()}
        absent: dict[str, Any] = dict.fromkeys(("hidden_states_scale", "w13_bias", "w2_bias"))
        given = {"hidden_states": x, "topk_ids": ids, "topk_weights": factors, "backend": NAME, "act_format": "none"}
        out = torch.ops.moeq.moe_routed(**given, **weights, **absent)
    assert out.shape == (5, 256) and out.dtype == torch.bfloat16


def test_it_is_preferred_to_triton() -> None:
    names = list(BACKENDS)
    assert names.index(NAME) < names.index("triton")
