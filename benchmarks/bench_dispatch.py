"""Call overhead of an op on a CPU: nvfp4_moe_routed with 0 tokens, all arguments, and where the time goes.

    python benchmarks/bench_dispatch.py [--out benchmarks/results/dispatch_cpu.json]

Best of 60 rounds of 2,000 calls each, one thread; in inference mode but where it says otherwise.
"""

from __future__ import annotations

import argparse
import json
import platform
import timeit
from collections.abc import Callable

import torch

import torch_moe_ops as moe
from torch_moe_ops.core.schemas import LIB, SCHEMAS

ROUNDS, CALLS = 60, 2_000
BUDGET_US = 10.0


def best_us(call: Callable[[], object]) -> float:
    """Microseconds a call."""
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


def measure() -> dict[str, float]:
    """Each row includes the ones that it names."""
    w13, w2 = torch.randn(4, 96, 64).bfloat16(), torch.randn(4, 64, 48).bfloat16()
    raw = moe.quantize_experts(
        w13,
        w2,
        a13_input_scale=torch.tensor(0.01),
        a2_input_scale=torch.tensor(0.01),
        w13_bias=torch.zeros(4, 96),
        w2_bias=torch.zeros(4, 64),
    )
    w = moe.prepare(raw, act_format="nvfp4")
    x = torch.zeros(0, 64, dtype=torch.bfloat16)
    ids, weights = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2)
    scalars = (w.backend, "nvfp4", "silu", None, None, None, 4, 0, False, "exact", None)
    args = (x, None, ids, weights, *w.op_weights(), *scalars)
    # The same schema with an empty Python body: what torch itself takes.
    LIB.define("empty_body_for_the_benchmark" + SCHEMAS["nvfp4_moe_routed"])
    LIB.impl("empty_body_for_the_benchmark", lambda *_: x, "CPU")
    op, empty = torch.ops.moeq.nvfp4_moe_routed.default, torch.ops.moeq.empty_body_for_the_benchmark.default
    packet = torch.ops.moeq.nvfp4_moe_routed
    with torch.inference_mode():
        figures = {
            "dispatcher alone (empty Python body)": best_us(lambda: empty(*args)),
            "x.new_empty": best_us(lambda: x.new_empty((0, 64), dtype=torch.bfloat16)),
            "nvfp4_moe_routed.default, positional": best_us(lambda: op(*args)),
            "nvfp4_moe_routed, positional": best_us(lambda: packet(*args)),
            "moe.fused_moe_routed": best_us(lambda: moe.fused_moe_routed(x, ids, weights, w)),
        }
    for mode, context in (("under no_grad", torch.no_grad), ("in grad mode", torch.enable_grad)):
        with context():
            figures[f"nvfp4_moe_routed.default, {mode}"] = best_us(lambda: op(*args))
            figures[f"dispatcher alone, {mode}"] = best_us(lambda: empty(*args))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="write the figures to this JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure()
    torch_itself = figures["dispatcher alone (empty Python body)"] + figures["x.new_empty"]
    figures["of which our checks and binding"] = figures["nvfp4_moe_routed, positional"] - torch_itself
    for name, us in figures.items():
        print(f"{us:7.2f} us  {name}")
    verdict = figures["nvfp4_moe_routed, positional"] <= BUDGET_US
    print(f"budget {BUDGET_US} us: {'kept' if verdict else 'EXCEEDED'}")
    if options.out:
        about = {"torch": torch.__version__, "python": platform.python_version(), "cpu": platform.processor()}
        with open(options.out, "w") as file:
            json.dump({"command": "python benchmarks/bench_dispatch.py", **about, "us": figures}, file, indent=1)


if __name__ == "__main__":
    main()
