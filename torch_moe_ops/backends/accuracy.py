"""How near to the oracle backends are, and which of those that are not strict `prepare` takes unasked.

Kernels of the field itself (FlashInfer's) are taken as their order says; ours by what was measured.

Both are measured: `benchmarks/distances.py` measures distances, of ours and of the kernels that the field runs on the
same weights, and `bench_moe.py` times; `python scripts/distance_table.py --write` makes distances.json of the results:

    {"format": 1, "device": name, "capability": [9, 0],
     "distances": [{"backend": ..., "scheme": ..., "act_format": ..., "weight_policy": ..., "weight_scales": ...,
       "activation": "silu", "layers": 6, "l2": [least, largest], "row": [least, largest], "field": "Marlin",
       "ratio": 0.9}],
     "times": [{"scheme": ..., "act_format": ..., "weight_scales": ..., "num_experts": ..., "top_k": ...,
       "hidden_size": ..., "intermediate_size": ..., "us": {backend: {"1": 25.6, ...}}}]}

l2, row: relative L2 distance of a whole result and of its worst row, over layers and numbers of tokens. ratio: the
largest of our distance over the field's (of `field`) on one layer and number of tokens; null where there is no peer.
weight_scales: as Problem says; null in `times`: any. activation: with which all of it was measured, without a caller's
constants; an entry each. Others have a "limit": with that swiglu_limit. Between it and the activation's own, limits
count as measured, as long as both are near.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.problem import Problem

FILE = Path(__file__).parent / "distances.json"
FACTOR = 1.1  # of the field's distance
MIN_LAYERS = 2  # measured, or timed where the layer itself was not
MIN_TOKENS = 3  # numbers of tokens at which a layer was timed
# What two timings of one kernel differ by. A backend that takes more of a strict one's time, at any number of tokens,
# is slower; two whose mean times are within it are as fast.
SLOWER = 1.03
# But for a backend that takes at most LOSS of the strict one's time somewhere, which loses far more elsewhere: in the
# mean, which is at most GAIN, or where it loses most, MORE times as much. Weights are prepared for one of them.
LOSS, GAIN, MORE = 1.15, 0.8, 2.0
NO_CONSTANTS = (1.0, 0.0, math.inf)  # what a Problem without constants has
# A matrix's scale is that of two equal halves.
_MEASURED_AS = {"tensor": "half"}
# INT4 in groups of 64 that this backend measures as groups of 128, by activation format and dtype of the scales: its
# layout repeats the scales of a larger group, so that they are the same bytes, and the same kernels run (beside fp8
# with float32 scales alone). `triton`, whose steps are shorter then, takes longer than with groups of 128 beside fp8,
# where both were timed. With scales of rows it has another kernel, which was not timed.
_STORES_64_AS_128 = "cuda_sm90_int4"
_DTYPES_OF_64 = {"none": ("bfloat16", "float16", "float32"), "fp8": ("float32",)}

Record = Mapping[str, Any]


@cache
def measured() -> Record:
    """What the library came with; tests put another one in its place."""
    data: Record = json.loads(FILE.read_text("utf-8"))
    return data


def _on_this_device(problem: Problem) -> bool:
    capability = measured()["capability"]
    return problem.device == "cuda" and capability is not None and problem.capability == tuple(capability)


def _distances_of(backend: str, problem: Problem) -> list[Record]:
    """The measured distances of a backend for such weights, one an activation, on such a device."""
    if not _on_this_device(problem):
        return []
    wanted = (backend, problem.scheme, problem.act_format, problem.weight_policy)
    names = ("backend", "scheme", "act_format", "weight_policy")
    kind = _measured_kind(problem) if backend == _STORES_64_AS_128 else _kind(problem.weight_scales)
    return [
        record
        for record in measured()["distances"]
        if tuple(record[name] for name in names) == wanted and _kind(record["weight_scales"]) == kind
    ]


def _kind(weight_scales: str | None) -> str | None:
    return _MEASURED_AS.get(weight_scales or "", weight_scales)


def _measured_kind(problem: Problem) -> str | None:
    """The form of the scales under which _STORES_64_AS_128 is measured on such a layer."""
    kind = _kind(problem.weight_scales)
    if problem.scheme != "int4" or kind is None:
        return kind
    dtypes = _DTYPES_OF_64.get(problem.act_format, ())
    found = []
    for one in kind.split(", "):
        dtype, _, rest = one.partition(" per ")
        group, *points = rest.split(" ", 1)
        as_128 = group == "64" and dtype in dtypes
        found.append(" ".join([dtype, "per", "128" if as_128 else group, *points]))
    return ", ".join(dict.fromkeys(found))


def distance_of(backend: str, problem: Problem) -> Record | None:
    """The one of the problem's activation and constants; else the first of its activation, else the first of all; None
    where there is none. Of two whose limits are on either side of the problem's, the farther one."""
    found = _distances_of(backend, problem)
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
    found, farthest = _distances_of(backend, problem), distance_of(backend, problem)
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


