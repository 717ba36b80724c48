"""What was measured of backends that round more than the contract: distances.json, which the library comes with.

`benchmarks/distances.py` measures distances, of ours and of the kernels that the field runs on the same weights, and
`bench_moe.py` times; `python scripts/distance_table.py --write` makes the file of the results:

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
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch_moe_ops.core.problem import Problem

FILE = Path(__file__).with_name("distances.json")
MIN_LAYERS = 2  # measured, or timed where the layer itself was not

# A matrix's scale is that of two equal halves.
_MEASURED_AS = {"tensor": "half"}
# INT4 in groups of 64 that this backend measures as groups of 128, by activation format and dtype of the scales: its
# layout repeats the scales of a larger group, so that they are the same bytes, and the same kernels run (beside fp8
# with float32 scales alone). `triton`, whose steps are shorter then, takes longer than with groups of 128 beside fp8,
# where both were timed. With scales of rows it has another kernel, and they are a kind of their own.
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


def distances_of(backend: str, problem: Problem) -> list[Record]:
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


def times_of(problem: Problem) -> list[Record]:
    """The layers with such weights that were timed on such a device."""
    if not _on_this_device(problem):
        return []
    kinds = (None, problem.weight_scales, _measured_kind(problem))
    return [
        record
        for record in measured()["times"]
        if (record["scheme"], record["act_format"]) == (problem.scheme, problem.act_format)
        and record["weight_scales"] in kinds
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
