#!/usr/bin/env python3
"""Time layers whose experts lie partly on a GPU and partly on the host: CUDA graphs of several layers, and a profile.

    python benchmarks/bench_host_experts.py --out benchmarks/results/h200_host_experts_layer.jsonl

Layers of Qwen3-30B's sizes (2048, 768, 128 experts, top 8) on random weights, `--layers` of them one after the other in
one graph, each with weights of its own, so that no cache holds them. Every replay gets another routing, drawn evenly.
Experts on the GPU: the first `n` of 128. A line a split, a number of tokens and a format: microseconds a layer, medians
of rounds that go through all splits in turn; "close": the relative distance from the layers that are whole on the GPU.
"profile" (in `--profile`): of one replay, microseconds a layer that the CPU ran, the GPU's kernels ran, and both did;
"beside_us": the kernels' time in which rows were on their way to the host, the CPU ran, or its result came back.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.extension import has_cpu_extension
from torch_moe_ops.host_experts import layer as layers_module

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 128, 8


class ClonedWeights:
    """`prepare` that lays out weights of one size once, and gives every layer a copy of its own."""

    def __init__(self) -> None:
        self.real = layers_module.prepare
        self.known: dict[Any, moe.PreparedWeights] = {}

    def __call__(self, raw: moe.RawWeights, **options: Any) -> moe.PreparedWeights:
        key = (raw.scheme, raw.num_experts, str(options["device"]), options.get("local_expert_offset", 0))
        if key not in self.known:
            self.known[key] = self.real(raw, **options)
        w = self.known[key]
        return dataclasses.replace(w, **{name: t.clone() for name, t in w.tensors().items()})  # type: ignore[arg-type]


def random_layer(scheme: str, sizes: tuple[int, int, int], device: torch.device) -> moe.RawWeights:
    experts, hidden, inter = sizes
    w13 = torch.randn(experts, 2 * inter, hidden, device=device, dtype=torch.bfloat16) * 0.02
    w2 = torch.randn(experts, hidden, inter, device=device, dtype=torch.bfloat16) * 0.02
    return moe.quantize_experts(w13, w2, scheme)


class Chain:
    """Layers one after the other on given rows, as a graph."""

    def __init__(self, layers: list[moe.HostExperts], given: tuple[Tensor, list[Tensor], Tensor]) -> None:
        self.layers, (self.hidden, self.ids, self.weights) = layers, given
        self()
        self()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self()

    def __call__(self) -> Tensor:
        hidden = self.hidden
        for layer, ids in zip(self.layers, self.ids, strict=True):
            hidden = hidden + layer(hidden, ids, self.weights)
        return hidden

    def seconds(self) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - begin


def reroute(ids: list[Tensor], experts: int) -> None:
    for t in ids:
        t.copy_(torch.rand(t.shape[0], experts, device=t.device).topk(t.shape[1]).indices)


def profile(chain: Chain) -> dict[str, Any]:
    """From a trace of one replay: the GPU's kernels, the host functions, and the time that both ran."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        chain.seconds()
    n = len(chain.layers)
    events = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in events if not e.name.lower().startswith(("memcpy", "memset"))]
    copies = [e for e in events if e.name.lower().startswith("memcpy")]
    back = sorted(e.time_range.start for e in copies if "HtoD" in e.name)
    there = sorted(e.time_range.end for e in copies if "DtoH" in e.name)
    # The host function of a layer lies between the last copy to the host and the copy back.
    host = [(max(t for t in there if t <= start), start) for start in back if there and there[0] <= start]
    spans = [(e.time_range.start, e.time_range.end) for e in kernels]

    def shared(parts: list[tuple[int, int]]) -> int:
        return sum(max(0, min(b, d) - max(a, c)) for a, b in parts for c, d in spans)

    sent = sorted(e.time_range.start for e in copies if "DtoH" in e.name)
    came = sorted(e.time_range.end for e in copies if "HtoD" in e.name)
    before = [0, *came]  # a layer's part of the host: from its first copy there to the end of the one back
    aside = [(min(t for t in sent if t >= last), end) for last, end in zip(before, came, strict=False)]
    return {
        "kernels_us": round(sum(b - a for a, b in spans) / n, 1),
        "host_us": round(sum(b - a for a, b in host) / n, 1),
        "both_us": round(shared(host) / n, 1),
        "beside_us": round(shared(aside) / n, 1),
        "copies": len(copies) / n,
        "kernels": len(kernels) / n,
    }


def measure(args: argparse.Namespace, sizes: tuple[int, int, int], note: Callable[..., None]) -> None:
    device = torch.device("cuda")
    experts, hidden, _ = sizes
    for scheme in args.schemes.split(","):
        layers_module.prepare = ClonedWeights()
        raw = random_layer(scheme, sizes, device)
        splits = [int(n) for n in args.on_gpu.split(",")]
        begin = time.perf_counter()
        layers = {
            n: [moe.HostExperts(raw, experts - n, act_format="none", device=device) for _ in range(args.layers)]
            for n in splits
        }
        note(what="build", scheme=scheme, seconds=round(time.perf_counter() - begin, 1))
        for tokens in (int(t) for t in args.tokens.split(",")):
            ids = [torch.zeros(tokens, TOP_K, dtype=torch.int32, device=device) for _ in range(args.layers)]
            reroute(ids, experts)
            x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
            given = (x, ids, torch.full((tokens, TOP_K), 1 / TOP_K, device=device))
            chains = {n: Chain(layers[n], given) for n in splits}
            times: dict[int, list[float]] = {n: [] for n in splits}
            close = dict.fromkeys(splits, 0.0)
            for _ in range(args.rounds):
                reroute(ids, experts)
                for n, chain in chains.items():
                    times[n].append(chain.seconds() * 1e6 / args.layers)
                reference = chains[max(splits)].out.float()
                for n, chain in chains.items():
                    found = (chain.out.float() - reference).norm() / (reference - x.float()).norm()
                    close[n] = max(close[n], found.item())
            for n in splits:
                figures = {"us": round(statistics.median(times[n]), 1), "best_us": round(min(times[n]), 1)}
                seen = profile(chains[n]) if args.profile else {}
                note(what="layer", scheme=scheme, tokens=tokens, on_gpu=n, close=round(close[n], 5), **figures, **seen)
            del chains
        del layers
        layers_module.prepare = layers_module.prepare.real


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="nvfp4")
    parser.add_argument("--on-gpu", default="0,16,64,128")
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU's kernels; 0: torch's")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not (torch.cuda.is_available() and has_cpu_extension()):
        parser.error("a GPU and the CPU extension are needed")
    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "cpu_threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
    }
    machine["kernels"] = torch.ops.moeq_C.cpu_isa()

    def note(**line: Any) -> None:
        print(json.dumps(line), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    note(what="machine", torch=torch.__version__, library=moe.__version__, **machine)
    with torch.no_grad():
        measure(args, (args.experts, HIDDEN, INTER), note)


if __name__ == "__main__":
    main()
