"""One MoE layer on this CPU beside kt-kernel, in turns in one process, and how far both are from a float64 layer.

    pip install --no-deps --target SITE kt-kernel==0.7.2
    python benchmarks/bench_cpu_kt.py --site SITE [--schemes mxfp4 none] [--tokens 1 8 64 256 1024] [--json FILE]

kt-kernel's compiled module is called by itself, as its own wrapper calls it (its Python part wants other releases of
torch and of the package that reads GGUF files): weights in MXFP4 or bfloat16, bfloat16 hidden states. Its threads spin,
and so does the one that hands work to them: on two cores a pool of one thread (--kt-threads 1) is faster at one token.
Routings change from call to call, so that weights come from memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from float64_layer import layer_in_float64, relative
from torch import Tensor

import torch_moe_ops as moe

EXPERTS, TOP_K, HIDDEN, INTER = 128, 8, 2048, 768  # Qwen3-30B-A3B
ROUTINGS = 16
ROUNDS = 3
CHECKED = 16  # tokens of which the distance is taken
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def kt_extension(site: Path) -> ModuleType:
    """kt-kernel's compiled module, in the variant that it picks for this processor."""
    file = site / "kt_kernel" / "_cpu_detect.py"
    spec = importlib.util.spec_from_file_location("kt_cpu_detect", file, submodule_search_locations=[])
    assert spec is not None and spec.loader is not None
    package = ModuleType("kt_kernel")
    package.__path__ = [str(file.parent)]
    sys.modules["kt_kernel"] = package
    detect = importlib.util.module_from_spec(spec)
    detect.__package__ = "kt_kernel"
    spec.loader.exec_module(detect)
    extension, variant = detect.initialize()
    print({"kt_kernel": variant}, flush=True)
    return extension


