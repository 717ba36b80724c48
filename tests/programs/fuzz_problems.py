"""Random layers and batches on one backend against the oracle: every scheme, format, activation, routing and odd size.

    python tests/programs/fuzz_problems.py --backend cpu --count 10000 [--seed 0] [--seconds 600] [--jobs 1]
        [--out FILE.jsonl]

Problem i follows from the seed and i alone, but for what a JIT compiler compiles anew, which stays for --group problems
in a row (format, layer, dtypes). A miss is an error over the bound of tests/support/tolerances.py, and is run again,
alone, by --first I --count 1. --special puts NaN and Inf into some hidden states. On a CPU, MOEQ_CPU_ISA names the kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from gpu_layers import Format, Sizes, as_reference, formats_of, make_raw
from tolerances import layer_bound
from torch import Tensor
from triton_weights import of_three_bits

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.sm90 import fp8_products
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.routing_methods import METHODS
from torch_moe_ops.core.schemes import SCHEMES

TOKENS = (0, 1, 1, 2, 3, 5, 9, 17, 40)
ROUNDS_WEIGHTS = "cuda_sm90_int4"
SPECIAL = (math.nan, math.inf, -math.inf)
Device = str


@dataclass(frozen=True)
class Layer:
    """What is compiled for: a format, sizes, an activation, dtypes, two numbers of tokens."""

    fmt: Format
    sizes: Sizes
    out_dtype: torch.dtype
    tokens: tuple[int, int]
    constants: dict[str, float]

    @staticmethod
    def drawn(g: random.Random, backend: str, device: Device) -> Layer:
        fmt = g.choice(formats_of(backend, device))
        hidden, inter = _sizes(g, device)
        activation = g.choice(list(ACTIVATIONS))
        dtype = g.choice(BACKENDS[backend].hidden_dtypes)
        sizes = Sizes(
            experts=g.choice((1, 2, 3, 8, 16)), top_k=g.choice((1, 1, 2, 3, 4, 8, 22)), hidden=hidden, inter=inter,
            activation=activation, bias=g.random() < 0.4, dtype=dtype, seed=g.randrange(1 << 20),
        )  # fmt: skip
        out = g.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        return Layer(fmt, sizes, out, (g.choice(TOKENS), g.choice(TOKENS)), _constants(g, activation))


def _sizes(g: random.Random, device: Device) -> tuple[int, int]:
    if device == "cuda":  # multiples of the Hopper kernels' tiles, and a size that is not
        return g.choice((64, 128, 256, 512, 704)), g.choice((64, 128, 176, 256, 352))
    return g.choice((8, 24, 64, 72, 136, 200, 256)), g.choice((8, 16, 40, 64, 104, 160))


def _constants(g: random.Random, activation: str) -> dict[str, float]:
    values = {"alpha": g.uniform(0.5, 2.5), "beta": g.uniform(0.1, 2.0), "limit": g.choice((0.5, 3.0, 7.0))}
    chosen = [name for name in ACTIVATIONS[activation].takes if g.random() < 0.5]
    return {f"swiglu_{name}": values[name] for name in chosen}


@dataclass
class Outcome:
    """Of one problem. ratio: error over bound, infinite where one is finite and the other is not."""

    index: int
    ratio: float
    what: str


def solve(backend: str, device: Device, seed: int, index: int, group: int, special: bool) -> Outcome | None:
    """Run problem `index`; None where the backend does not take such a layer."""
    layer = Layer.drawn(random.Random(f"{seed}-{backend}-{index // group}"), backend, device)
    g = random.Random(f"{seed}-{backend}-{index}-batch")
    raw = make_raw(layer.fmt, layer.sizes, device)
    if backend == ROUNDS_WEIGHTS and layer.fmt.act_format != "none":
        raw = replace(raw, w13_scale=of_three_bits(raw.w13_scale), w2_scale=of_three_bits(raw.w2_scale))
    offset = g.choice((0, 0, 0, 1, 5))
    total = offset + layer.sizes.experts + g.choice((0, 0, 0, 3))
    parallel: dict[str, Any] = {"num_experts": total, "local_expert_offset": offset} | layer.constants
    if moe.explain(raw, **layer.fmt.settings(device), **parallel).against[backend]:
        return None
    w = moe.prepare(raw, backend=backend, **layer.fmt.settings(device), **parallel)
    reference = _oracle(raw, layer.fmt, device, parallel)
    tokens = g.choice(layer.tokens)
    x = _hidden(g, layer, tokens, raw.hidden_size, device, special)
    what = f"{layer.fmt} {layer.sizes} tokens={tokens} offset={offset} of {total} -> {layer.out_dtype}"
    if g.random() < 0.35:
        logits, routing = _router(g, layer.sizes.top_k, tokens, total, device)
        out, want = (
            moe.fused_moe(x, logits, p, routing=routing, out_dtype=d)
            for p, d in ((w, layer.out_dtype), (reference, torch.float32))
        )
        ids, what = moe.route(logits, routing)[0], f"{what} {routing.method}"
    else:
        ids, weights = _routed(g, layer.sizes.top_k, tokens, total, device)
        out, want = (
            moe.fused_moe_routed(x, ids, weights, p, out_dtype=d)
            for p, d in ((w, layer.out_dtype), (reference, torch.float32))
        )
    values = _rows(ids, offset, layer.sizes.experts) * raw.intermediate_size
    bounded_as = backend
    if backend == ROUNDS_WEIGHTS:  # of many tokens it may multiply codes (sm90/fp8_products.py)
        least = fp8_products.least_tokens(replace(w.problem, top_k=layer.sizes.top_k))
        many = least is not None and tokens >= least
        bounded_as = "cuda_sm90_fp8" if many else "cuda_sm90"
    bound = layer_bound(bounded_as, w.act_format, layer.out_dtype, values, layer.sizes.activation)
    return Outcome(index, compare(out, want, bound), what)


def _oracle(raw: moe.RawWeights, fmt: Format, device: Device, parallel: dict[str, Any]) -> moe.PreparedWeights:
    """The reference; of ROUNDS_WEIGHTS with weights that were rounded to bfloat16 beforehand, or beside rounded
    activations, which no reference of bfloat16 weights has, with those that rounding leaves as they are. How far rounded
    ones are from the exact ones is a matter of the layer: behind clamps and sigmoids of large arguments as far as one likes."""
    if fmt.backend != ROUNDS_WEIGHTS or fmt.act_format != "none":
        return as_reference(raw, fmt, device, **parallel)
    w13, w2 = (w.to(torch.bfloat16) for w in moe.dequantize_experts(raw))
    kept = {name: getattr(raw, name) for name in ("w13_bias", "w2_bias", "activation")}
    return moe.prepare(moe.RawWeights("none", w13, w2, **kept), backend="reference", device=device, **parallel)


def _rows(ids: Tensor, offset: int, experts: int) -> int:
    """Different rows of the intermediate: a token that names an expert twice has one of it, and of foreign ones none."""
    tokens = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
    ours = (ids >= offset) & (ids < offset + experts)
    return len(torch.stack((tokens[ours], ids[ours].to(tokens.dtype))).unique(dim=1).T)


def compare(out: Tensor, want: Tensor, bound: float) -> float:
    """Error over bound where both are finite; infinite where only one is. What the output's dtype cannot hold counts as
    infinite in both. The error is set against all numbers that were wanted: where most are beyond the dtype, the few
    that it holds are small beside what they were summed from."""
    largest = torch.finfo(out.dtype).max
    numbers = torch.where(want.isfinite(), want, 0.0)
    size = float(numbers.double().norm())
    slack = 0.1 * largest + bound * size
    close = ((want.abs() - largest).abs() <= slack) & want.isfinite()  # may be either
    if (((out.isfinite() != (want.abs() < largest)) & ~close).any()) or (out.isnan() & want.isfinite()).any():
        return math.inf
    both = out.isfinite() & want.isfinite()
    error = float((torch.where(both, out.double() - want.double(), 0.0)).norm()) / max(size, 1e-300)
    return error / (bound + _subnormal(out.dtype) * math.sqrt(want.numel()) / max(size, 1e-30))


def _subnormal(dtype: torch.dtype) -> float:
    """What rounding to a subnormal number of the dtype takes from a value at most: much, of a tiny float16 result."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps / 2


