#!/usr/bin/env python3
"""Time the library's GPU backends and other fused-MoE libraries side by side (peers/README.md has the protocol).

    bash benchmarks/peers/fetch_peers.sh
    python benchmarks/bench_moe.py --fmts nvfp4,nvfp4-a4 --peers marlin,humming --shapes qwen3_30b --ms 1,64,4096 \
        --check --out results.jsonl

--fmts: nvfp4, mxfp4, int4, fp8 (128x128 blocks), bf16; `-a4`, `-a8`, `-a16` tell the bits of the activations. Ours
beside mxfp4-a8 are mxfp8, beside mxfp4-a8row fp8 with a scale for each token, which is what other libraries run as
mxfp4-a8.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE / "peers")]

import bench_peers  # noqa: E402
import moe_layers  # noqa: E402
import result_lines  # noqa: E402
import warm  # noqa: E402
from moe_peers import common, runner  # noqa: E402

import torch_moe_ops as moe  # noqa: E402
from torch_moe_ops.tuning import tuned  # noqa: E402


def main() -> int:
    parser = bench_peers.parser()
    parser.description = __doc__
    parser.add_argument("--backends", default="cuda_sm90,triton", help="of the library; the first is compared with")
    parser.add_argument("--fmts", default="nvfp4", help="comma list of " + ", ".join(moe_layers.FORMATS))
    parser.add_argument("--warm", type=float, default=60, help="seconds to compile ahead in several processes, at most")
    parser.add_argument("--warm-only", action="store_true", help="compile ahead and stop")
    parser.set_defaults(reps=15, peers="")
    args = parser.parse_args()
    sys.path.insert(0, str(args.peers_dir.resolve()))
    ours = moe_layers.entries(args.backends.split(","), args.fmts.split(","))
    entries = ours + runner.peer_entries(args.peers, bench_peers.registry())
    shapes, ms = common.parse_shapes(args.shapes), [int(m) for m in args.ms.split(",")]
    routings = {name: common.ROUTINGS[name] for name in args.routing.split(",")}
    bf16, fp8 = (t * 1e12 for t in args.tflops)
    machine = common.Machine(args.bandwidth * 1e9, {16: bf16, 8: fp8, 4: fp8})
    if args.dry_run:
        bench_peers.dry_run(shapes, ms, entries, machine, routings)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --dry-run works without one")
    if args.warm_only:
        print(f"compiled in {warm.warm([(s, ms) for s in shapes], args.fmts.split(','), args.warm):.1f} s")
        return 0
    options = {"humming": args.humming_gemm, "triton_kernels_split_k": args.split_k}
    context = runner.Context(args.peers_dir.resolve(), machine, options)
    sink = common.Sink(args.out)
    sink.emit(**environment(context, machine))
    if args.warm and "triton" in args.backends.split(","):
        jobs = [(shape, ms) for shape in shapes]
        if args.check:
            jobs += [(common.TINY[act], [1, 7, 64, 333]) for act in {s.act for s in shapes}]
        seconds = warm.warm(jobs, args.fmts.split(","), args.warm)
        sink.emit(event="warm", seconds=round(seconds, 1))
    alive = False
    timing = {"reps": args.reps, "sets": args.sets, "checks": args.check, "budget": args.budget}
    try:
        with torch.inference_mode():
            alive = runner.run(shapes, ms, entries, context, sink, routings=routings, logits=args.logits, **timing)
    finally:
        code = runner.finish(sink, alive)
    return code


def environment(context: runner.Context, machine: common.Machine) -> dict[str, object]:
    """The first line of a run: what it ran on, and the command."""
    import triton

    name = torch.cuda.get_device_name()
    return {
        "event": "env",
        "date": datetime.date.today().isoformat(),
        "library": moe.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "gpu": name,
        "capability": torch.cuda.get_device_capability(),
        "steps": "vllm" if context.moe_ops else "torch",
        "bandwidth": machine.bandwidth,
        "tuned": name in tuned.TABLE,
        "argv": result_lines.arguments(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
