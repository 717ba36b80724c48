#!/usr/bin/env python3
"""Time vLLM's own MoE layer, from router logits to its result, with vLLM's methods and with the plug-in's.

    python benchmarks/bench_vllm_layer.py --layers qwen3_30b/fp8,dsv3/fp8 --out FILE   # where vLLM 0.26 to 0.33 is
    python benchmarks/bench_vllm_layer.py --warm-seconds 60 --budget 100               # where nothing is compiled yet

The layer is what vLLM's models build (`FusedMoE`: router, experts, runner) of a checkpoint (vllm_formats.py has the
formats) with the same random weights; only the method of its experts differs: vLLM's kernels (`marlin`, `humming`,
`triton`), and ours, `moeq`, as the registered plug-in gives it. Medians of CUDA graph replays over rotating routings,
the layers taking turns (peers/README.md has the protocol); before that results are compared. `scripts/carry_vllm.sh`
packs what it needs of vLLM for a machine without a network. Most of a first call is compilation (humming's kernels,
Triton's, Marlin's PTX by the driver), whose results lie in caches on disk: --warm-seconds lets a process a layer
make its first calls, all at the same time, before anything is timed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))  # read when CUDA starts: room for what the driver compiles
_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parent), str(_HERE), str(_HERE / "peers")]

import result_lines  # noqa: E402
import torch  # noqa: E402
import vllm_formats  # noqa: E402
from moe_peers import common, runner  # noqa: E402

OURS = "moeq"
SLOW = ("humming",)  # compiles a table of kernels at its first call: left out where that was not ready in time
# Relative L2 distance between two methods: each rounds the intermediate result, and fp8 activations, in its own way.
CLOSE = {"fp8": 6e-2}
CLOSE_ELSE = 2e-2
_NUMBERS = itertools.count()  # of the layers, which vLLM wants apart


def build(way: str, fmt: str, weights: common.Weights, number: int) -> tuple[Any, Any]:
    """(the layer, the config it runs under); number: of the layer in its model, which vLLM wants unique."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import fused_moe

    made = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE  # its name until 0.31
    shape, config = weights.shape, VllmConfig()
    config.model_config = types.SimpleNamespace(
        dtype=torch.bfloat16, quantization_config=None
    )  # all that a layer reads
    config.kernel_config.moe_backend = "auto" if way == OURS else way
    with set_current_vllm_config(config), torch.device(common.DEV):
        layer = made(
            num_experts=shape.E,
            top_k=shape.k,
            hidden_size=shape.H,
            intermediate_size=shape.I,
            params_dtype=torch.bfloat16,
            renormalize=True,
            quant_config=vllm_formats.config_of(fmt, way == OURS),
            tp_size=1,
            dp_size=1,
            pcp_size=1,
            prefix=f"model.layers.{number}.mlp.experts",
        )
        experts = layer.routed_experts
        vllm_formats.fill(experts, fmt, weights)
        experts.quant_method.process_weights_after_loading(experts)
    return layer, config


