"""Machine code as the steps of launch_order.py, and the Hopper kernels judged by it; and arrivals before loads have come.

`python tests/programs/sass_order.py OBJECT ...` prints what the kernels in objects of csrc/cuda/sm90 do wrong; fails if
any does. Which early arrivals are accepted is known by the lines of the sources: the objects need -lineinfo.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import early_releases
from launch_order import Order, Step, faults_alone, order_of
from sass_code import Instruction, disassembled, read_code

# The kernels that no launch attribute starts early: they wait for nobody. All others do, unless they are added here.
LAUNCHED_NORMALLY = ("decode_kernel",)
# Calls begin with these, which let others begin once they have waited: then all in front of the call is over.
BEGIN_CALLS = ("schedule_kernel", "schedule_cluster_kernel")
# Behind them in a call, these may read its inputs before they wait, past the L1.
READ_INPUTS_EARLY = (
    "operand_kernel",
    "row_gscale_kernel",
    "e4m3_operand_kernel",
    "bf16_operand_kernel",
    "quantize_tokens_kernel",
    "combine_kernel",
)
_KINDS = {
    "ACQBULK": "wait",
    "PREEXIT": "trigger",
    "EXIT": "end",
    "UBLKPF": "prefetch",
    "UTMAPF": "prefetch",
    **dict.fromkeys(("LD", "LDG", "LDGSTS", "UTMALDG", "SULD", "TEX"), "load"),
    **dict.fromkeys(("ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UTMASTG", "UTMAREDG", "SUST", "SURED"), "store"),
}


def _is_arithmetic(step: Instruction) -> bool:
    return step.name.startswith("CALL") and "$__internal" in step.text


def _kind(step: Instruction) -> str:
    name = step.name.partition(".")[0]
    if name == "UBLKCP":
        return "store" if ".G.S" in step.text else "load"
    if name == "CALL":
        return "" if _is_arithmetic(step) else "store"  # else unknown
    kind = _KINDS.get(name, "")
    return "" if kind == "wait" and step.guard is not None else kind


def sass_order(sass: str) -> Order:
    """Of one kernel. Where its addresses come from is not known."""
    steps = []
    for at, (step, after) in enumerate(zip(*read_code(sass), strict=True)):
        # The compiler's own arithmetic touches no memory and returns to where it was called, not to any other call.
        targets = (at + 1,) if _is_arithmetic(step) else tuple(after)
        steps.append(Step(step.text, _kind(step), targets=targets, falls=False))
    return order_of(steps)


def _is_one_of(name: str, kernels: tuple[str, ...]) -> bool:
    return any(f"{len(kernel)}{kernel}" in name for kernel in kernels)


def _is_past_l1(step: Step) -> bool:
    return "LDG." in step.text and ".STRONG." in step.text  # of ld.global.cg


def faults_of(name: str, sass: str) -> list[str]:
    """Of a kernel of csrc/cuda/sm90, by its mangled name: what it does before those in front have ended."""
    order = sass_order(sass)
    if _is_one_of(name, LAUNCHED_NORMALLY):
        uses = [name for name in ("ACQBULK", "PREEXIT") if name in sass]
        return [f"is launched normally, yet has {' and '.join(uses)}"] if uses else []
    if _is_one_of(name, READ_INPUTS_EARLY):
        order = order._replace(early=tuple(s for s in order.early if s.kind != "load" or not _is_past_l1(s)))
    triggers = order.of("trigger") if _is_one_of(name, BEGIN_CALLS) else ()
    return [*faults_alone(order), *(f"lets others begin before it waits: {step.text}" for step in triggers)]


def main(objects: list[str]) -> int:
    wrong = 0
    for file in objects:
        with tempfile.TemporaryDirectory() as folder:
            for name, sass in disassembled(Path(file), Path(folder), "-hex", "-gi"):
                for fault in [*faults_of(name, sass), *early_releases.faults(sass)]:
                    print(f"{name}: {fault}")
                    wrong += 1
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