def _timed(problem: Problem) -> tuple[bool, list[Record]]:
    """Whether the layer itself was timed, and the records that tell which backend is faster."""
    if not _on_this_device(problem):
        return False, []
    alike = [
        record
        for record in measured()["times"]
        if (record["scheme"], record["act_format"]) == (problem.scheme, problem.act_format)
        and record["weight_scales"] in (None, problem.weight_scales, _measured_kind(problem))
    ]
    sizes = (problem.num_local_experts, problem.hidden_size, problem.intermediate_size)
    own = [
        record
        for record in alike
        if (record["num_experts"], record["hidden_size"], record["intermediate_size"]) == sizes
        and problem.top_k in (None, record["top_k"])
    ]
    return bool(own), own or alike


def _ratios(backend: str, other: str, records: Iterable[Record]) -> list[float] | None:
    """Times of a backend over those of another one, for each layer and number of tokens; None: too few of a layer."""
    found: list[float] = []
    for record in records:
        mine, theirs = (record["us"].get(name, {}) for name in (backend, other))
        common = mine.keys() & theirs.keys()
        if len(common) < MIN_TOKENS:
            return None
        found += [mine[tokens] / theirs[tokens] for tokens in common]
    return found


def speed(backend: str, other: str, problem: Problem) -> tuple[float, str]:
    """Mean time of a backend over that of another one, infinite where it is not taken for it; and why.

    It is taken where it was never slower, or little beside what it gains (LOSS, GAIN, MORE): on this layer, or else on
    every layer with such weights that was timed.
    """
    own, records = _timed(problem)
    if not own and len(records) < MIN_LAYERS:
        return math.inf, f"no record says that it is faster than {other} on such a layer"
    ratios = _ratios(backend, other, records)
    if not ratios:
        return math.inf, f"it was not timed beside {other} at {MIN_TOKENS} numbers of tokens"
    where = "this layer" if own else f"{len(records)} layers with such weights"
    timings = f"{len(ratios)} timings on {where}"
    slower, worst = sum(ratio > SLOWER for ratio in ratios), max(ratios)
    mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
    if not slower and mean < 1:
        return mean, f"never slower than {other} in {timings}, {mean:.2f} of its time in the mean"
    others_loss = 1 / min(ratios) - 1
    if worst <= LOSS and (mean <= GAIN or (mean < 1 and others_loss >= MORE * (worst - 1))):
        return mean, (
            f"up to {worst:.2f} of {other}'s time in {slower} of {timings}, {min(ratios):.2f} to {worst:.2f} in all, "
            f"{mean:.2f} in the mean"
        )
    return math.inf, f"it was slower than {other} in {slower} of {timings}"


def _fastest(means: Mapping[str, float], problem: Problem) -> str | None:
    """The backend of the least mean time. Among those as fast in the mean, the one that others beat by least."""
    if not means:
        return None
    least, records = min(means.values()), _timed(problem)[1]
    equal = [name for name, mean in means.items() if mean <= SLOWER * least]

    def beaten(name: str) -> float:
        return max((max(_ratios(name, other, records) or [1.0]) for other in equal if other != name), default=1.0)

    return min(equal, key=lambda name: (beaten(name), means[name]))


def preferred(problem: Problem, fitting: Iterable[str], first: str | None) -> tuple[str | None, dict[str, str]]:
    """The backend that "auto" takes in the place of `first`, None for none; and why, for each that could be.

    Args:
        fitting: backends that can run the problem.
        first: the first of them that needs no measurement.
    """
    means: dict[str, float] = {}
    why: dict[str, str] = {}
    for name in fitting:
        if BACKENDS[name].needs_no_measurement or not BACKENDS[name].auto:
            continue
        mean, reason = math.inf, too_far(name, problem)
        if reason is None and first is not None:
            mean, reason = speed(name, first, problem)
        taken = "" if mean < math.inf else "by name only: "
        why[name] = taken + (reason or "there is nothing to be faster than")
        if mean < math.inf:
            means[name] = mean
    return _fastest(means, problem), why