def _hidden(g: random.Random, layer: Layer, tokens: int, hidden: int, device: Device, special: bool) -> Tensor:
    t = torch.Generator().manual_seed(g.randrange(1 << 30))
    x = torch.randn(tokens, hidden, generator=t)
    if layer.fmt.input_scale == "none" and layer.sizes.dtype != torch.float16:
        x *= 2.0 ** g.choice((0, 0, 0, -6, 6))
    if tokens and g.random() < 0.2:
        x[g.randrange(tokens)] = 0.0
    if special and tokens and g.random() < 0.3:
        x[g.randrange(tokens), g.randrange(hidden)] = g.choice(SPECIAL)
    return x.to(device, layer.sizes.dtype)


def _routed(g: random.Random, top_k: int, tokens: int, total: int, device: Device) -> tuple[Tensor, Tensor]:
    """Ids that may repeat in a row, and that may be nobody's; weights, some of them 0."""
    t = torch.Generator().manual_seed(g.randrange(1 << 30))
    ids = torch.randint(0, total, (tokens, top_k), generator=t, dtype=torch.int32)
    if g.random() < 0.3:
        ids[:] = g.randrange(total)
    if g.random() < 0.3:
        foreign = torch.tensor([-1, total, 2**31 - 1, -(2**31)], dtype=torch.int32)
        holes = torch.rand(ids.shape, generator=t) < 0.3
        ids = torch.where(holes, foreign[torch.randint(4, ids.shape, generator=t)], ids)
    weights = torch.rand(ids.shape, generator=t) + 0.1
    weights[torch.rand(ids.shape, generator=t) < 0.05] = 0.0
    return ids.to(device), weights.to(device)


