#!/usr/bin/env python3
"""Rules by which a backend takes one of its kernels for a number of tokens: one layer by each kernel, in turns.

    python benchmarks/bench_rules.py --rule packed --shapes qwen3_30b,dsv3 --ms 2,4,8,12,16 --seconds 60 --out FILE
    python benchmarks/bench_rules.py --rule fp8 --fmts fp8,fp8row --shapes mixtral --ms 2,4,8,64 --out FILE
    python benchmarks/bench_rules.py --rule int4 --fmts int4-a8,int4zp-a8 --ms 256,512 --peers humming --out FILE

packed: `cuda_sm90_packed` by the decode kernel, as far as it takes the layer, and by the prefill kernels. fp8:
`cuda_sm90_fp8` as it chooses, by the decode kernel (where that does not take the layer, by prefill's), by Triton's
kernels of its tiles, by the exact kernels (where they do not take the layer, by its own for as many tokens), and by the
prefill kernels. int4: `cuda_sm90_int4` beside fp8 activations by products of fp8 codes, where it has them, and of
bfloat16. Labels are the backend and the kernel. The layers take turns
(peers/README.md has the protocol).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE / "peers")]

import bench_peers  # noqa: E402
import moe_layers  # noqa: E402
import result_lines  # noqa: E402
import torch  # noqa: E402
from moe_peers import common, runner  # noqa: E402
from torch import Tensor  # noqa: E402

from torch_moe_ops.backends import cuda_sm90_fp8, cuda_sm90_w4a8  # noqa: E402
from torch_moe_ops.backends.sm90 import fp8_products  # noqa: E402
from torch_moe_ops.core.call import ExpertsCall  # noqa: E402
from torch_moe_ops.core.kernel_facts import Sm90Few  # noqa: E402

Globals = Mapping[tuple[ModuleType, str], Any]  # of a module, by name -> what they are for a while


class Rule(NamedTuple):
    """kinds: name of a kernel -> globals of the backend by which it takes no other."""

    backend: str
    fmt: str
    kinds: Mapping[str, Globals]


def _never(call: ExpertsCall) -> bool:
    return False


def _always(call: ExpertsCall) -> bool:
    return True


_run_fp8 = cuda_sm90_fp8.run_cuda


def _prefill_fp8(call: ExpertsCall, out: Tensor) -> None:
    _run_fp8(call, out, decode_tokens=0)


def _packed_tokens(most: int) -> Globals:
    return {(cuda_sm90_w4a8, "packed_tokens"): lambda *sizes: most}


_FP8 = cuda_sm90_fp8
RULES = {
    "packed": Rule(
        "cuda_sm90_packed",
        "nvfp4-a8",
        {"decode": _packed_tokens(Sm90Few.MAX_TOKENS_PACKED), "prefill": _packed_tokens(0)},
    ),
    "fp8": Rule(
        "cuda_sm90_fp8",
        "fp8",
        {
            "default": {},
            "decode": {(_FP8, "by_decode"): _always},
            "triton": {(_FP8, "_few_slots"): lambda *layer: 1e9, (_FP8, "by_decode"): _never},
            "exact": {
                **dict.fromkeys(((_FP8, "by_triton"), (_FP8, "by_decode")), _never),
                (_FP8, "EXACT_SLOTS"): (-1.0, 1e9),
            },
            "prefill": {(_FP8, "by_triton"): _never, (_FP8, "by_exact"): _never, (_FP8, "run_cuda"): _prefill_fp8},
        },
    ),
    "int4": Rule(
        "cuda_sm90_int4",
        "int4-a8",
        {"fp8": {(fp8_products, "LEAST_SLOTS"): 0}, "bf16": {(fp8_products, "LEAST_SLOTS"): 1 << 40}},
    ),
}


@contextmanager
def replaced(values: Globals) -> Iterator[None]:
    """Globals of modules, for a while."""
    with ExitStack() as stack:
        for (module, name), value in values.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class ByOneKernel(runner.UnderTest):
    """A layer of a rule's backend by one of its kernels."""

    def __init__(self, rule: Rule, kind: str, layer: moe_layers.OurLayer):
        def forward(*args: Tensor) -> Any:
            with replaced(rule.kinds[kind]):
                return layer.fn(*args)

        super().__init__(f"{layer.label}-{kind}", layer.fmt, forward, False)


def entry(rule: Rule, fmt: str) -> runner.Entry:
    """What the benchmark builds for every shape. gpt-oss as peers run it: silu, no biases."""

    def build(fmt: str, weights: common.Weights, context: Any) -> list[ByOneKernel]:
        layer = moe_layers.OurLayer(rule.backend, fmt, weights, alike=weights.shape.name == moe_layers.GPT_OSS)
        return [ByOneKernel(rule, kind, layer) for kind in rule.kinds]

    return runner.Entry(rule.backend, fmt, build)


def main() -> int:
    parser = bench_peers.parser()
    parser.description = __doc__
    parser.add_argument("--rule", choices=RULES, required=True)
    parser.add_argument("--fmts", help="comma list; default: one of the rule's backend")
    parser.add_argument("--seconds", type=float, default=60, help="nothing is begun after that")
    parser.set_defaults(reps=9, peers="")
    args = parser.parse_args()
    sys.path.insert(0, str(args.peers_dir.resolve()))
    ends, rule = time.monotonic() + args.seconds, RULES[args.rule]
    entries = [entry(rule, fmt) for fmt in (args.fmts or rule.fmt).split(",")]
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
