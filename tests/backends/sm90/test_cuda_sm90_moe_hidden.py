"""Router and experts of few tokens in one launch, on a GPU of compute capability 9.0: the bits of the two launches that
it stands for, moeq::route_hidden's and that of the experts with its ids and weights."""

from __future__ import annotations

from typing import Any

import green_contexts
import pytest
import torch
from routing_oracle import WITH_BIAS, draw_bias, groups_of
from sm90_cases import in_tiles, make_call, run_on, why_not_here
from torch import Tensor

from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90 import router
from torch_moe_ops.backends.sm90.router import RouterProduct
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.routing_methods import ROUTING_METHODS

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

BF16 = torch.bfloat16
# experts, top_k, hidden, inter: a unit that blocks share, more experts than blocks, one expert, ragged parts of K
SHAPES = (
    (128, 8, 2048, 64),
    (16, 8, 2048, 768),
    (32, 4, 2880, 128),
    (32, 4, 2720, 128),
    (8, 2, 96, 64),
    (8, 2, 128, 64),
    (60, 6, 2048, 64),
    (256, 8, 1024, 64),
    (512, 22, 1024, 64),
    (300, 1, 512, 64),
    (1, 1, 64, 64),
)
TOKENS = (1, 2, 3, 5, 8)
Routing = tuple[Any, ...]  # of moeq::route, behind the logits
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # ids, weights, logits, output


@pytest.fixture(autouse=True)
def decode_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sm90, "_kernel", lambda call, out, top_k: cuda_sm90.DECODE)
    monkeypatch.setattr(router, "MAX_BYTES", 1 << 30)


def layer(shape: tuple[int, int, int, int], scheme: str = "nvfp4", **fields: Any) -> ExpertsCall:
    experts, top_k, hidden, inter = shape
    sizes = {"experts": experts, "top_k": top_k, "hidden": hidden, "inter": inter}
    return in_tiles(make_call(scheme, tokens=max(TOKENS), **sizes, **fields))


def router_of(call: ExpertsCall, seed: int = 0) -> Tensor:
    hidden = call.hidden_states.shape[1]
    g = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(call.num_experts, hidden, generator=g, device="cuda") * hidden**-0.5 * 2).to(BF16)


def of_tokens(call: ExpertsCall, tokens: int) -> ExpertsCall:
    return call._replace(hidden_states=call.hidden_states[:tokens].contiguous(), topk_ids=None, topk_weights=None)


def in_two(call: ExpertsCall, weight: Tensor, bias: Tensor | None, routing: Routing, dtype: torch.dtype) -> Results:
    ids, weights, logits = torch.ops.moeq.route_hidden(call.hidden_states, weight, bias, *routing, dtype)
    return ids, weights, logits, run_on("decode", call._replace(topk_ids=ids, topk_weights=weights))


def in_one(call: ExpertsCall, weight: Tensor, bias: Tensor | None, routing: Routing, dtype: torch.dtype) -> Results:
    x = call.hidden_states
    out = torch.full(x.shape, float("nan"), dtype=call.out_dtype, device=x.device)
    logits = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=dtype, device=x.device)
    chosen = cuda_sm90.run_hidden(call, RouterProduct(weight, bias, logits), routing, out)
    assert chosen is not None
    return *chosen, logits, out


def check(call: ExpertsCall, weight: Tensor, bias: Tensor | None, routing: Routing, dtype: torch.dtype) -> None:
    got, want = in_one(call, weight, bias, routing, dtype), in_two(call, weight, bias, routing, dtype)
    for name, a, b in zip(("ids", "weights", "logits", "output"), got, want, strict=True):
        assert torch.equal(a.nan_to_num(7e4), b.nan_to_num(7e4)), (name, call.hidden_states.shape[0])


@pytest.mark.parametrize("scheme", ("nvfp4", "mxfp4"))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_two_launches(shape: tuple[int, int, int, int], scheme: str) -> None:
    call = layer(shape, scheme)
    weight = router_of(call)
    routing = (None, "renormalize", shape[1], 0, 0, 1.0, None)
    for tokens in TOKENS:
        for dtype in (BF16, torch.float32, torch.float16):
            check(of_tokens(call, tokens), weight, None, routing, dtype)


@pytest.mark.parametrize("fields", ({"act_format": "nvfp4", "a1": 300.0, "a2": 200.0}, {"act_format": "nvfp4"}))
@pytest.mark.parametrize("tokens", (1, 8))
def test_rounded_activations(fields: dict[str, Any], tokens: int) -> None:
    call = layer((16, 4, 512, 256), **fields)
    check(of_tokens(call, tokens), router_of(call), None, (None, "default", 4, 0, 0, 1.0, True), BF16)


