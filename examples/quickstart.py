"""The main job: an NVFP4 checkpoint -> one `torch.ops.moeq.nvfp4_moe` call in a compiled model.

    python examples/quickstart.py [CHECKPOINT] [--layer N] [--top-k K] [--tokens T]
Exit status 1: the result is further from the reference than rounding explains.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import torch_moe_ops as moe

CHECKPOINT = Path(__file__).resolve().parents[1] / "tests/data/checkpoints/qwen3_moe_modelopt_nvfp4"
# Both results are rounded to bfloat16 once (2^-9); the float32 sums before that differ in their order.
MAX_ERROR = 4e-3


class MoELayer(nn.Module):
    """Router logits in, experts' output out: one op. Prepared weights are tensors and plain values."""

    def __init__(self, weights: moe.PreparedWeights, top_k: int) -> None:
        super().__init__()
        self.weights = weights
        self.top_k = top_k

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        w = self.weights
        return torch.ops.moeq.nvfp4_moe(
            hidden_states,
            None,  # hidden_states_scale: only for hidden states that are quantized already
            router_logits,
            None,  # routing_bias
            *w.op_weights(),  # w13 and w2 with their scales and biases, activation scales
            w.backend,
            routing_method="renormalize",
            top_k=self.top_k,
            act_format=w.act_format,
            activation=w.activation,
            swiglu_alpha=w.swiglu_alpha,
            swiglu_beta=w.swiglu_beta,
            swiglu_limit=w.swiglu_limit,
        )


def median_ms(function: Callable[..., Tensor], *args: Tensor) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        function(*args)
        if args[0].is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run one NVFP4 MoE layer of a checkpoint.")
    parser.add_argument("checkpoint", nargs="?", type=Path, default=CHECKPOINT)
    parser.add_argument("--layer", type=int, default=None, help="default: the first one with experts")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    layers = moe.load_experts(args.checkpoint, layer=args.layer)
    raw = layers if isinstance(layers, moe.RawWeights) else next(layers)  # layer=None yields all of them
    if raw.scheme != "nvfp4":
        sys.exit(f"{raw.source}: this example calls nvfp4_moe, the experts are {raw.scheme} (see moe.fused_moe)")
    print(f"checkpoint  {raw.source}")
    print(f"sizes       {raw.num_experts} experts, hidden {raw.hidden_size}, intermediate {raw.intermediate_size}")
    weights = moe.prepare(raw, device=device)
    print(moe.explain(weights))

    hidden_states = torch.randn(args.tokens, raw.hidden_size, device=device).bfloat16()
    router_logits = torch.randn(args.tokens, raw.num_experts, device=device)
    print(f"compiling for {args.tokens} tokens on {device} ...", flush=True)
    compiled = torch.compile(MoELayer(weights, args.top_k), fullgraph=True)
    out = compiled(hidden_states, router_logits)

    # The oracle: pure torch, every rounding step of the numerics contract.
    oracle = MoELayer(moe.prepare(raw, device=device, backend="reference"), args.top_k)
    expected = oracle(hidden_states, router_logits).double()
    error = ((out.double() - expected).norm() / expected.norm()).item()
    print(f"error       {error:.2e} relative L2 against the reference (allowed {MAX_ERROR:.0e})")
    print(f"time        {median_ms(compiled, hidden_states, router_logits):.3f} ms, median of 20 calls")
    return 0 if error <= MAX_ERROR else 1  # a NaN fails, too


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
