"""Arrivals at barriers that do not wait for what was loaded from shared memory before them, found in machine code.

An arrival says that others may write what this warp has read. Nothing makes it wait for loads in front of it that have
not brought their values yet, and a bulk copy that it allows can be there first (once_loaded in
csrc/cuda/sm90/device/async.cuh): no run shows for certain that none is. A load has brought its value where an
instruction has read, or overwritten, a register of it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from wgmma_hazards import OPERAND_REGISTERS, PRODUCT, parse, written

_LOAD = re.compile(r"^(?:@!?U?P\w+\s+)?(?:LDS|LDSM)\S* R\d")
_ARRIVAL = re.compile(r"^(?:@!?U?P\w+\s+)?SYNCS\.ARRIVE\b")
_REGISTER = re.compile(r"\bR(\d+)\b")


class Load(NamedTuple):
    address: int
    instruction: str
    registers: range


class EarlyRelease(NamedTuple):
    address: int
    instruction: str
    load: Load


def _touched(instruction: str) -> set[int]:
    """Registers that it names, and those that belong to them as operands of products."""
    named = {int(number) for number in _REGISTER.findall(instruction)}
    if (product := PRODUCT.search(instruction)) and product[2]:
        named |= {int(product[2]) + i for i in range(OPERAND_REGISTERS)}
    return named | set(written(instruction))


def find_early_releases(sass: str) -> list[EarlyRelease]:
    """Of one kernel, between two places where paths meet: what lies further back is not seen here."""
    instructions, labels = parse(sass)
    meetings = set(labels.values())
    found: list[EarlyRelease] = []
    under_way: list[Load] = []
    for at, (address, text) in enumerate(instructions):
        if at in meetings:
            under_way = []
        if _ARRIVAL.match(text):
            found += [EarlyRelease(address, text, load) for load in under_way]
        touched = _touched(text)
        under_way = [load for load in under_way if touched.isdisjoint(load.registers)]
        if _LOAD.match(text):
            under_way.append(Load(address, text, written(text)))
    return found