@pytest.mark.parametrize("tokens", (1, 4, 8))
def test_biases_and_experts_of_a_share(tokens: int) -> None:
    """As gpt-oss has them, the router's too; ids of other ranks contribute nothing."""
    for foreign in (False, True):
        call = layer((32, 4, 960, 256), "mxfp4", activation="swigluoai", bias=True, foreign=foreign)
        bias = torch.randn(call.num_experts, device="cuda").to(BF16)
        check(of_tokens(call, tokens), router_of(call), bias, (None, "renormalize", 4, 0, 0, 1.0, None), BF16)


@pytest.mark.parametrize("method", ROUTING_METHODS)
def test_every_method(method: str) -> None:
    top_k = 1 if method == "llama4" else 6
    call = layer((64, top_k, 256, 64))
    bias = draw_bias(64, seed=4).cuda() if method in WITH_BIAS else None
    for tokens in (1, 7):
        routing = (bias, method, top_k, *groups_of(method, (8, 3)), 1.0, None)
        check(of_tokens(call, tokens), router_of(call), None, routing, torch.float32)


def test_equal_logits_nan_and_infinity() -> None:
    call = layer((128, 8, 512, 64))
    weight = router_of(call)
    weight[3] = weight[35] = weight[36] = weight[127]
    x = call.hidden_states
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    x[3] = 0
    for method in ("default", "renormalize"):
        for dtype in (BF16, torch.float32):
            check(of_tokens(call, 8), weight, None, (None, method, 8, 0, 0, 1.0, None), dtype)


def test_weights_and_tokens_anywhere() -> None:
    call = of_tokens(layer((40, 4, 256, 64)), 5)
    weight, routing = router_of(call), (None, "renormalize", 4, 0, 0, 1.0, None)
    want = in_two(call, weight, None, routing, BF16)
    for first in (0, 8, 1, 3):
        wide = torch.full((40, 304), float("nan"), dtype=BF16, device="cuda")
        wide[:, first : first + 256] = weight
        got = in_one(call, wide[:, first : first + 256], None, routing, BF16)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_many_launches_of_several_shapes_in_a_graph() -> None:
    """They share an exchange, with those that are given ids: none takes another's logits."""
    layers = [layer(shape) for shape in ((128, 8, 2048, 64), (8, 2, 128, 64), (60, 6, 2048, 64))]
    calls = [of_tokens(call, tokens) for tokens in (1, 8, 3) for call in layers]
    routings = [(None, "renormalize", call[1], 0, 0, 1.0, None) for call in ((128, 8), (8, 2), (60, 6))] * 3
    weights = [router_of(call, i) for i, call in enumerate(calls)]
    rows = list(zip(calls, weights, routings, strict=True))
    want = [in_two(call, weight, None, routing, BF16) for call, weight, routing in rows]

    def run() -> list[Results]:
        results = []
        for i, (call, weight, routing) in enumerate(rows):
            results.append(in_one(call, weight, None, routing, BF16))
            given = rows[i - 1][0]._replace(topk_ids=want[i - 1][0], topk_weights=want[i - 1][1])
            run_on("decode", given)
        return results

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(50):
        for results in got:
            for tensor in results:
                tensor.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for g, w in zip(got, want, strict=True) for a, b in zip(g, w, strict=True))


@pytest.mark.parametrize(("share", "hidden", "tokens"), ((64, 2048, 4), (16, 2048, 4), (16, 7168, 4), (16, 7168, 8)))
def test_on_a_part_of_the_gpu(share: int, hidden: int, tokens: int) -> None:
    """An exchange of the launch's own; of 16 multiprocessors, blocks have eight experts each, whose rows of 7168 find no
    room beside eight tokens."""
    call = of_tokens(layer((128, 8, hidden, 64)), tokens)
    weight, routing = router_of(call), (None, "renormalize", 8, 0, 0, 1.0, None)
    torch.cuda.synchronize()
    stream = green_contexts.split(share, 1)[0].stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            check(call, weight, None, routing, BF16)
    stream.synchronize()


def test_it_is_one_launch() -> None:
    from torch.profiler import ProfilerActivity, profile

    call = of_tokens(layer((128, 8, 2048, 64)), 2)
    weight, routing = router_of(call), (None, "renormalize", 8, 0, 0, 1.0, None)
    in_one(call, weight, None, routing, BF16)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        in_one(call, weight, None, routing, BF16)
        torch.cuda.synchronize()
    ours = [event.name for event in seen.events() if "moeq" in event.name]
    assert len(ours) == 1 and "decode_few_routed_kernel" in ours[0], ours
