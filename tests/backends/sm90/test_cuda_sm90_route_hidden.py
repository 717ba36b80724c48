"""moeq::route_hidden by its kernel, on a GPU of compute capability 9.0: its logits against float64, its choice against
routing of the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from routing_oracle import WITH_BIAS, draw_bias, groups_of
from sm90_cases import why_not_here
from torch import Tensor

from torch_moe_ops.backends.sm90 import router
from torch_moe_ops.core.routing_methods import ROUTING_METHODS
from torch_moe_ops.routing.reference import append_shared, route_reference

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

# experts, hidden size; the last ones are of no model: ragged tiles, and a single load.
SHAPES = ((128, 2048), (32, 2880), (128, 2880), (256, 7168), (512, 2048), (60, 2048), (160, 1000), (1, 8), (17, 40))
TOKENS = (1, 2, 7, 8, 9, 16, 31, 64)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Of sums in float32, relative to the sum of all magnitudes: tensor cores cut off what the largest addend's last bits
# do not hold.
SUMS = 2.0**-20

shapes = pytest.mark.parametrize(("experts", "hidden"), SHAPES)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is right for routers, too, for which two launches are faster."""
    monkeypatch.setattr(router, "MAX_BYTES", 1 << 30)


def operands(tokens: int, experts: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g, device="cuda").bfloat16()
    return x, (torch.randn(experts, hidden, generator=g, device="cuda") * hidden**-0.5 * 2).bfloat16()


def run(x: Tensor, weight: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    assert router.takes(x, weight, 0), "the kernel is what is tested"
    return torch.ops.moeq.route_hidden(x, weight, *options, **named)


def check_logits(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    half_ulp = torch.finfo(got.dtype).eps / 2 * (1 + 1e-3)
    bound = SUMS * size + half_ulp * exact.abs() + 2.0**-25
    assert ((got.double() - exact).abs() <= bound).all()


@shapes
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_what_is_chosen_by_them(experts: int, hidden: int, dtype: torch.dtype) -> None:
    top_k = min(8, experts)
    for tokens in TOKENS:
        x, weight = operands(tokens, experts, hidden, tokens)
        ids, weights, logits = run(x, weight, None, None, "renormalize", top_k, logits_dtype=dtype)
        assert logits.dtype == dtype and logits.shape == (tokens, experts)
        check_logits(logits, x, weight)
        want_ids, want = route_reference(logits, None, "renormalize", top_k)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", (8, 60, 128, 256, 512))
def test_equal_logits_go_by_their_number(experts: int, dtype: torch.dtype) -> None:
    """Within a lane (32 experts apart), on neighbouring lanes, zeros of either sign, and where all are equal."""
    g = torch.Generator("cuda").manual_seed(experts)
    x, weight = operands(8, experts, 64, experts)
    weight[1] = weight[2] = weight[experts - 1]
    if experts > 64:
        weight[40] = weight[72] = weight[8]
    x[3] = 0
    x[5, 0] = float("nan")
    x[6] *= -1
    for few in (2, 3, 5):  # rows drawn from so few
        drawn = weight[torch.randint(0, few, (experts,), generator=g, device="cuda")]
        for w in (weight, drawn):
            for top_k in (1, 2, min(8, experts), min(22, experts)):
                for method in ("default", "renormalize"):
                    ids, weights, logits = run(x, w, None, None, method, top_k, logits_dtype=dtype)
                    want_ids, want = route_reference(logits, None, method, top_k)
                    assert torch.equal(ids, want_ids)
                    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ROUTING_METHODS)
@pytest.mark.parametrize(("experts", "hidden", "groups"), ((128, 256, (8, 3)), (256, 512, (8, 4)), (60, 96, (5, 3))))
def test_every_method(method: str, experts: int, hidden: int, groups: tuple[int, int]) -> None:
    bias = draw_bias(experts, seed=4).cuda() if method in WITH_BIAS else None
    top_k, split = 1 if method == "llama4" else 6, groups_of(method, groups)
    for tokens in (1, 5, 20):
        x, weight = operands(tokens, experts, hidden, tokens)
        ids, weights, logits = run(x, weight, None, bias, method, top_k, *split)
        want_ids, want = route_reference(logits, bias, method, top_k, *split)
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_a_bias_of_the_product(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    x, weight = operands(9, 32, 2880)
    bias = torch.randn(32, device="cuda").to(bias_dtype)
    _, _, logits = run(x, weight, bias, None, "renormalize", 4, logits_dtype=dtype)
    check_logits(logits, x, weight, bias)


@pytest.mark.parametrize("given", (None, torch.float32, torch.bfloat16))
def test_shared_experts_have_columns(given: torch.dtype | None) -> None:
    x, weight = operands(11, 64, 512)
    shared = None if given is None else torch.rand(11, 1, device="cuda").to(given).expand(-1, 3)
    ids, weights, logits = run(x, weight, None, None, "default", 4, num_shared_experts=3, shared_expert_weights=shared)
    chosen = route_reference(logits, None, "default", 4)
    want_ids, want = append_shared(*chosen, 64, 3, shared)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


@shapes
def test_a_token_does_not_depend_on_the_others(experts: int, hidden: int) -> None:
    """Nor do bits vary from run to run."""
    x, weight = operands(64, experts, hidden)
    top_k = min(6, experts)
    whole = run(x, weight, None, None, "default", top_k)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(x, weight, None, None, "default", top_k), whole, strict=True))
    for first, last in ((0, 1), (3, 4), (5, 14), (63, 64)):
        part = run(x[first:last], weight, None, None, "default", top_k)
        assert all(torch.equal(a, b[first:last]) for a, b in zip(part, whole, strict=True))


