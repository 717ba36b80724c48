#!/usr/bin/env python3
"""Decode of a whole transformers model whose experts lie partly on a GPU and partly on the host.

    python benchmarks/bench_host_models.py --out benchmarks/results/h200_host_experts_qwen3_30b.json

A Qwen3-30B-shaped model of random NVFP4 experts (all layers have the values of one, each in memory of its own) with
128, 64, 16 and 0 of 128 experts of every layer on the GPU; a decode step is one CUDA graph, and every replay gets other
tokens. "tokens_per_s": by the median of the replays. "distance": of the logits from those of the model that is whole on
the GPU, relative; "yardstick": the same between two of the library's backends, both on the GPU.

"offload": `--peer-layers` layers of unquantized experts in host memory, as accelerate's hooks bring them to the GPU for
each forward, and the same weights as HostExperts with all experts on the host; eager, milliseconds a step.

transformers and accelerate must be importable (see bench_transformers_model.py).
"""

from __future__ import annotations

import argparse
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
import transformers
import transformers_models
from bench_host_experts import ClonedWeights
from bench_transformers_model import Decode
from model_graphs import capture, seconds

import torch_moe_ops as moe
from torch_moe_ops.host_experts import layer as layers_module
from torch_moe_ops.transformers import attach, quantize_model
from torch_moe_ops.transformers.experts import ExpertWeights
from torch_moe_ops.transformers.host_experts import HostExpertWeights
from torch_moe_ops.transformers.modules import find_experts

SHAPE = "qwen3_30b_a3b"


def new_tokens(step: Decode) -> Callable[[], None]:
    def rewind() -> None:
        step.rewind()
        step.ids.random_(0, step.model.config.vocab_size)

    return rewind


def step_times(step: Decode, rounds: int) -> tuple[list[float], torch.Tensor]:
    """Seconds of replays of one graph, and the logits of its last step, whose tokens are the same at every split."""
    replay, rewind = capture(step, step.rewind), new_tokens(step)
    times = []
    for _ in range(rounds):
        rewind()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(seconds(replay))
    return times, fixed_logits(step)


def fixed_logits(step: Decode) -> torch.Tensor:
    step.rewind()
    kept = step.ids.clone()
    numbers = torch.arange(kept.numel(), device=kept.device).view_as(kept)
    step.ids.copy_((numbers * 97 + 11) % step.model.config.vocab_size)
    found = step().float().clone()
    step.ids.copy_(kept)
    return found


def same_prompt(model: Any, batch: int) -> Decode:
    torch.manual_seed(batch)
    return Decode(model, batch, 256)


def put(model: Any, make: Callable[[], torch.nn.Module]) -> None:
    for found in find_experts(model):
        found.module.moeq_weights = make()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return round(((a - b).norm() / b.norm()).item(), 5)


def splits(args: argparse.Namespace, device: torch.device, note: Callable[..., None]) -> None:
    attach.prepare = ClonedWeights()
    model = transformers_models.build(SHAPE, device, tiny=args.tiny)
    attach.prepare = attach.prepare.real
    first = find_experts(model)[0]
    raw = moe.restore(first.module.moeq_weights.prepared)  # stays there, where a share of it is taken fast
    batches = [int(b) for b in args.batches.split(",")]
    decodes = {batch: Decode(model, batch, 256) for batch in batches}
    wholly = {batch: fixed_logits(step) for batch, step in decodes.items()}
    backend = "triton" if device.type == "cuda" else "reference"
    other = moe.prepare(raw, act_format="none", backend=backend, device=device)
    put(model, lambda: ExpertWeights(other))
    yardsticks = {batch: relative(fixed_logits(step), wholly[batch]) for batch, step in decodes.items()}
    layers_module.prepare = ClonedWeights()
    for on_gpu in (int(n) for n in args.on_gpu.split(",")):
        begin = time.perf_counter()
        host = raw.num_experts - min(on_gpu, raw.num_experts)
        layers_module.prepare.known.clear()
        put(model, lambda: ExpertWeights(other))  # drops the layers of the split before
        put(model, lambda host=host: HostExpertWeights(moe.HostExperts(raw, host, act_format="none", device=device)))
        built = round(time.perf_counter() - begin, 1)
        gib = round(torch.cuda.memory_allocated() / 2**30, 2) if device.type == "cuda" else 0.0
        for batch, step in decodes.items():
            times, logits = step_times(step, args.rounds)
            ms = statistics.median(times) * 1e3
            figures = {"ms": round(ms, 3), "ms_min": round(min(times) * 1e3, 3)}
            figures["tokens_per_s"] = round(batch / ms * 1e3, 1)
            close = {"distance": relative(logits, wholly[batch]), "yardstick": yardsticks[batch]}
            note(what="decode", on_gpu=on_gpu, batch=batch, **figures, **close, gpu_gib=gib, built_s=built)
    layers_module.prepare = layers_module.prepare.real


