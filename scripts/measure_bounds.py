"""How far backends that approximate are from the oracle, over sizes: what tests/support/tolerances.py states.

    python scripts/measure_bounds.py [--backends NAME,NAME] [--seconds 110] [--jobs 12] [--out FILE.jsonl]

A line for each layer, number of tokens and output dtype: the largest and the mean relative L2 error of a whole output
over seeds, and that of its worst row. Then, on the terminal, what `a + b / sqrt(values)` needs: `values` are those of
the intermediate behind the output (or row), a the largest error where they are many, b the largest excess over a.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import torch  # noqa: E402
from gpu_layers import FORMATS, Format, Sizes, as_reference, make_batch, make_raw  # noqa: E402
from tolerances import FP8_SUM_BACKENDS, relative_l2  # noqa: E402

import torch_moe_ops as moe  # noqa: E402

APPROXIMATE = (*FP8_SUM_BACKENDS, "cuda_sm90_int4")
# experts, top_k, hidden, inter
SIZES = (
    (16, 4, 64, 64), (16, 1, 128, 64), (8, 2, 256, 128), (8, 1, 64, 512), (16, 4, 512, 256), (8, 2, 2880, 704),
    (16, 4, 1024, 2048), (64, 8, 2048, 768), (4, 2, 4096, 1024), (32, 8, 7168, 256), (8, 1, 7168, 2048),
)  # fmt: skip
ACTIVATIONS = ("silu", "relu2_no_mul")
TOKENS = (1, 2, 5, 17, 64, 257)
MANY = 1 << 16  # values of the intermediate from which on single codes no longer count
Line = dict[str, Any]


class Job(NamedTuple):
    fmt: Format
    sizes: Sizes


def jobs(backends: tuple[str, ...], seed: int = 0) -> list[Job]:
    """Every format with every layer, in random order: what a run that is cut off has measured is a sample."""
    found = [
        Job(fmt, Sizes(experts, top_k, hidden, inter, activation))
        for fmt in FORMATS
        if fmt.backend in backends
        for experts, top_k, hidden, inter in SIZES
        for activation in ACTIVATIONS
    ]
    random.Random(seed).shuffle(found)
    return found


def seeds_of(values: int) -> int:
    """Small outputs vary most."""
    return max(2, min(24, (1 << 15) // max(1, values)))


def measure(job: Job, device: str = "cuda") -> list[Line]:
    """Lines of one layer; none where the backend does not take it."""
    fmt, sizes = job
    raw = make_raw(fmt, sizes, device)
    if moe.explain(raw, **fmt.settings(device)).against[fmt.backend]:
        return []
    w = moe.prepare(raw, backend=fmt.backend, **fmt.settings(device))
    per_token = sizes.top_k * raw.intermediate_size
    cases = [(m, seed) for m in TOKENS for seed in range(seeds_of(m * per_token))]
    batches = [make_batch(sizes, raw.hidden_size, m, seed=100 * m + seed, device=device) for m, seed in cases]
    joined = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
    wanted = moe.fused_moe_routed(*joined, as_reference(raw, fmt, device), out_dtype=torch.float32)
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for (m, _), batch, want in zip(cases, batches, wanted.split([m for m, _ in cases]), strict=True):
        for dtype in (torch.float32, torch.bfloat16):
            out = moe.fused_moe_routed(*batch, w, out_dtype=dtype)
            found[m, str(dtype).removeprefix("torch.")].append((relative_l2(out, want), worst_row(out, want)))
    about = {
        "backend": fmt.backend, "scheme": fmt.scheme, "act_format": fmt.act_format, "input_scale": fmt.input_scale,
        "weight_policy": fmt.weight_policy, "experts": sizes.experts, "top_k": sizes.top_k, "hidden": raw.hidden_size,
        "inter": raw.intermediate_size, "activation": sizes.activation,
    }  # fmt: skip
    return [about | {"tokens": m, "dtype": dtype} | _summary(errors) for (m, dtype), errors in found.items()]


def worst_row(out: torch.Tensor, want: torch.Tensor) -> float:
    """The largest relative L2 error of a row."""
    error, norm = (out.double() - want.double()).norm(dim=1), want.double().norm(dim=1)
    return float((error / norm.clamp(min=1e-30)).max())


def _summary(errors: list[tuple[float, float]]) -> Line:
    whole, rows = zip(*errors, strict=True)
    rounded = {"worst": max(whole), "mean": sum(whole) / len(whole), "worst_row": max(rows)}
    return {"seeds": len(errors)} | {name: float(f"{value:.3e}") for name, value in rounded.items()}


def fits(lines: list[Line]) -> list[Line]:
    """For each kind of format: a and b of the bound that holds for all that was measured in float32, whole and row."""
    kinds: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for line in lines:
        if line["dtype"] == "float32":
            kinds[line["backend"], line["scheme"], line["act_format"]].append(line)
    found = []
    for kind, members in sorted(kinds.items()):
        fit: Line = {"kind": "-".join(kind), "lines": len(members)}
        for name, tokens in (("worst", True), ("worst_row", False)):
            values = [(m["tokens"] if tokens else 1) * m["top_k"] * m["inter"] for m in members]
            errors = [m[name] for m in members]
            many = [e for e, n in zip(errors, values, strict=True) if n >= MANY] or [min(errors)]
            excess = max((e - max(many)) * n**0.5 for e, n in zip(errors, values, strict=True))
            fit |= {
                f"{name}_many": max(many),
                f"{name}_excess": round(max(0.0, excess), 3),
                f"{name}_largest": max(errors),
            }
        found.append(fit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=",".join(APPROXIMATE))
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200_bounds.jsonl")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    lines: list[Line] = []
    todo = jobs(tuple(arguments.backends.split(",")))
    pool = ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn"))
    waiting = [pool.submit(measure, job) for job in todo]
    done = 0
    try:
        for future in as_completed(waiting, timeout=max(1.0, end - time.monotonic())):
            lines += future.result()
            done += 1
    except TimeoutError:
        print(f"time is over: {done} of {len(todo)} layers")
    processes = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for fit in fits(lines):
        print(json.dumps(fit))
    for process in processes:  # what still runs has had its time
        process.kill()


if __name__ == "__main__":
    main()
