"""Producers that let the next kernel start before they have stored: a router, and one that takes its time.

In CUDA graphs, where kernels follow each other closely. test_triton_order.py finds the same faults without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton
import triton.language as tl
from early_producer import produce_early
from gpu_layers import FORMATS, Format, Sizes, as_reference, make_batch, make_raw, prepare
from lora_cases import factors_of
from tolerances import BF16, relative_l2
from torch import Tensor
from triton.language.extra import cuda as tl_cuda
from triton_cases import empty_output, make_call, packed_input

import torch_moe_ops as moe
from torch_moe_ops.backends import triton as backend
from torch_moe_ops.core.schemes import SCHEMES

pytestmark = pytest.mark.gpu

LAYER = Sizes(experts=16, top_k=4, hidden=2048, inter=768)
ROUTING = moe.Routing("renormalize", LAYER.top_k)
TOKENS = (1, 2, 5, 40)
REPLAYS = 40
PLAIN = [None, *(f for f in FORMATS if f.scheme == "none")]  # None: the backend that `prepare` chooses
# 16,800 pairs: the kernels for Hopper sort more than 16,384 by a cluster of blocks. Rows are short, so that a producer's
# blocks leave room for kernels that begin beside them.
MANY, MANY_TOKENS = Sizes(experts=16, top_k=4, hidden=128, inter=128), 4200
SORTED = [fmt for fmt in FORMATS if fmt.backend.startswith("cuda_sm90")]
PACKED = [(s, act) for s in SCHEMES for act in SCHEMES[s].act_formats if act != "none"]

plain_layers = pytest.mark.parametrize("fmt", PLAIN, ids=str)
tokens = pytest.mark.parametrize("tokens", TOKENS)
last_input = pytest.mark.parametrize("last", range(3), ids=("hidden_states", "topk_ids", "topk_weights"))


def make_layers(fmt: Format | None) -> tuple[moe.PreparedWeights, moe.PreparedWeights]:
    """An unquantized layer, and the same one on `reference`."""
    like = fmt or next(f for f in FORMATS if f.scheme == "none")
    raw = make_raw(like, LAYER)
    return moe.prepare(raw, device="cuda") if fmt is None else prepare(raw, fmt), as_reference(raw, like)


def capture(body: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The body's result belongs to the graph. Compiles before."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result


def replays_behind_producers(
    layer: Callable[..., Tensor], make: Callable[[int], list[Tensor]], last: int, replays: int
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """A graph of early producers of a layer's inputs and the layer: after each replay, its result and those inputs.

    Args:
        layer: of hidden_states, topk_ids, topk_weights.
        make: these, by a seed.
        last: what the kernel right in front of the layer stores.
        replays: each with new data.
    """
    sources = make(0)
    inputs = [torch.zeros_like(source) for source in sources]
    pairs = list(zip(inputs, sources, strict=True))
    pairs.append(pairs.pop(last))

    def produced() -> Tensor:
        produce_early(*pairs)
        return layer(*inputs)

    graph, result = capture(produced)
    for seed in range(1, replays + 1):
        for source, new in zip(sources, make(seed), strict=True):
            source.copy_(new)
        graph.replay()
        yield result, sources


@triton.jit
def read_twice(value_ptr, out_ptr):
    """What the value is before and after waiting."""
    before = tl.load(value_ptr, volatile=True)
    tl_cuda.gdc_wait()
    tl.store(out_ptr, before)
    tl.store(out_ptr + 1, tl.load(value_ptr, volatile=True))


@pytest.mark.skipif(torch.cuda.get_device_capability() < (9, 0), reason="no dependent launches before SM90")
def test_the_producer_lets_a_dependent_read_too_early() -> None:
    """Else the tests below show nothing."""

    value, new = (torch.full((1,), v, dtype=torch.int32, device="cuda") for v in (3, 5))
    seen = torch.zeros(2, dtype=torch.int32, device="cuda")
    produce_early((value, new), delay_us=200.0)  # compiles
    read_twice[(1,)](value, seen, launch_pdl=True)
    value.fill_(3)
    produce_early((value, new), delay_us=200.0)
    read_twice[(1,)](value, seen, launch_pdl=True)
    assert seen.tolist() == [3, 5]


@plain_layers
@tokens
@pytest.mark.parametrize("monolithic", (False, True), ids=("routed", "monolithic"))
def test_behind_a_router(fmt: Format | None, tokens: int, monolithic: bool) -> None:
    """A GEMM makes the logits, `route` the ids, and the layer reads them: all in one graph."""
    w, reference = make_layers(fmt)
    x = torch.empty(tokens, w.hidden_size, dtype=torch.bfloat16, device="cuda")
    gate = torch.randn(w.hidden_size, LAYER.experts, dtype=torch.bfloat16, device="cuda") * w.hidden_size**-0.5

    def layer(weights: moe.PreparedWeights = w) -> Tensor:
        logits = x @ gate
        if monolithic:
            return moe.fused_moe(x, logits, weights, routing=ROUTING)
        return moe.fused_moe_routed(x, *moe.route(logits, ROUTING), weights)

    x.normal_()
    graph, result = capture(layer)
    errors = []
    for _ in range(REPLAYS):
        x.normal_()
        graph.replay()
        errors.append(relative_l2(result, layer(reference)))
    assert max(errors) < BF16, f"{sum(e >= BF16 for e in errors)} of {REPLAYS} replays are wrong: {max(errors):.1e}"


@plain_layers
@tokens
@last_input
def test_behind_an_early_producer(fmt: Format | None, tokens: int, last: int) -> None:
    """last: what the kernel right in front of the layer stores."""
    w, reference = make_layers(fmt)
    replays = replays_behind_producers(
        lambda *batch: moe.fused_moe_routed(*batch, w),
        lambda seed: make_batch(LAYER, w.hidden_size, tokens, seed=seed), last, REPLAYS,
    )  # fmt: skip
    errors = [relative_l2(result, moe.fused_moe_routed(*batch, reference)) for result, batch in replays]
    assert max(errors) < BF16, f"{sum(e >= BF16 for e in errors)} of {REPLAYS} replays are wrong: {max(errors):.1e}"


@pytest.mark.parametrize(("scheme", "act_format"), PACKED)
@pytest.mark.parametrize("tokens", (1, 5))
def test_packed_hidden_states_behind_an_early_producer(scheme: str, act_format: str, tokens: int) -> None:
    """Without a prologue that would have waited: GEMM1 is the first launch."""
    fields: dict[str, Any] = {"weights": {"group": -1}} if scheme == "int8" else {}
    if act_format == "nvfp4":
        fields |= {"a1": 500.0, "a2": 300.0}
    sources, others = (
        packed_input(make_call(scheme, act_format, tokens=tokens, experts=8, hidden=256, inter=128, seed=s, **fields))
        for s in (0, 1)
    )
    names = ("hidden_states", "hidden_states_scale", "topk_weights", "topk_ids")
    call = sources._replace(**{name: torch.zeros_like(getattr(sources, name)) for name in names})

    def layer() -> Tensor:
        produce_early(*((getattr(call, name), getattr(sources, name)) for name in names))
        out = empty_output(call)
        backend.run(call, out)
        return out

    graph, result = capture(layer)
    for turn in range(8):
        for name in names:
            mine, other = getattr(sources, name), getattr(others, name)
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)
        graph.replay()
        want = empty_output(sources)
        backend.run(sources, want)
        assert torch.equal(result, want), f"replay {turn}"


def judge_many(layer: Callable[..., Tensor], hidden: int, last: int) -> None:
    """Replays behind early producers, against the layer called with the same."""
    replays = replays_behind_producers(layer, lambda seed: make_batch(MANY, hidden, MANY_TOKENS, seed=seed), last, 6)
    for turn, (result, batch) in enumerate(replays):
        assert torch.equal(result, layer(*batch)), f"replay {turn}"


@last_input
@pytest.mark.parametrize("fmt", SORTED, ids=str)
def test_many_pairs_behind_an_early_producer(fmt: Format, last: int) -> None:
    w = prepare(make_raw(fmt, MANY), fmt)
    judge_many(lambda *batch: moe.fused_moe_routed(*batch, w), w.hidden_size, last)


@last_input
@pytest.mark.parametrize("scheme", ("nvfp4", "mxfp4"))
def test_many_pairs_with_adapters_behind_an_early_producer(scheme: str, last: int) -> None:
    fmt = next((f for f in SORTED if (f.backend, f.scheme, f.act_format) == ("cuda_sm90", scheme, "none")), None)
    if fmt is None:
        pytest.skip("needs the kernels for Hopper")
    raw = make_raw(fmt, MANY)
    w, lora = prepare(raw, fmt), factors_of(raw, 1, 16, torch.bfloat16).to("cuda")
    judge_many(lambda *batch: moe.fused_moe_routed(*batch, w, lora=lora), w.hidden_size, last)
