"""The cells of the in-graph matrix, from the registry, and the file that their results go to."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpu_layers import FORMATS, Format

FORMS = ("monolithic", "routed")
# The kernel right in front of a layer. "layer": the other layer of the pair; "other": a layer of another backend;
# "early": one that lets its dependents start, waits, and only then stores every input.
FRONTS = ("copy", "gemm", "route", "layer", "other", "early")
TOKENS = (1, 2, 5, 40)
# Beyond these, a backend has kernels that none of TOKENS gets.
MORE_TOKENS = {
    "cuda_sm90": (12, 400),
    "cuda_sm90_int4": (12, 400),
    "cuda_sm90_bf16": (200,),
    **dict.fromkeys(("cuda_sm90_fp8", "cuda_sm90_packed", "cuda_sm90_folded"), (400, 700)),
}
# Of 4-bit weights beside 16-bit activations: of a layer with more experts (in_graph.MANY_EXPERTS).
GATHERED_TOKENS = 14
GATHERED = tuple((backend, s) for backend in ("auto", "cuda_sm90") for s in ("nvfp4", "mxfp4"))
GATHERED += tuple((backend, s) for backend in ("auto", "cuda_sm90_int4") for s in ("int4", "mxint4"))


def auto_formats(formats: tuple[Format, ...] = FORMATS) -> tuple[Format, ...]:
    """What some backend runs, as `prepare` runs it where the caller names none."""
    return tuple(dict.fromkeys(dataclasses.replace(f, backend="auto") for f in formats))


class Cell(NamedTuple):
    """One graph: a format of a backend, a number of tokens, a form of call, the kernel in front of each layer."""

    fmt: Format
    tokens: int
    form: str
    front: str


def layers() -> tuple[tuple[Format, int], ...]:
    """Every format with every number of tokens: what one test takes through all forms and fronts.

    What users get without naming a backend comes first: a record whose time ends lacks the last ones.
    """
    return tuple((fmt, m) for fmt in (*auto_formats(), *FORMATS) for m in tokens_of(fmt))


def tokens_of(fmt: Format) -> tuple[int, ...]:
    gathers = (
        fmt.act_format in ("none", "fp8") and fmt.weight_policy == "exact" and (fmt.backend, fmt.scheme) in GATHERED
    )
    return (*TOKENS, *MORE_TOKENS.get(fmt.backend, ()), *((GATHERED_TOKENS,) if gathers else ()))


def cells_of(fmt: Format, tokens: int) -> Iterator[Cell]:
    for form in FORMS:
        for front in FRONTS:
            yield Cell(fmt, tokens, form, front)


def write_cell(cell: Cell, chosen: str, verdict: dict[str, Any]) -> None:
    """Append the result to in_graph-<process>.jsonl in the folder MOEQ_RECORD; nothing where that is not set.

    chosen: the backend that ran, which "auto" leaves open.
    """
    folder = os.environ.get("MOEQ_RECORD")
    if not folder:
        return
    fmt = cell.fmt
    line = {
        "backend": fmt.backend, "chosen": chosen, "scheme": fmt.scheme, "act_format": fmt.act_format,
        "input_scale": fmt.input_scale, "weight_policy": fmt.weight_policy, "tokens": cell.tokens, "form": cell.form,
        "front": cell.front, "time": round(time.time(), 3), **verdict,
    }  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"in_graph-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
