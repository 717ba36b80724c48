"""Every Triton kernel at small, odd shapes, each result compared with the oracle on the CPU.

scripts/sanitize_triton.sh runs it under compute-sanitizer, a process for each group of kernels: the weight schemes, and
"routing". `--few`: one activation format of every weight scheme, for tools that slow a kernel down a thousand times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from problems import Case, make_batch, make_raw
from routing_oracle import WITH_BIAS, draw, draw_bias
from tolerances import BF16, relative_l2

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.routing import METHODS, route_reference
from torch_moe_ops.schemes import SCHEMES

SHAPES = Case(experts=4, hidden=160, inter=96, bias=True, per_half=True)
FEW_TOKENS, SOME_TOKENS, MANY_TOKENS = 1, 21, 260  # the last: tiles of prefill


def layer_cases(name: str, few: bool) -> Iterator[Case]:
    """Of every format of scheme `name` that the backend takes: foreign ids; of one also other numbers of tokens."""
    scheme, seen = SCHEMES[name], 0
    for act in scheme.act_formats:
        for scale in ("none", "tensor", "expert") if act in scheme.static_acts else ("none",):
            problem = moe.Problem(name, act, device="cuda", capability=(9, 0), input_scale=scale)
            if not BACKENDS["triton"].fits_anywhere(problem) or (few and seen):
                continue
            seen += 1
            case = replace(SHAPES, scheme=name, act_format=act, input_scale=scale)
            yield replace(case, tokens=SOME_TOKENS, foreign=True)
            if seen == 1:
                yield replace(case, tokens=MANY_TOKENS, hidden=288)
            if seen == 1 and not few:
                yield replace(case, tokens=FEW_TOKENS, activation="relu2_no_mul", dtype=torch.float16)


def run_layer(case: Case) -> float:
    """Relative distance of the result to the oracle's, which a CPU computes.

    Where ids are foreign, the layer says that experts live elsewhere. Otherwise the combine reads all slots before it
    knows which are foreign, and drops what nobody wrote: harmless, but initcheck would report it.
    """
    raw, batch = make_raw(case), make_batch(case)
    outputs = []
    for backend, device in (("triton", "cuda"), ("reference", "cpu")):
        elsewhere = {"num_experts": case.experts + 2} if case.foreign else {}
        w = moe.prepare(raw, act_format=case.act_format, backend=backend, device=device, **elsewhere)
        outputs.append(moe.fused_moe_routed(*(t.to(device) for t in batch), w).cpu())
    return relative_l2(*outputs)


def run_routing(method: str, experts: int, groups: tuple[int, int]) -> bool:
    """Whether the ids are those of torch on the CPU."""
    logits = draw(5, experts, seed=1)
    bias = draw_bias(experts, seed=1) if method in WITH_BIAS else None
    options = (method, min(6, METHODS[method].max_top_k), *(groups if METHODS[method].takes_groups else (0, 0)))
    ids, _ = torch.ops.moeq.route(logits.cuda(), None if bias is None else bias.cuda(), *options)
    return torch.equal(ids.cpu(), route_reference(logits, bias, *options)[0])


def attempt(case: Case) -> str | None:
    """None if the result is right, else what is wrong."""
    try:
        error = run_layer(case)
    except Exception as failure:  # the other cases are worth their run
        return f"{type(failure).__name__} {str(failure)[-300:]} {case}"
    return None if error < BF16 else f"{error:.1e} {case}"


def check_layers(name: str, few: bool) -> tuple[int, list[str]]:
    """How many layers of a scheme ran, and what was wrong."""
    cases = list(layer_cases(name, few))
    return len(cases), [text for case in cases if (text := attempt(case))]


def check_routing(few: bool) -> tuple[int, list[str]]:
    """How many routings ran, and what was wrong."""
    shapes = ((60, (5, 3)),) if few else ((60, (5, 3)), (256, (8, 4)), (2048, (0, 0)))
    runs = [(method, *shape) for method in METHODS for shape in shapes]
    return len(runs), [f"ids of {method} with {experts} experts" for method, experts, groups in runs
                       if not run_routing(method, experts, groups)]  # fmt: skip


def main() -> int:
    """0 if every result was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=("list", "routing", *SCHEMES), help='"list" prints the groups')
    parser.add_argument("--few", action="store_true", help="one activation format of every weight scheme")
    options = parser.parse_args()
    if options.group == "list":
        print("routing", *(name for name in SCHEMES if list(layer_cases(name, few=True))))
        return 0
    runs, wrong = check_routing(options.few) if options.group == "routing" else check_layers(options.group, options.few)
    torch.cuda.synchronize()
    print("\n".join(wrong) or f"{runs} results right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
