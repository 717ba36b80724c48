#!/usr/bin/env python3
"""Forward and backward through frozen NVFP4 experts, beside bfloat16 experts and beside dequantizing them first.

    python benchmarks/bench_backward.py --out results.json

Ways, which differ in nothing else. `packed`: fused_moe_routed. `lora`: the same with adapters of rank 16, whose factors
get gradients too. `grouped_linear`: two projections composed by hand. `bf16`: experts kept in bfloat16 and multiplied
by torch._grouped_mm, as transformers does. `dequantize`: packed experts made bfloat16 in both passes, 16 at a time by a
compiled function, then torch._grouped_mm. `nf4`, where bitsandbytes is installed (scripts/carry_bitsandbytes.sh) and a
parameter has less than 2^31 weights: its 4-bit parameters of a module, which it dequantizes whole where they are read,
in both passes, then the same. Gradients go to hidden states and routing weights. Times are medians on the host's clock,
the device waited for, of calls and of replays of a CUDA graph (step_graph_ms, without what Python takes); memory is the
peak of a step with the way's own weights, over calls. `graph_error`: why a way is not captured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch_moe_ops as moe
from torch_moe_ops.numerics import nvfp4

CHUNK = 16  # experts that `dequantize` makes at once


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    inter: int


SHAPES = {"qwen3_30b": Shape(128, 8, 2048, 768), "dsv3": Shape(256, 8, 7168, 2048), "tiny": Shape(8, 2, 64, 32)}


def random_layer(shape: Shape, device: str) -> moe.RawWeights:
    """Random codes, scales of one half: nothing is quantized, which would take longer than the benchmark."""

    def codes(*size: int) -> Tensor:
        return torch.randint(0, 256, size, dtype=torch.uint8, device=device)

    def scales(*size: int) -> Tensor:
        return torch.full(size, 0.5, device=device).to(torch.float8_e4m3fn)

    e, h, i = shape.experts, shape.hidden, shape.inter
    return moe.RawWeights(
        "nvfp4",
        w13=codes(e, 2 * i, h // 2), w13_scale=scales(e, 2 * i, h // 16),
        w13_scale_2=torch.full((e, 1), h**-0.5, device=device),
        w2=codes(e, h, i // 2), w2_scale=scales(e, h, i // 16), w2_scale_2=torch.full((e,), i**-0.5, device=device),
    )  # fmt: skip


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows[r] @ weights[e]; on a CPU one product an expert."""
    if rows.is_cuda:
        return torch._grouped_mm(rows, weights, offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat([rows[a:b] @ w for a, b, w in zip(bounds, bounds[1:], weights, strict=False)])


class Frozen(torch.autograd.Function):
    """rows @ W.T by expert; W comes from make() in each pass, or is kept where make() does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make, ctx.ends = make, ends
        return grouped_mm(rows, make().transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grouped_mm(grad.contiguous(), ctx.make(), ctx.ends), None, None


def composed(project: Callable[[str, Tensor, Tensor], Tensor], experts: int) -> Callable[..., Tensor]:
    """A layer of two projections of rows sorted by expert: project(name, rows, ends)."""

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        expert, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(1, experts + 1, device=x.device, dtype=ids.dtype)).int()
        gate, up = project("w13", x[order // ids.shape[1]], ends).chunk(2, 1)
        y = project("w2", F.silu(gate) * up, ends)
        weighted = y[order.argsort()].view(*ids.shape, -1) * weights[:, :, None].to(y.dtype)
        return weighted.sum(1)

    return layer


def _decode(codes: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    return nvfp4.dequantize(codes, scale, scale_2).to(torch.bfloat16)


def ways(raw: moe.RawWeights, experts: int) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """By name: what makes the layer, with its weights."""
    decode = torch.compile(_decode, dynamic=False) if raw.device.type == "cuda" else _decode

    def dequantized(name: str) -> Tensor:
        parts = [getattr(raw, name), getattr(raw, f"{name}_scale"), getattr(raw, f"{name}_scale_2").reshape(-1)]
        out = torch.empty(*parts[0].shape[:2], 2 * parts[0].shape[2], dtype=torch.bfloat16, device=raw.device)
        for e in range(0, experts, CHUNK):
            out[e : e + CHUNK] = decode(*(part[e : e + CHUNK] for part in parts))
        return out

    def packed() -> Callable[..., Tensor]:
        w = moe.prepare(raw, act_format="none")
        return lambda x, ids, weights: moe.fused_moe_routed(x, ids, weights, w)

    def by_hand() -> Callable[..., Tensor]:
        w = moe.prepare(raw, act_format="none")
        return composed(lambda name, rows, ends: moe.grouped_linear(rows, w, ends, projection=name), experts)

    def bf16() -> Callable[..., Tensor]:
        kept = {name: dequantized(name) for name in ("w13", "w2")}
        return composed(lambda name, rows, ends: Frozen.apply(rows, ends, lambda: kept[name]), experts)

    def dequantize() -> Callable[..., Tensor]:
        return composed(lambda name, rows, ends: Frozen.apply(rows, ends, lambda: dequantized(name)), experts)

    def lora() -> Callable[..., Tensor]:
        return Adapted(moe.prepare(raw, act_format="none"), raw)

    def nf4() -> Callable[..., Tensor]:
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        kept = torch.nn.Module()
        for name in ("w13", "w2"):
            kept.register_parameter(name, torch.nn.Parameter(dequantized(name), requires_grad=False))
            replace_parameter_4bit(kept, name, quant_type="nf4")
        return composed(lambda name, rows, ends: Frozen.apply(rows, ends, lambda: getattr(kept, name)), experts)

    found = {"bf16": bf16, "dequantize": dequantize, "packed": packed, "lora": lora, "grouped_linear": by_hand}
    fits = raw.num_experts * raw.w13.shape[1] * raw.hidden_size < 2**31  # its kernels count a parameter in 32 bits
    return found | ({"nf4": nf4} if fits and find_spec("bitsandbytes") else {})


class Adapted:
    """A packed layer with adapters, which add nothing yet."""

    def __init__(self, w: moe.PreparedWeights, raw: moe.RawWeights, rank: int = 16) -> None:
        def factor(*size: int, scale: float = 0.0) -> Tensor:
            return (torch.randn(raw.num_experts, *size, device=raw.device) * scale).bfloat16().requires_grad_()

        h, i, rows = raw.hidden_size, raw.intermediate_size, raw.w13.shape[1]
        self.w, self.learns = w, (factor(rank, h, scale=h**-0.5), factor(rows, rank))
        self.learns += (factor(rank, i, scale=i**-0.5), factor(h, rank))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.fused_moe_routed(x, ids, weights, self.w, lora=moe.Lora(*self.learns))


def timed(step: Callable[[], Any], device: str, seconds: float) -> float:
    """Median of a step's seconds, after two that do not count; at least three, more while there is time."""
    found: list[float] = []
    begin = time.perf_counter()
    for i in range(32):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            found.append(time.perf_counter() - start)
        if len(found) >= 3 and time.perf_counter() - begin > seconds:
            break
    return statistics.median(found)


def replayed(step: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Milliseconds of a replay of a CUDA graph of the step, or why there is none."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
        return {"step_graph_ms": round(timed(graph.replay, "cuda", seconds) * 1e3, 3)}
    except RuntimeError as error:
        torch.cuda.synchronize()
        return {"graph_error": str(error).splitlines()[0][:120]}
    finally:
        del graph
        torch.cuda.empty_cache()


Layer = Callable[..., Tensor]


def batch(shape: Shape, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, ids, routing weights, gradient of the output; the same at every call."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weights, ids = torch.rand(tokens, shape.experts, device=device).topk(shape.top_k)
    return x, ids.int(), (weights / weights.sum(1, keepdim=True)).requires_grad_(), torch.randn_like(x)


def measured(
    layer: Layer, given: tuple[Tensor, ...], device: str, seconds: float
) -> tuple[dict[str, Any], list[Tensor]]:
    """Milliseconds and peak memory of a step, and its gradients."""
    x, ids, weights, grad = given

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x, ids, weights), (x, weights, *getattr(layer, "learns", ())), grad)

    found: dict[str, Any] = {}
    with torch.no_grad():
        found["forward_ms"] = round(timed(lambda: layer(x, ids, weights), device, seconds) * 1e3, 3)
    found["step_ms"] = round(timed(step, device, seconds) * 1e3, 3)
    if device == "cuda":
        found |= replayed(step, seconds)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    gradients = [g.detach() for g in step()[:2]]
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found, gradients


def measure(
    name: str, tokens: list[int], device: str, seconds: float, chosen: list[str] | None = None
) -> list[dict[str, Any]]:
    """A row for each way that was chosen and number of tokens; `error`: how far gradients are from the first one's."""
    shape, rows = SHAPES[name], []
    raw = random_layer(shape, device)
    raw_bytes = sum(t.nbytes for t in raw.tensors().values())
    expected: dict[int, list[Tensor]] = {}  # on the host, so that it counts as nobody's memory
    for way, make in ways(raw, shape.experts).items():
        if chosen is not None and way not in chosen:
            continue
        layer = make()
        for m in tokens:
            found, gradients = measured(layer, batch(shape, m, device), device, seconds)
            row: dict[str, Any] = {"layer": name, "way": way, "tokens": m, **found}
            own = [g.float().cpu() for g in gradients]
            del gradients  # which would count as the next one's memory
            errors = [(g - e).norm() / e.norm() for g, e in zip(own, expected.setdefault(m, own), strict=True)]
            row["error"] = [round(error.item(), 6) for error in errors]
            if "peak_gib" in row:  # raw tensors are read by `dequantize` alone
                row["peak_gib"] = round(row["peak_gib"] - (raw_bytes / 2**30 if way != "dequantize" else 0), 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
        del layer
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3_30b,dsv3", help="comma list of " + ", ".join(SHAPES))
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--ways", help="comma list; all of them if left out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.4, help="that each median may take")
    parser.add_argument("--out", type=Path, help="a JSON file of all rows")
    args = parser.parse_args(argv)
    tokens = [int(m) for m in args.tokens.split(",")]
    chosen = args.ways.split(",") if args.ways else None
    rows = []
    for name in args.shapes.split(","):
        rows += measure(name, tokens, args.device, args.seconds, chosen)
    if args.out:
        about = {"library": moe.__version__, "torch": torch.__version__}
        about["device"] = torch.cuda.get_device_name() if args.device == "cuda" else args.device
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
