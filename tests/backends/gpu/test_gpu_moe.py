"""The library's main job on a GPU: checkpoints, compiled, captured, updated in place."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fixture_layers import CHECKPOINTS, NVFP4_LAYERS, expected
from problems import Case, make_batch, make_raw
from tolerances import BF16, relative_l2

import torch_moe_ops as moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
layers = pytest.mark.parametrize(("name", "layer"), NVFP4_LAYERS)


@layers
@pytest.mark.parametrize("act_format", ["none", "nvfp4"])
def test_checkpoints(name: str, layer: int, act_format: str) -> None:
    want = expected(name, layer)
    raw = moe.load_experts(CHECKPOINTS / name, layer=layer)
    x, ids, weights = want.hidden.cuda(), want.ids.cuda(), want.weights.cuda()
    w = moe.prepare(raw, act_format=act_format, device="cuda")
    assert w.backend in ("cuda_sm90", "triton"), moe.explain(w)
    out = moe.fused_moe_routed(x, ids, weights, w)
    reference = moe.prepare(raw, act_format=act_format, device="cuda", backend="reference")
    assert relative_l2(out, moe.fused_moe_routed(x, ids, weights, reference)) < BF16
    if act_format == "none":
        assert relative_l2(out, want["moe_out_dequant"]) < BF16


def test_reference_is_the_same_on_both_devices() -> None:
    case = Case(act_format="nvfp4", input_scale="expert", per_half=True, bias=True, tokens=17)
    x, ids, weights = make_batch(case)
    pair = []
    for device in ("cpu", "cuda"):
        w = moe.prepare(make_raw(case), act_format="nvfp4", backend="reference", device=device)
        pair.append(moe.fused_moe_routed(x.to(device), ids.to(device), weights.to(device), w))
    assert relative_l2(*pair) < 2e-3


def test_a_compiled_layer_replays_as_a_cuda_graph() -> None:
    case = Case(act_format="nvfp4", input_scale="tensor", experts=8, hidden=256, inter=128, tokens=16)
    w = moe.prepare(make_raw(case), act_format="nvfp4", device="cuda")
    routing = moe.Routing("renormalize", 2)

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + moe.fused_moe_routed(x, ids, weights, w)

    for seed in range(4):
        x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
        ids, weights = moe.route(torch.randn(16, 8, device="cuda") + seed, routing)
        torch.compiler.cudagraph_mark_step_begin()
        got = layer(x, ids, weights).clone()
        assert torch.equal(got, x + moe.fused_moe_routed(x, ids, weights, w))


def test_a_captured_graph_sees_updated_weights() -> None:
    case = Case(act_format="nvfp4", input_scale="tensor", hidden=128, inter=64, tokens=8)
    w = moe.prepare(make_raw(case), act_format="nvfp4", device="cuda")
    x, ids, weights = make_batch(case, "cuda")
    moe.fused_moe_routed(x, ids, weights, w)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.fused_moe_routed(x, ids, weights, w)
    new = make_raw(dataclasses.replace(case, seed=7))
    w.update_(new.to("cuda"))
    graph.replay()
    fresh = moe.prepare(new, act_format="nvfp4", device="cuda")
    assert torch.equal(out, moe.fused_moe_routed(x, ids, weights, fresh))


def test_mixed_devices_name_the_argument() -> None:
    w = moe.prepare(make_raw(Case()), act_format="none", device="cuda")
    x, ids, weights = make_batch(Case(), "cuda")
    with pytest.raises(RuntimeError, match="topk_ids must be on cuda:0 like hidden_states, got cpu"):
        moe.fused_moe_routed(x, ids.cpu(), weights, w)
