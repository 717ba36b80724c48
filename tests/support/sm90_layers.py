"""Whole layers for the Hopper kernels, 8 experts of 256 x 128, and what every backend must do with them in a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import torch_moe_ops as moe


def random_raw(scheme: str, seed: int = 0) -> moe.RawWeights:
    """Quantized experts on the GPU."""
    g = torch.Generator().manual_seed(seed)
    w13, w2 = torch.randn(8, 256, 256, generator=g) / 16, torch.randn(8, 256, 128, generator=g) / 11
    return moe.quantize_experts(w13.bfloat16(), w2.bfloat16(), scheme).to("cuda")


def batch(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids and weights of two experts a token."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 256, generator=g).bfloat16().cuda()
    ids, weights = moe.route(torch.randn(tokens, 8, generator=g).cuda(), moe.Routing("renormalize", 2))
    return x, ids, weights


def check_graph(w: moe.PreparedWeights, tokens: int, raw_of: Callable[[int], moe.RawWeights]) -> None:
    """A captured call follows other routings, and in the end other weights: raw_of(seed)."""
    x, ids, weights = batch(tokens)
    moe.fused_moe_routed(x, ids, weights, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.fused_moe_routed(x, ids, weights, w)
    for seed in range(2, 5):
        for mine, other in zip((x, ids, weights), batch(tokens, seed), strict=True):
            mine.copy_(other)
        if seed == 4:
            w.update_(raw_of(seed))
        graph.replay()
        assert torch.equal(out, moe.fused_moe_routed(x, ids, weights, w))
