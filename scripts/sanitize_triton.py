"""Every Triton kernel at small, odd shapes, each result compared with the oracle on the CPU.

scripts/sanitize_triton.sh runs it under compute-sanitizer, a process for each group of kernels: a weight scheme with
an activation format, or "routing". `--few` is for tools that slow a kernel down a thousand times.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from problems import Case, make_batch, make_raw
from routing_oracle import WITH_BIAS, draw, draw_bias
from tolerances import BF16, FP8_SUMS, relative_l2

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.routing_methods import METHODS
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.routing.reference import route_reference

BOUNDS = {"triton": BF16, "triton_fp8": FP8_SUMS}  # the backends whose kernels these are
SHAPES = Case(experts=4, hidden=160, inter=96, bias=True, per_half=True)
FEW_TOKENS, SOME_TOKENS, MANY_TOKENS = 1, 21, 260  # the last: tiles of prefill


def groups() -> dict[str, list[Case]]:
    """Name of a group (BACKEND:SCHEME:ACTIVATIONS) -> a layer for every kind of input scale, with foreign ids."""
    found: dict[str, list[Case]] = {}
    for backend, scheme in itertools.product(BOUNDS, SCHEMES.values()):
        for act in scheme.act_formats:
            for scale in ("none", "tensor", "expert") if act in scheme.static_acts else ("none",):
                problem = moe.Problem(scheme.name, act, device="cuda", capability=(9, 0), input_scale=scale)
                if BACKENDS[backend].fits_anywhere(problem):
                    case = replace(SHAPES, scheme=scheme.name, act_format=act, input_scale=scale)
                    cases = found.setdefault(f"{backend}:{scheme.name}:{act}", [])
                    cases.append(replace(case, tokens=SOME_TOKENS, foreign=True))
    return found


def run_layer(case: Case, backend: str) -> float:
    """Relative distance of the result to the oracle's, which a CPU computes.

    Where ids are foreign, the layer says that experts live elsewhere. Otherwise the combine reads all slots before it
    knows which are foreign, and drops what nobody wrote: harmless, but initcheck would report it.
    """
    raw, batch = make_raw(case), make_batch(case)
    outputs = []
    for name, device in ((backend, "cuda"), ("reference", "cpu")):
        elsewhere = {"num_experts": case.experts + 2} if case.foreign else {}
        w = moe.prepare(raw, act_format=case.act_format, backend=name, device=device, **elsewhere)
        outputs.append(moe.fused_moe_routed(*(t.to(device) for t in batch), w).cpu())
    return relative_l2(*outputs)


def run_routing(method: str, experts: int, groups: tuple[int, int]) -> bool:
    """Whether the ids are those of torch on the CPU."""
    logits = draw(5, experts, seed=1)
    bias = draw_bias(experts, seed=1) if method in WITH_BIAS else None
    options = (method, min(6, METHODS[method].max_top_k), *(groups if METHODS[method].takes_groups else (0, 0)))
    ids, _ = torch.ops.moeq.route(logits.cuda(), None if bias is None else bias.cuda(), *options)
    return torch.equal(ids.cpu(), route_reference(logits, bias, *options)[0])


def attempt(case: Case, backend: str) -> str | None:
    """None if the result is right, else what is wrong."""
    try:
        error = run_layer(case, backend)
    except Exception as failure:  # the other cases are worth their run
        return f"{type(failure).__name__} {str(failure)[-300:]} {case}"
    return None if error < BOUNDS[backend] else f"{error:.1e} {case}"


def check_layers(backend: str, cases: list[Case], few: bool) -> tuple[int, list[str]]:
    """How many layers ran, and what was wrong. Besides `cases`, the first one with other numbers of tokens."""
    first = replace(cases[0], foreign=False)
    many = replace(first, tokens=MANY_TOKENS, hidden=288)
    one = replace(first, tokens=FEW_TOKENS, activation="relu2_no_mul", dtype=torch.float16)
    runs = [cases[0], many] if few else [*cases, many, one]
    return len(runs), [text for case in runs if (text := attempt(case, backend))]


def check_routing(few: bool) -> tuple[int, list[str]]:
    """How many routings ran, and what was wrong."""
    shapes = ((60, (5, 3)),) if few else ((60, (5, 3)), (256, (8, 4)), (2048, (0, 0)))
    runs = [(method, *shape) for method in METHODS for shape in shapes]
    return len(runs), [f"ids of {method} with {experts} experts" for method, experts, groups in runs
                       if not run_routing(method, experts, groups)]  # fmt: skip


def main() -> int:
    """0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", help='"routing", BACKEND:SCHEME:ACTIVATIONS, or "list", which prints these names')
    parser.add_argument("--few", action="store_true", help="less of a group; with list: a group of every weight scheme")
    options = parser.parse_args()
    layers = groups()
    if options.group == "list":
        schemes = {name.rsplit(":", 1)[0]: name for name in reversed(layers)}
        print("routing", *(schemes.values() if options.few else layers))
        return 0
    if options.group == "routing":
        runs, wrong = check_routing(options.few)
    else:
        runs, wrong = check_layers(options.group.split(":")[0], layers[options.group], options.few)
    torch.cuda.synchronize()
    print("\n".join(wrong) or f"{runs} results right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
