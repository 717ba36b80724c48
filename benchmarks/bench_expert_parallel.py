#!/usr/bin/env python3
"""Time a layer over several GPUs, in CUDA graphs, beside all of its experts on one GPU with everybody's tokens.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_expert_parallel.py --out results.jsonl
    torchrun --standalone --nproc-per-node 4 benchmarks/bench_expert_parallel.py --shapes qwen3_30b,deepseek_v3
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_expert_parallel.py --act-formats nvfp4,fp8 \
        --payloads plain,quantized

Each graph holds several calls with routings of their own, so that no call finds its weights in the L2; between replays
all routings are drawn anew. A time is a replay's by its number of calls; of the replays the median, of the ranks the
slowest. Times in microseconds. About 40 s for one shape on two H200s.

Lines of the output: shape, act_format, m (tokens a rank), ranks, us: {what: time}, where what is `total` over each
transport with each dtype of partial rows and each payload, `exchange` (dispatch and combine alone, with what quantizes
the payload), `local op` (this rank's experts on all rows), `one gpu` (all experts, ranks * m tokens, no exchange);
efficiency = one gpu / ranks / total; relative L2 of total from it.
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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.commands.tune.replays import replay_us


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    inter: int


SHAPES = {
    "qwen3_30b": Shape(128, 8, 2048, 768),
    "deepseek_v3": Shape(256, 8, 7168, 2048),
    "mixtral_8x7b": Shape(8, 2, 4096, 14336),
    "tiny": Shape(8, 2, 256, 128),
}
PARTIAL = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def random_experts(shape: Shape, device: torch.device) -> moe.RawWeights:
    """NVFP4 experts, quantized a few at a time: unquantized ones of a large layer do not fit. Alike on every rank."""
    torch.manual_seed(1)
    parts = []
    for start in range(0, shape.experts, 16):
        n = min(16, shape.experts - start)
        w13 = torch.randn(n, 2 * shape.inter, shape.hidden, device=device, dtype=torch.bfloat16) * 0.02
        w2 = torch.randn(n, shape.hidden, shape.inter, device=device, dtype=torch.bfloat16) * 0.02
        parts.append(moe.quantize_experts(w13, w2, "nvfp4").tensors())
    joined = {name: joined_codes([part[name] for part in parts]) for name in parts[0]}
    return moe.RawWeights("nvfp4", activation="silu", **joined)


def with_input_scales(raw: moe.RawWeights, act_format: str) -> moe.RawWeights:
    """Calibrated ones for NVFP4 activations, as checkpoints have them: without, every token has a scale of its own."""
    if act_format != "nvfp4":
        return raw
    scales = (torch.tensor(most / (6 * 448), device=raw.w13.device) for most in (4.0, 2.0))
    return dataclasses.replace(raw, **dict(zip(("a13_input_scale", "a2_input_scale"), scales, strict=True)))


def joined_codes(parts: list[Tensor]) -> Tensor:
    """torch.cat, of float8 too."""
    dtype = parts[0].dtype
    return torch.cat([t.view(torch.uint8) if dtype.itemsize == 1 else t for t in parts]).view(dtype)


class Inputs:
    """Hidden states and routings of `calls` calls, of all ranks: every rank draws the same, and takes its part."""

    def __init__(self, shape: Shape, m: int, calls: int, device: torch.device):
        self.shape, self.m, self.calls, self.ranks = shape, m, calls, dist.get_world_size()
        rows = self.ranks * m
        self.x = torch.empty(calls, rows, shape.hidden, device=device, dtype=torch.bfloat16)
        self.ids = torch.empty(calls, rows, shape.top_k, device=device, dtype=torch.int32)
        self.weights = torch.empty(calls, rows, shape.top_k, device=device)
        self.draw(0)

    def draw(self, seed: int) -> None:
        g = torch.Generator(self.x.device).manual_seed(seed)
        self.x.normal_(generator=g).mul_(0.5)
        scores = torch.rand(*self.ids.shape[:2], self.shape.experts, device=self.x.device, generator=g)
        weights, ids = scores.topk(self.shape.top_k)
        self.ids.copy_(ids)
        self.weights.copy_(weights / weights.sum(-1, keepdim=True))

    def mine(self, call: int) -> tuple[Tensor, Tensor, Tensor]:
        part = slice(dist.get_rank() * self.m, (dist.get_rank() + 1) * self.m)
        return self.x[call, part], self.ids[call, part], self.weights[call, part]

    def all(self, call: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[call], self.ids[call], self.weights[call]


def captured(inputs: Inputs, call: Callable[[int], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of all calls, and the result of its last one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for c in range(min(2, inputs.calls)):
            call(c)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for c in range(inputs.calls):
            out = call(c)
    return graph, out


def time_of(inputs: Inputs, call: Callable[[int], Tensor], replays: int) -> tuple[float, Tensor]:
    """Median microseconds of a call on the slowest rank, and the last result."""
    graph, out = captured(inputs, call)
    times = []
    for turn in range(replays):
        inputs.draw(turn)
        times.append(replay_us(graph) / inputs.calls)  # the replay in front brings the ranks into step, and clocks up
    slowest = torch.tensor(statistics.median(times), device=inputs.x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest), out.clone()


def measure(
    shape: Shape, m: int, layers: dict[str, moe.ExpertParallel], whole: moe.PreparedWeights, replays: int
) -> dict:
    device, ranks = whole.device, dist.get_world_size()
    inputs = Inputs(shape, m, 8 if m <= 256 else 2, device)
    ep = next(iter(layers.values()))
    places = torch.ops.moeq.ep_place
    partial_rows = torch.zeros(ranks * m, shape.hidden, device=device, dtype=torch.bfloat16)

    def exchange(c: int, ep: moe.ExpertParallel) -> Tensor:
        x, ids, weights = inputs.mine(c)
        head = (ep.transport, ep.ranks.name, ranks, m)
        placed = places(ids, ep._first, ep._count, ep._slots, ep.load, ep.ranks.rank)
        quantize = ep.payload.quantize
        codes, scale = (x, None) if quantize is None else quantize(x)
        _, _, _, _, positions = torch.ops.moeq.ep_dispatch(codes, scale, placed, weights, *head)
        return torch.ops.moeq.ep_combine(partial_rows, positions, m, *head, x.dtype)

    us, out = {}, {}
    for name, layer in layers.items():
        us[f"total, {name}"], out[name] = time_of(inputs, lambda c, e=layer: e(*inputs.mine(c), max_tokens=m), replays)
        if layer.partial_dtype == torch.bfloat16:
            us[f"exchange, {name}"], _ = time_of(inputs, lambda c, e=layer: exchange(c, e), replays)
    us["local op"], _ = time_of(inputs, lambda c: moe.fused_moe_routed(*inputs.all(c), ep.w), replays)
    us["one gpu"], want = time_of(inputs, lambda c: moe.fused_moe_routed(*inputs.all(c), whole), replays)
    own = want[dist.get_rank() * m :][:m].double()
    apart = {name: float((got.double() - own).norm() / own.norm()) for name, got in out.items()}
    efficiency = {name: round(us["one gpu"] / ranks / us[f"total, {name}"], 3) for name in layers}
    return {
        "m": m,
        "ranks": ranks,
        "us": {name: round(value, 1) for name, value in us.items()},
        "efficiency": efficiency,
        "relative_l2": apart,
    }


def layers_of(
    raw: moe.RawWeights, most: int, act_format: str, args: argparse.Namespace
) -> dict[str, moe.ExpertParallel]:
    """By "TRANSPORT DTYPE [PAYLOAD]" (dtype: of partial rows); they share one set of weights."""
    group = dist.group.WORLD
    first = moe.ExpertParallel.from_raw(group, raw, most, "nccl", act_format=act_format, payload="plain")
    return {
        f"{transport} {text}" + ("" if payload == "plain" else f" {payload}"): moe.ExpertParallel(
            group, first.w, most, transport, partial_dtype=PARTIAL[text], payload=payload
        )
        for transport in args.transports.split(",")
        for text in args.partial.split(",")
        if transport != "p2p" or text != "float8_e4m3fn"  # which p2p refuses
        for payload in (args.payloads.split(",") if act_format != "none" else ["plain"])
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3_30b", help="comma list of " + ", ".join(SHAPES))
    parser.add_argument("--ms", default="1,8,64,256,1024,4096", help="tokens a rank")
    parser.add_argument("--act-formats", default="none", help="comma list, of prepare")
    parser.add_argument("--transports", default="nccl,p2p", help="comma list")
    parser.add_argument("--partial", default="float32,bfloat16", help="comma list of " + ", ".join(PARTIAL))
    parser.add_argument("--payloads", default="plain", help="comma list of plain, quantized: of ExpertParallel")
    parser.add_argument("--replays", type=int, default=12, help="each with new routings for all of its calls")
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    first = dist.get_rank() == 0

    def emit(line: dict) -> None:
        if first:
            print(json.dumps(line), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")

    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    emit({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "nccl": version})
    start = time.perf_counter()
    ms = [int(m) for m in args.ms.split(",")]
    with torch.inference_mode():
        for name in args.shapes.split(","):
            raw = random_experts(SHAPES[name], device)
            for act_format in args.act_formats.split(","):
                what = {"shape": name, "act_format": act_format}
                scaled = with_input_scales(raw, act_format)
                whole = moe.prepare(scaled, act_format=act_format)
                layers = layers_of(scaled, max(ms), act_format, args)
                local = next(iter(layers.values())).w.backend
                emit({**what, "backend": local, "backend of one gpu": whole.backend})
                for m in ms:
                    found = measure(SHAPES[name], m, layers, whole, args.replays)
                    emit({**what, **found, "seconds": round(time.perf_counter() - start, 1)})
                del scaled, whole, layers
            del raw
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
