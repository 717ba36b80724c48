"""How near to the oracle a backend was measured to be."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch_moe_ops.backends.measured.records import MIN_LAYERS, Record, distances_of
from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.problem import Problem

FACTOR = 1.1  # of the field's distance
NO_CONSTANTS = (1.0, 0.0, math.inf)  # what a Problem without constants has


def distance_of(backend: str, problem: Problem) -> Record | None:
    """The one of the problem's activation and constants; else the first of its activation, else the first of all; None
    where there is none. Of two whose limits are on either side of the problem's, the farther one."""
    found = distances_of(backend, problem)
    alike = _alike(found, problem)
    if alike:
        return max(alike, key=lambda record: math.inf if record["ratio"] is None else record["ratio"])
    of_activation = [record for record in found if record["activation"] == problem.activation]
    return next(iter(of_activation or found), None)


def _alike(records: Iterable[Record], problem: Problem) -> list[Record]:
    """Those of the problem's activation and constants: another activation bends the same errors in another way.

    A swiglu_limit clamps more the lower it is. One that was not measured counts as the two next to it, on both sides.
    """
    (*own, own_limit), (*given, limit) = ACTIVATIONS[problem.activation].constants, problem.constants or NO_CONSTANTS
    if given != own:
        return []
    of_activation = (record for record in records if record["activation"] == problem.activation)
    by_limit = {record.get("limit", own_limit): record for record in of_activation}
    below, above = [at for at in by_limit if at <= limit], [at for at in by_limit if at >= limit]
    return [by_limit[at] for at in {max(below), min(above)}] if below and above else []


def statement(backend: str, problem: Problem) -> str:
    """Class and measured distance of a backend, for `explain`."""
    accuracy, found = BACKENDS[backend].accuracy, distance_of(backend, problem)
    if BACKENDS[backend].of_the_field:
        return f"{accuracy}: the field's own kernels"
    if found is None:
        return accuracy
    (least, most), rows = found["l2"], found["row"][1]
    text = f"{accuracy}, {least:.1e} to {most:.1e} from the oracle, {rows:.1e} in the worst row"
    if problem.scheme == "int4" and found["weight_scales"] != problem.weight_scales:
        text += f" of scales {found['weight_scales']}"
    if not _alike([found], problem):
        text += f" with {found['activation']}" + (f" and a limit of {found['limit']:g}" if "limit" in found else "")
    return text if found["ratio"] is None else f"{text}: at most {found['ratio']:.2f} times {found['field']}"


def too_far(backend: str, problem: Problem) -> str | None:
    """None where a backend is measured to be as near to the oracle as "standard" asks, else why not."""
    found, farthest = distances_of(backend, problem), distance_of(backend, problem)
    if farthest is None:
        return "its distance is not measured for such weights on such a device"
    if farthest["ratio"] is None:
        return "there is no kernel of the field to compare with"
    alike = _alike(found, problem)
    if not alike:
        return f"its distance is measured with {_measured_with(found, problem.activation)} alone"
    layers = min(record["layers"] for record in alike)
    if layers < MIN_LAYERS:
        return f"its distance is measured on too few layers ({layers})"
    if farthest["ratio"] > FACTOR:
        return f"that is more than {FACTOR} times as far"
    return None


def _measured_with(records: list[Record], activation: str) -> str:
    """The constants of the activation's records, or where it has none the others' activations."""
    own = [record for record in records if record["activation"] == activation]
    limits = [record["limit"] for record in own if "limit" in record]
    if limits:
        return f"{activation}'s own constants and limits down to {min(limits):g}"
    return f"{activation}'s own constants" if own else ", ".join(sorted({record["activation"] for record in records}))