class VllmLayer(runner.UnderTest):
    """vLLM's layer from router logits."""

    def __init__(self, way: str, fmt: str, weights: common.Weights, number: int) -> None:
        from vllm.forward_context import set_forward_context

        layer, config = build(way, fmt, weights, number)

        def forward(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            with set_forward_context(None, config):
                return layer(x, logits)

        super().__init__(f"vllm-{way}", fmt, forward, True)
        method = layer.routed_experts.quant_method
        self.runs = type(method).__name__
        if way == OURS:
            self.runs += f" on {layer.routed_experts.moeq_weights.backend}, activations {method.plan.act_format}"

    def details(self, M: int) -> dict[str, Any]:
        return {"method": self.runs}


def layers_of(shape: common.Shape, fmt: str, ways: list[str], sink: common.Sink) -> Iterator[VllmLayer]:
    """One layer for each way that runs the format; one that fails is reported, and the others go on."""
    torch.manual_seed(0)
    weights = common.Weights.random(fmt, shape)
    for way in ways:
        if way != OURS and way not in vllm_formats.FORMATS[fmt].ways:
            continue
        begin = time.monotonic()
        try:
            layer = VllmLayer(way, fmt, weights, next(_NUMBERS))
        except Exception as error:
            sink.emit(event="error", layer=way, fmt=fmt, shape=shape.name, where="build", err=repr(error)[:600])
            continue
        seconds = round(time.monotonic() - begin, 1)
        sink.emit(event="built", layer=way, fmt=fmt, shape=shape.name, method=layer.runs, seconds=seconds)
        yield layer


def compare(layers: list[VllmLayer], shape: common.Shape, ms: list[int], sink: common.Sink) -> None:
    """Every layer's result beside the first one's; a layer that fails leaves the list."""
    for m in ms:
        inputs, first = common.make_inputs(shape, m, 5), None
        for layer in list(layers):
            where = {"layer": layer.key, "shape": shape.name, "M": m}
            begin = time.monotonic()
            try:
                result = layer(*layer.prepare(inputs)).float()
                torch.cuda.synchronize()
            except Exception as error:
                layers.remove(layer)
                sink.emit(event="error", **where, where="first call", err=repr(error)[:600])
                continue
            seconds = round(time.monotonic() - begin, 1)
            first = result if first is None else first
            error, limit = common.relative_error(result, first), CLOSE.get(layer.fmt, CLOSE_ELSE)
            sink.emit(event="check", **where, rel_err=error, limit=limit, ok=error < limit, first_call_s=seconds)


def start() -> None:
    """The plug-in as vLLM's processes load it; groups of one process and the workspace, which layers ask for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    from torch_moe_ops.vllm import register

    register()
    with set_current_vllm_config(VllmConfig()):
        backend = "nccl" if common.DEV == "cuda" else "gloo"
        method = f"tcp://127.0.0.1:{20000 + os.getpid() % 20000}"
        init_distributed_environment(1, 0, method, 0, backend)
        initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device(common.DEV))


def run(layer: str, ways: list[str], args: argparse.Namespace, context: Any, sink: common.Sink, ends: float) -> None:
    """Build, compare and time one layer ("SHAPE/FORMAT") by each of the ways that run it."""
    name, _, fmt = layer.partition("/")
    shape = common.parse_shapes(name)[0]
    layers, ms = list(layers_of(shape, fmt, ways, sink)), [int(m) for m in args.ms.split(",")]
    compare(layers, shape, ms, sink)
    for m in ms if not args.warm else ():
        if time.monotonic() < ends:
            try:
                runner.time_one(shape, "uniform", common.uniform, m, layers, context, sink, args.reps, 0)
            except Exception as error:
                sink.emit(event="error", shape=shape.name, fmt=fmt, M=m, where="run", err=repr(error)[:600])
    layers.clear()
    runner.free()


def warm(args: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Begin the first calls of every shape and format in processes of their own, a file each."""
    started = []
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 8))}
    for layer in args.layers.split(","):
        words = [__file__, "--warm", "--layers", layer, "--ms", args.ms, "--ways", args.ways]
        if args.out:
            words += ["--out", f"{args.out}.warm-{layer.replace('/', '-')}"]
        environment = {**os.environ, **threads}
        started.append(subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL))
    return started


def wait(started: list[subprocess.Popen[bytes]], until: float) -> list[bool]:
    """Whether each got through; what is not ready in time is ended, since it would disturb what is timed."""
    for process in started:
        try:
            process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [process.returncode >= 0 for process in started]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ways", default="moeq,marlin,triton,humming", help="those that have no such format are left out"
    )
    layers = ",".join(f"qwen3_30b/{fmt}" for fmt in ("nvfp4", "fp8", "mxfp4", "int4g32"))
    formats = ", ".join(vllm_formats.FORMATS)
    parser.add_argument("--layers", default=layers, help=f"SHAPE/FORMAT,...; formats: {formats}")
    parser.add_argument("--ms", default="1,8,64,256,1024")
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--budget", type=float, default=0, help="seconds after which nothing new is begun; 0: none")
    parser.add_argument("--warm", action="store_true", help="first calls and their comparison alone, nothing is timed")
    parser.add_argument("--warm-seconds", type=float, default=0, help="of first calls in other processes, at most")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    begin = time.monotonic()
    started = warm(args) if args.warm_seconds else []
    import vllm

    ends, sink = begin + (args.budget or 1e9), common.Sink(args.out)
    sink.emit(**result_lines.environment(), date=datetime.date.today().isoformat(), vllm=vllm.__version__)
    start()
    wanted, ways = args.layers.split(","), args.ways.split(",")
    ready = wait(started, begin + args.warm_seconds) or [True] * len(wanted)
    sink.emit(event="warm", seconds=round(time.monotonic() - begin, 1), ready=dict(zip(wanted, ready, strict=True)))
    context = runner.Context(Path("."))
    with torch.inference_mode():
        for layer, is_ready in zip(wanted, ready, strict=True):
            if time.monotonic() < ends:
                run(layer, [way for way in ways if is_ready or way not in SLOW], args, context, sink, ends)
    return runner.finish(sink)


if __name__ == "__main__":
    raise SystemExit(main())
