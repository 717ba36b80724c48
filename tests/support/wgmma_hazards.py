"""Registers that a Hopper tensor core may still be reading while something else writes them, found in machine code.

`wgmma` reads its first operand, where that is in registers, some time after it was issued. Until WARPGROUP.DEPBAR
has waited for it, nobody may write those registers. No test that runs a kernel finds a violation for certain: whether
the tensor core is late depends on what else the GPU does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from sass_code import disassembled, read_code
from sass_registers import written

PRODUCT = re.compile(r"[HQI]GMMA\S*\s+R(\d+), (?:R(\d+)|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
OPERAND_REGISTERS = 4  # of a thread, for one instruction


class Product(NamedTuple):
    """A product in flight. first: register of its first operand, None: in shared memory; ends: the last of a group."""

    address: int
    first: int | None
    ends: bool


class Hazard(NamedTuple):
    address: int
    instruction: str
    product: Product


def _after_wait(flying: tuple[Product, ...], groups: int) -> tuple[Product, ...]:
    """What is left when at most the last `groups` groups are."""
    ends = [i for i, product in enumerate(flying) if product.ends]
    return flying if len(ends) <= groups else flying[ends[len(ends) - groups - 1] + 1 :]


def count_products(sass: str) -> int:
    """Products whose first operand is in registers."""
    steps = read_code(sass).instructions
    return sum(1 for step in steps if (found := PRODUCT.match(step.text)) and found[2])


def find_hazards(sass: str) -> list[Hazard]:
    """Writes to operands of products in flight, over every path through one kernel."""
    code = read_code(sass)
    hazards: set[Hazard] = set()
    seen: set[tuple[int, tuple[Product, ...]]] = set()
    todo: list[tuple[int, tuple[Product, ...]]] = [(0, ())]
    while todo:
        at, flying = todo.pop()
        if (at, flying) in seen or at >= len(code.instructions):
            continue
        seen.add((at, flying))
        step = code.instructions[at]
        if found := PRODUCT.match(step.text):
            flying = (*flying, Product(step.address, int(found[2]) if found[2] else None, "gsb0" in step.text))
        elif found := _WAIT.match(step.text):
            flying = _after_wait(flying, int(found[1], 16))
        elif flying:
            touched = written(step.text)
            for product in flying:
                first = product.first
                if first is not None and any(first <= r < first + OPERAND_REGISTERS for r in touched):
                    hazards.add(Hazard(step.address, step.text, product))
        todo += [(target, flying) for target in code.after[at]]
    return sorted(hazards)


def kernels(library: Path, folder: Path) -> list[tuple[str, str]]:
    """(name, SASS) of the kernels in a shared library that multiply by wgmma."""
    return [(name, sass) for name, sass in disassembled(library, folder) if PRODUCT.search(sass)]