def _router(g: random.Random, top_k: int, tokens: int, total: int, device: Device) -> tuple[Tensor, moe.Routing]:
    method = METHODS[g.choice([name for name in METHODS if name != "topk"])]  # topk's weights cancel
    k = min(top_k, total, method.max_top_k)
    t = torch.Generator().manual_seed(g.randrange(1 << 30))
    bias = torch.randn(total, generator=t).to(device) * 0.1 if method.takes_bias and g.random() < 0.5 else None
    factor = g.uniform(0.5, 3.0) if method.takes_scaling_factor else 1.0
    logits = torch.randn(tokens, total, generator=t).to(device, g.choice((torch.float32, torch.bfloat16)))
    return logits, moe.Routing(method.name, k, routed_scaling_factor=factor, bias=bias)


@dataclass
class Report:
    """Of a run: how many problems, the worst, and every miss with the index that repeats it."""

    solved: int = 0
    refused: int = 0
    worst: float = 0.0
    worst_index: int = -1
    misses: list[dict[str, Any]] = field(default_factory=list)

    def add(self, index: int, outcome: Outcome | None) -> None:
        if outcome is None:
            self.refused += 1
            return
        self.solved += 1
        if not outcome.ratio <= self.worst:
            self.worst, self.worst_index = outcome.ratio, index
        if not outcome.ratio < 1:
            self.misses.append(asdict(outcome))

    def joined(self, other: Report) -> Report:
        worst = max((self, other), key=lambda r: r.worst)
        return replace(
            worst, solved=self.solved + other.solved, refused=self.refused + other.refused,
            misses=self.misses + other.misses,
        )  # fmt: skip


def run(backend: str, seed: int, indices: range, group: int, special: bool, end: float) -> Report:
    """Problems of a range until the time `end`."""
    torch.set_num_threads(1)
    device = device_of(backend)
    report = Report()
    for index in indices:
        if time.time() > end:
            break
        try:
            outcome = solve(backend, device, seed, index, group, special)
        except Exception as error:  # a crash is a miss like any other, with an index that repeats it
            outcome = Outcome(index, math.inf, f"{type(error).__name__}: {error}")
        report.add(index, outcome)
    return report


def parts(first: int, count: int, jobs: int, group: int) -> list[range]:
    """Ranges for as many processes; groups stay together."""
    size = -(-count // (jobs * group)) * group
    return [range(i, min(first + count, i + size)) for i in range(first, first + count, size)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, choices=[b for b in BACKENDS if not b.startswith("flashinfer")])
    for name, default in (("count", 1000), ("seed", 0), ("first", 0), ("jobs", 1), ("group", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--special", action="store_true")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    group = a.group or (100 if a.backend.startswith("triton") or a.backend == "cuda_sm90_bf16" else 1)
    begin = time.time()
    arguments = [
        (a.backend, a.seed, indices, group, a.special, begin + a.seconds)
        for indices in parts(a.first, a.count, a.jobs, group)
    ]
    if a.jobs == 1:
        reports = [run(*one) for one in arguments]
    else:
        with ProcessPoolExecutor(a.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            reports = [f.result() for f in [pool.submit(run, *one) for one in arguments]]
    total = Report()
    for report in reports:
        total = total.joined(report)
    line = {
        "backend": a.backend, "on": _on(a.backend), "seed": a.seed, "first": a.first, "group": group,
        "special": a.special, "seconds": round(time.time() - begin), **asdict(total),
    }  # fmt: skip
    print(json.dumps(line))
    if a.out:
        with a.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return bool(total.misses)


def device_of(backend: str) -> str:
    """ "cpu" where the backend runs anything on a CPU, else "cuda"."""
    problems = (
        Problem(scheme.name, act, hidden_size=128, intermediate_size=128)
        for scheme in SCHEMES.values()
        for act in scheme.act_formats
    )
    return "cpu" if any(BACKENDS[backend].fits_anywhere(problem) for problem in problems) else "cuda"


def _on(backend: str) -> str:
    if backend == "cpu":
        return str(torch.ops.moeq_C.cpu_isa())
    return "torch" if device_of(backend) == "cpu" else torch.cuda.get_device_name()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