def offload(args: argparse.Namespace, device: torch.device, note: Callable[..., None]) -> None:
    """Unquantized experts of few layers: brought to the GPU by accelerate, and run on the CPU."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_module

    model_type, _, sizes = transformers_models.SHAPES[SHAPE]
    small = {k: v for k, v in transformers_models.TINY.items() if k in sizes} if args.tiny else {}
    settings = {**sizes, **small, "num_hidden_layers": args.peer_layers, "vocab_size": 1024}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    modules = find_experts(model)
    for found in modules:
        for parameter in found.module.parameters():
            parameter.normal_(0.0, transformers_models.STD)
        found.module.to("cpu")
    inside = {found.name: "cpu" for found in modules}
    places: dict[str, Any] = {}
    main = 0 if device.type == "cuda" else "cpu"
    for name, child in model.named_modules():
        if not list(child.children()) and not any(name == n or name.startswith(f"{n}.") for n in inside):
            places[name] = main
    dispatch_model(model, {**places, **inside}, main_device=main, force_hooks=True)
    batches = [int(b) for b in args.batches.split(",")]
    before = {}
    for batch in batches:
        step = same_prompt(model, batch)
        fixed_logits(step)
        times = [seconds(step, step.rewind) for _ in range(3)]
        before[batch] = fixed_logits(step)
        note(what="offload by accelerate", layers=args.peer_layers, batch=batch, ms=statistics.median(times) * 1e3)
    remove_hook_from_module(model, recurse=True)
    for found in modules:
        found.module.to("cpu")
    host = int(modules[0].module.num_experts)
    quantize_model(model, "none", host_experts=host, device=device)
    for batch in batches:
        step = same_prompt(model, batch)
        fixed_logits(step)
        times = [seconds(step, step.rewind) for _ in range(9)]
        close = relative(fixed_logits(step), before[batch])
        said = {"experts_on_host": host, "distance": close}
        note(what="HostExperts", layers=args.peer_layers, batch=batch, ms=statistics.median(times) * 1e3, **said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-gpu", default="128,64,16,0", help="empty: the offload alone")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--peer-layers", type=int, default=4, help="0: leave the offload out")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs; also on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not (torch.cuda.is_available() or args.tiny):
        parser.error("a GPU is needed, or --tiny")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    cpu = {
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "kernels": torch.ops.moeq_C.cpu_isa(),
    }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "library": moe.__version__}
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    lines: list[dict[str, Any]] = []
    result = {"shape": SHAPE, "gpu": gpu, "cpu": cpu, "versions": versions, "lines": lines}

    def note(**line: Any) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    print(json.dumps({k: v for k, v in result.items() if k != "lines"}), flush=True)
    if args.peer_layers:
        offload(args, device, note)
    if args.on_gpu:
        splits(args, device, note)


if __name__ == "__main__":
    with torch.no_grad():
        main()