class Layer:
    """Random weights of one scheme: as a checkpoint has them, for both sides, and in float64 for some experts."""

    def __init__(self, scheme: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.scheme = scheme
        shapes = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}
        self.weights: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}  # e8m0 bytes
        for name, (rows, k) in shapes.items():
            if scheme == "none":
                w = torch.randn(EXPERTS, rows, k, generator=generator) / k**0.5
                self.weights[name] = w.bfloat16()
            else:
                self.weights[name] = torch.randint(0, 256, (EXPERTS, rows, k // 2), generator=generator).byte()
                self.scales[name] = torch.randint(119, 123, (EXPERTS, rows, k // 32), generator=generator).byte()

    def raw(self) -> moe.RawWeights:
        w13 = torch.cat([self.weights["gate"], self.weights["up"]], 1)
        if self.scheme == "none":
            return moe.RawWeights("none", w13, self.weights["down"])
        scale = torch.cat([self.scales["gate"], self.scales["up"]], 1)
        return moe.RawWeights("mxfp4", w13, self.weights["down"], w13_scale=scale, w2_scale=self.scales["down"])

    def in_float64(self, name: str, expert: int) -> Tensor:
        w = self.weights[name][expert]
        if self.scheme == "none":
            return w.double()
        codes = torch.stack([w & 15, w >> 4], -1).flatten(-2).long()
        scale = torch.exp2(self.scales[name][expert].double() - 127)
        return E2M1[codes] * scale.repeat_interleave(32, -1)

    def want(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        def expert(number: int) -> tuple[Tensor, Tensor, Tensor]:
            gate, up, down = (self.in_float64(name, number) for name in ("gate", "up", "down"))
            return gate, up, down

        return layer_in_float64(expert, x, ids, weights)


def ours(layer: Layer) -> Run:
    w = moe.prepare(layer.raw(), backend="cpu")

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.fused_moe_routed(x, ids, weights, w)

    return run


def theirs(layer: Layer, kt: Any, max_tokens: int, threads: int) -> Run:
    workers = kt.WorkerPoolConfig()
    workers.subpool_count, workers.subpool_numa_map, workers.subpool_thread_count = 1, [0], [threads]
    engine = kt.CPUInfer(workers)
    on_gpu = torch.zeros(EXPERTS, dtype=torch.bool)
    config = kt.moe.MOEConfig(EXPERTS, TOP_K, HIDDEN, INTER, on_gpu.data_ptr())
    config.layer_idx, config.pool, config.max_len = 0, engine.backend_, max_tokens
    keep: list[Any] = [on_gpu]
    for name in ("gate", "up", "down"):
        setattr(config, f"{name}_projs", [[w.data_ptr() for w in layer.weights[name]]])
        if layer.scheme == "mxfp4":  # powers of two, which it takes in bfloat16
            scale = torch.exp2(layer.scales[name].float() - 127).bfloat16()
            keep.append(scale)
            setattr(config, f"{name}_scales", [[s.data_ptr() for s in scale]])
        else:
            setattr(config, f"{name}_scales", [[0] * EXPERTS])
    if layer.scheme == "mxfp4":
        quant = config.quant_config
        quant.bits, quant.group_size, quant.zero_point = 4, 32, False
        its = kt.moe.AMXFP4_KGroup_MOE(config)
    else:
        its = kt.moe.AMXBF16_MOE(config)
    order = torch.arange(EXPERTS)
    engine.submit(its.load_weights_task(order.data_ptr()))
    engine.sync()
    keep += [config, order]
    count = torch.zeros(1, dtype=torch.int32)

    def run(x: Tensor, ids: Tensor, weights: Tensor, _keep: list[Any] = keep) -> Tensor:
        out = torch.empty_like(x)
        count[0] = x.shape[0]
        arguments = (ids.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr())
        engine.submit(its.forward_task(count.data_ptr(), TOP_K, *arguments, False))
        engine.sync()
        return out

    return run


def routings(tokens: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    made = []
    for seed in range(ROUTINGS):
        logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
        weights, ids = logits.softmax(-1).topk(TOP_K)
        made.append((ids.to(dtype), weights.contiguous()))
    return made


def milliseconds(run: Run, x: Tensor, routes: list[tuple[Tensor, Tensor]], seconds: float) -> list[float]:
    times: list[float] = []
    run(x, *routes[0])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < ROUTINGS:
        ids, weights = routes[len(times) % ROUTINGS]
        start = time.perf_counter()
        run(x, ids, weights)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def distance(run: Run, layer: Layer, dtype: torch.dtype) -> float:
    """Relative L2 to the layer in float64."""
    x = torch.randn(CHECKED, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids, weights = routings(CHECKED, dtype)[0]
    return relative(run(x, ids, weights), layer.want(x, ids, weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, required=True, help="folder that kt-kernel was installed into")
    parser.add_argument("--schemes", nargs="+", choices=["mxfp4", "none"], default=["mxfp4", "none"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--kt-threads", type=int, default=torch.get_num_threads(), help="of its pool, which spin")
    parser.add_argument("--json", type=Path, help="append one line per measurement to this file")
    args = parser.parse_args()
    kt = kt_extension(args.site)
    where = {"machine": platform.processor() or platform.machine(), "isa": torch.ops.moeq_C.cpu_isa()}
    where |= {"threads": torch.get_num_threads(), "kt_threads": args.kt_threads, "torch": torch.__version__}
    for scheme in args.schemes:
        layer = Layer(scheme)
        # Its buffers have room for so many tokens; more are not refused but written beyond them.
        its = theirs(layer, kt, max(*args.tokens, CHECKED), args.kt_threads)
        sides = {"torch_moe_ops": (ours(layer), torch.int32), "kt_kernel 0.7.2": (its, torch.int64)}
        far = {name: distance(run, layer, dtype) for name, (run, dtype) in sides.items()}
        for tokens in args.tokens:
            x = torch.randn(tokens, HIDDEN).bfloat16()
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(ROUNDS):
                for name, (run, dtype) in sides.items():
                    times[name] += milliseconds(run, x, routings(tokens, dtype), args.seconds)
            for name, values in times.items():
                line = {"library": name, "scheme": scheme, "tokens": tokens}
                line |= {"median_ms": round(statistics.median(values), 4), "best_ms": round(min(values), 4)}
                line |= {"calls": len(values), "relative_l2": float(f"{far[name]:.3g}")}
                print("  ".join(f"{key}={value}" for key, value in line.items()), flush=True)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(where | line) + "\n")


if __name__ == "__main__":
    main()
