#!/usr/bin/env python3
"""INT4 weights beside fp8 activations: `cuda_sm90_int4` by products of fp8 codes and by products of bfloat16.

    python benchmarks/bench_int4_products.py --shapes qwen3_30b,dsv3 --fmts int4-a8,int4zp-a8 --ms 256,1024,4096 \
        --peers humming --seconds 60 --out FILE

The layers take turns (peers/README.md has the protocol). Labels: cuda_sm90_int4-fp8 and cuda_sm90_int4-bf16, both of
the same prepared weights, whatever the backend would choose by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE / "peers")]

import bench_peers  # noqa: E402
import moe_layers  # noqa: E402
import result_lines  # noqa: E402
import torch  # noqa: E402
from moe_peers import common, runner  # noqa: E402
from torch import Tensor  # noqa: E402

from torch_moe_ops.backends.sm90 import fp8_products  # noqa: E402

BACKEND = "cuda_sm90_int4"
LEAST = {"fp8": 0, "bf16": 1 << 40}  # slots of an expert, from which on products are those of codes


@contextmanager
def products_of(kind: str) -> Iterator[None]:
    kept, fp8_products.LEAST_SLOTS = fp8_products.LEAST_SLOTS, LEAST[kind]
    try:
        yield
    finally:
        fp8_products.LEAST_SLOTS = kept


class Products(runner.UnderTest):
    """A layer of the backend by one kind of products."""

    def __init__(self, kind: str, layer: moe_layers.OurLayer):
        def forward(*args: Tensor) -> Any:
            with products_of(kind):
                return layer.fn(*args)

        super().__init__(f"{BACKEND}-{kind}", layer.fmt, forward, False)


def build(fmt: str, weights: common.Weights, context: Any) -> list[Products]:
    layer = moe_layers.OurLayer(BACKEND, fmt, weights)
    return [Products(kind, layer) for kind in LEAST]


def main() -> int:
    parser = bench_peers.parser()
    parser.description = __doc__
    parser.add_argument("--fmts", default="int4-a8")
    parser.add_argument("--seconds", type=float, default=60, help="nothing is begun after that")
    parser.set_defaults(reps=9, peers="")
    args = parser.parse_args()
    sys.path.insert(0, str(args.peers_dir.resolve()))
    ends, fmts = time.monotonic() + args.seconds, args.fmts.split(",")
    entries = [runner.Entry(BACKEND, fmt, build) for fmt in fmts]
    entries += runner.peer_entries(args.peers, bench_peers.registry())
    context = runner.Context(args.peers_dir.resolve(), options={"humming": args.humming_gemm})
    sink = common.Sink(args.out)
    sink.emit(**result_lines.environment())
    with torch.inference_mode():
        for shape in common.parse_shapes(args.shapes):
            layers = runner.build_layers(shape, entries, context, sink)
            for m in map(int, args.ms.split(",")):
                if time.monotonic() > ends:
                    break
                runner.time_one(shape, "uniform", common.uniform, m, layers, context, sink, args.reps, 0)
            layers.clear()
            runner.free()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