def test_rows_anywhere_in_memory() -> None:
    x, weight = operands(9, 40, 264)
    want = run(x, weight, None, None, "renormalize", 4)
    wide = torch.full((9, 304), float("nan"), dtype=torch.bfloat16, device="cuda")
    for first in (0, 8, 1, 3):
        wide[:, first : first + 264] = x
        moved = torch.empty(40 * 264 + 8, dtype=torch.bfloat16, device="cuda")[first:][: 40 * 264].view(40, 264)
        moved.copy_(weight)
        got = torch.ops.moeq.route_hidden(wide[:, first : first + 264], moved, None, None, "renormalize", 4)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nan_and_infinity_reach_the_logits_that_have_them() -> None:
    x, weight = operands(4, 32, 256)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    weight[5, 0] = float("nan")
    ids, weights, logits = run(x, weight, None, None, "renormalize", 4)
    assert logits[1].isnan().all() and not logits[2].isfinite().any()
    assert logits[[0, 3]].isnan().sum(0).tolist() == [2 * (i == 5) for i in range(32)]
    want_ids, want = route_reference(logits, None, "renormalize", 4)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("early", (False, True))
@pytest.mark.parametrize("tokens", (1, 8, 33))
def test_in_a_graph_behind_a_producer(tokens: int, early: bool) -> None:
    """One that lets the next kernel start before it has stored, too; hidden states and weights are both written there."""
    pytest.importorskip("triton", reason="needs Triton")
    from early_producer import produce_early

    source, weights = operands(tokens, 128, 2048)
    x, weight = torch.zeros_like(source), torch.zeros_like(weights)

    def body() -> tuple[Tensor, ...]:
        if early:
            produce_early((x, source), (weight, weights))
        else:
            x.copy_(source)
            weight.copy_(weights)
        first = run(x, weight, None, None, "renormalize", 8, logits_dtype=torch.bfloat16)
        return *first, *run(x, weight, None, None, "default", 8)

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    for seed in range(30):
        new, other = operands(tokens, 128, 2048, seed)
        source.copy_(new)
        weights.copy_(other)
        x.fill_(float("nan"))
        graph.replay()
        want = run(new, other, None, None, "renormalize", 8, logits_dtype=torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=False))
        want = run(new, other, None, None, "default", 8)
        assert all(torch.equal(a, b) for a, b in zip(out[3:], want, strict=True))


def test_a_large_router_is_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = operands(3, 128, 2048)
    assert router.takes(x, weight, 0)
    monkeypatch.setattr(router, "MAX_BYTES", weight.nbytes - 1)
    assert not router.takes(x, weight, 0)
    check_logits(torch.ops.moeq.route_hidden(x, weight, None, None, "renormalize", 8)[2], x, weight)


def test_more_tokens_than_the_kernel_takes() -> None:
    for tokens in (0, router.MAX_TOKENS + 1, 300):
        x, weight = operands(tokens, 128, 512)
        for dtype in DTYPES[:2]:
            options: dict[str, Any] = {"logits_dtype": dtype}
            ids, weights, logits = torch.ops.moeq.route_hidden(x, weight, None, None, "renormalize", 8, **options)
            want_ids, want = route_reference(logits, None, "renormalize", 8)
            if dtype == torch.float32:
                check_logits(logits, x, weight)
            else:
                assert torch.equal(logits, torch.nn.functional.linear(x, weight))
            assert torch.equal(ids, want_ids)
            torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)
