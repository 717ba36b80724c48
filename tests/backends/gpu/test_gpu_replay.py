"""Determinism on a GPU: captured graphs, repeated runs, torch.compile; bit for bit what an eager call gives."""

from __future__ import annotations

import pytest
import torch
from gpu_layers import (
    FORMATS,
    GPU_BACKENDS,
    ROUTINGS,
    WIDE,
    Format,
    Sizes,
    formats,
    make_batch,
    make_raw,
    needs_cuda,
    prepare,
)

import torch_moe_ops as moe

pytestmark = [pytest.mark.gpu, needs_cuda]

LAYER = Sizes(experts=16, top_k=4, hidden=704, inter=352, bias=True)
FEW, MANY = 9, 300  # tokens, as in test_gpu_schemes: what one test compiles, others find in the cache


@formats
@pytest.mark.parametrize("tokens", (1, FEW, MANY))
def test_a_replay_follows_the_routing(fmt: Format, tokens: int) -> None:
    w = prepare(make_raw(fmt, WIDE), fmt)
    x, ids, weights = make_batch(WIDE, w.hidden_size, tokens)
    first = moe.fused_moe_routed(x, ids, weights, w)  # compiles
    assert torch.equal(first, moe.fused_moe_routed(x, ids, weights, w))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe.fused_moe_routed(x, ids, weights, w)
    for seed, routing in enumerate(ROUTINGS, 1):
        for old, new in zip((x, ids, weights), make_batch(WIDE, w.hidden_size, tokens, routing, seed), strict=True):
            old.copy_(new)
        captured.fill_(float("nan"))
        graph.replay()
        eager = moe.fused_moe_routed(x, ids, weights, w)
        assert torch.isfinite(eager).all(), routing
        assert torch.equal(captured, eager), routing
    graph.replay()
    assert torch.equal(captured, eager)


@formats
def test_a_call_does_not_wait_for_the_device(fmt: Format) -> None:
    w = prepare(make_raw(fmt, WIDE), fmt)
    batch = make_batch(WIDE, w.hidden_size, FEW)
    moe.fused_moe_routed(*batch, w)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe.fused_moe_routed(*batch, w)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@formats
def test_a_call_runs_on_the_current_stream(fmt: Format) -> None:
    w = prepare(make_raw(fmt, WIDE), fmt)
    x, ids, weights = make_batch(WIDE, w.hidden_size, FEW)
    want = moe.fused_moe_routed(x, ids, weights, w)
    twice = moe.fused_moe_routed(x * 2, ids, weights, w)
    assert not torch.equal(want, twice)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.mul_(2)  # seen only by work that waits for this stream
        out = moe.fused_moe_routed(x, ids, weights, w)
    side.synchronize()
    assert torch.equal(out, twice)


# Inductor takes seconds for each: one format of every backend.
_FIRST = [next(f for f in FORMATS if f.backend == name) for name in GPU_BACKENDS if any(f.backend == name for f in FORMATS)]  # fmt: skip


@pytest.mark.parametrize("fmt", _FIRST, ids=str, scope="module")
def test_compiled_with_its_router(fmt: Format) -> None:
    w = prepare(make_raw(fmt, LAYER), fmt)
    routing = moe.Routing("deepseek_v3", 4, 4, 2, 2.5, torch.randn(16, device="cuda") * 0.1)

    def layer(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x + moe.fused_moe(x, x @ gate, w, routing=routing)

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    gate = torch.randn(w.hidden_size, 16, device="cuda", dtype=torch.bfloat16) * w.hidden_size**-0.5
    for seed in range(4):
        x = make_batch(LAYER, w.hidden_size, 24, seed=seed)[0]
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x, gate).clone(), layer(x, gate))
