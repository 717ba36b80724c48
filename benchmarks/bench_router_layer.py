#!/usr/bin/env python3
"""Time the MoE layers of a transformers model, one behind the other in a CUDA graph: with their routers, and without.

    python benchmarks/bench_router_layer.py --out benchmarks/results/h200_router_layer.jsonl

"layer" is router and experts as the model calls them, "experts" the experts alone on ids that are given. What a router
costs is what lies between. `--between norm` has the
model's norm in front of each layer, and `attention` two of the attention's products too, as a model has them: kernels
that let none behind them begin early, and whose code and weights take the caches; "between" is what these take alone.
Weights come from memory, as layers are more than the L2 holds, and each layer routes by its own router. Microseconds a
layer, the median of `--turns` in which each way is timed once. transformers must be importable, as for
bench_transformers_model.py.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import result_lines
import torch
from bench_transformers_model import blocks_of, nothing, through_blocks, through_experts
from model_graphs import capture, timed
from transformers_models import SHAPES, build


def in_front(model: Any, what: str) -> Callable[[int, torch.Tensor], Any]:
    """What runs in front of each layer's router: kernels of the model, whose results nobody reads."""
    layers = model.model.layers

    def norm(number: int, hidden: torch.Tensor) -> torch.Tensor:
        return layers[number].post_attention_layernorm(hidden)

    def attention(number: int, hidden: torch.Tensor) -> torch.Tensor:
        own = layers[number].self_attn
        return norm(number, own.o_proj(own.q_proj(hidden)))

    return {"nothing": nothing, "norm": norm, "attention": attention}[what]


def through_nothing(model: Any, batch: int, before: Callable[[int, torch.Tensor], Any]) -> Callable[[], Any]:
    """What runs in front of the layers, without them."""
    hidden = torch.randn(batch, 1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    return lambda: [before(i, hidden) for i in range(len(blocks_of(model)))]


def in_turns(
    model: Any, tokens: int, before: Callable[[int, torch.Tensor], Any], turns: int, rounds: int
) -> dict[str, float]:
    """Microseconds a layer of each way."""
    ways = {"layer": through_blocks, "experts": through_experts, "between": through_nothing}
    if before is nothing:
        del ways["between"]
    replays = {}
    for what, through in ways.items():
        replays[what] = capture(through(model, tokens, before))
    times: dict[str, list[float]] = {what: [] for what in ways}
    for _ in range(turns):
        for what, replay in replays.items():
            times[what].append(timed(replay, rounds)["ms"] * 1e3 / len(blocks_of(model)))
    return {what: statistics.median(each) for what, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ms", default="1,8,64")
    parser.add_argument("--between", default="nothing", help="of nothing, norm, attention")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = [result_lines.environment()]
    for shape in args.shapes.split(","):
        torch.manual_seed(0)
        model = build(shape, torch.device("cuda"), layers=args.layers)
        for between, tokens in itertools.product(args.between.split(","), map(int, args.ms.split(","))):
            us = in_turns(model, tokens, in_front(model, between), args.turns, args.rounds)
            us |= {"router": us["layer"] - us["experts"]}
            record = {"event": "router_layer", "shape": shape, "M": tokens, "between": between}
            lines.append(record | {f"{what}_us": round(value, 3) for what, value in us.items()})
            print(lines[-1], flush=True)
        del model
    result_lines.write(lines, args.out)


if __name__ == "__main__":
    with torch.no_grad():
        main()
