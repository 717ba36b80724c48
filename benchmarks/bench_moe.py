#!/usr/bin/env python3
"""Time the library's Triton engine and other fused-MoE libraries side by side (see peers/README.md for the protocol).

    bash benchmarks/peers/fetch_peers.sh
    python benchmarks/bench_moe.py --peers marlin,humming --shapes qwen3_30b --ms 1,64,4096 --check --out results.jsonl

Formats of --moeq-fmts: nvfp4 (16-bit activations), nvfp4-a4 (NVFP4 activations, static scales), bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE / "peers")]

from torch_moe_ops.activations import resolve_constants  # noqa: E402
from torch_moe_ops.backends import triton as backend  # noqa: E402
from torch_moe_ops.ops.call import ExpertsCall  # noqa: E402

# What inputs of standard deviation 0.5 and their intermediate calibrate to, near enough for e4m3 block scales.
GSCALE = 1000.0


def make_call(fmt: str, weights: dict[str, Any], activation: str) -> ExpertsCall:
    """A call without hidden states and routing, from weights as moe_peers.common.Weights holds them.

    Raises NotImplementedError for a format or activation that the kernels do not have.
    """
    base, _, tail = fmt.partition("-")
    if base not in ("nvfp4", "bf16") or tail not in ("", "a4") or (base == "bf16" and tail):
        raise NotImplementedError(f"format {fmt}")
    name = {"silu": "silu", "relu2": "relu2_no_mul"}[activation]
    alpha, beta, limit = resolve_constants(name)
    fields: dict[str, Any] = dict.fromkeys(ExpertsCall._fields)
    fields |= {
        "scheme": "none" if base == "bf16" else "nvfp4",
        "w13": weights["w13"],
        "w13_scale": weights["w13_scale"],
        "g1_alphas": weights["w13_global"],
        "w2": weights["w2"],
        "w2_scale": weights["w2_scale"],
        "g2_alphas": weights["w2_global"],
        "backend": "triton",
        "act_format": "nvfp4" if tail else "none",
        "activation": name,
        "swiglu_alpha": alpha,
        "swiglu_beta": beta,
        "swiglu_limit": limit,
        "num_experts": weights["w13"].shape[0],
        "local_expert_offset": 0,
        "router_weight_on_input": False,
        "weight_policy": "exact",
        "out_dtype": torch.bfloat16,
    }
    if tail:
        gscale = torch.tensor(GSCALE, device=weights["w13"].device)
        # The alphas of quantized activations hold 1 / gscale.
        fields |= {"a1_gscale": gscale, "a2_gscale": gscale}
        fields |= {name: fields[name] / gscale for name in ("g1_alphas", "g2_alphas")}
    return ExpertsCall(**fields)


def make(
    E: int,
    k: int,
    H: int,
    I: int,  # noqa: E741
    fmt: str,
    real_weights: dict[str, Any],
    activation: str = "silu",
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Factory for --moeq: forward(x, topk_ids, topk_weights) -> [M, H] in bfloat16."""
    template = make_call(fmt, real_weights, activation)

    def forward(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        backend.run(template._replace(hidden_states=x, topk_ids=topk_ids, topk_weights=topk_weights), out)
        return out

    return forward


def main() -> int:
    import bench_peers

    arguments = sys.argv[1:]
    if not any(a.startswith("--moeq") and not a.startswith("--moeq-fmts") for a in arguments):
        arguments += ["--moeq", "triton=bench_moe:make"]
    args = bench_peers.parser().parse_args(arguments)
    known = bench_peers.common.ROUTINGS
    routings = {name: known[name] for name in args.routing.split(",")}
    return bench_peers.main(args, bench_peers.common.parse_shapes(args.shapes), routings)


if __name__ == "__main__":
    raise SystemExit(main())
