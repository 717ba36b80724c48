"""What bench_sweep.py sweeps: models, formats and numbers of tokens, in pieces, the most wanted first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moe_peers import common

MODELS = ("qwen3_30b", "dsv3", "gptoss120b", "mixtral", "kimi_k2", "glm46")
_FIRST = (
    *("fp8", "int4g32", "nvfp4", "mxfp4", "int4", "mxint4", "fp8row", "nvfp4-a8", "mxfp4-a8", "bf16", "int4zp"),
    *("fp8-a16", "int4f16", "int4zpf16", "fp8half", "nvfp4-a4", "fp8row-a16", "mxfp8-a16", "mxfp8-a8", "mxfp4-a8row"),
    *("int4-a8", "int4g32-a8", "int4zp-a8", "int4f16-a8", "int4zpf16-a8", "int8", "int8-a8"),
)
_OF_INT4 = (f"{form}{act}" for form in common.INT4_FORMS for act in ("", "-a8"))
FORMATS = (*_FIRST, *(fmt for fmt in _OF_INT4 if fmt not in _FIRST))
WANTED_MODELS, WANTED_FORMATS = MODELS[:3], FORMATS[:5]
TOKENS = tuple(2**n for n in range(15))
FEW_TOKENS = tuple(m for m in TOKENS if m.bit_length() % 3 == 1)  # powers of 8
# Other libraries that run a format, as moe_peers names them.
PEERS = {
    **dict.fromkeys(("nvfp4", "int4", "int4g32", "mxint4"), ("humming", "marlin")),
    "mxfp4": ("humming", "marlin", "triton_kernels"),
    **dict.fromkeys(("mxfp4-a8", "int4-a8", "int4g32-a8"), ("humming",)),
    "fp8": ("vllm_triton", "deepgemm"),
    "fp8row": ("vllm_triton",),
    "fp8half": ("vllm_triton",),
    "int8": ("vllm_triton", "humming"),
    "int8-a8": ("vllm_triton", "humming"),
    "bf16": ("vllm_triton", "triton_kernels", "deepgemm"),
}
AUTO = "auto"

Cell = tuple[str, str, int]  # model, format, tokens


class Piece(NamedTuple):
    """What is loaded together: a layer of a model in a format, and the numbers of tokens to time."""

    model: str
    fmt: str
    ms: tuple[int, ...]


def passes() -> Iterator[tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]]:
    """(models, formats, tokens) in the order of their worth; a later pass repeats what earlier ones have."""
    yield WANTED_MODELS, WANTED_FORMATS, FEW_TOKENS
    yield MODELS, WANTED_FORMATS, FEW_TOKENS
    yield MODELS, FORMATS, FEW_TOKENS
    yield WANTED_MODELS, WANTED_FORMATS, TOKENS
    yield MODELS, FORMATS, TOKENS


def pieces(done: set[Cell], models: Iterable[str], fmts: Iterable[str], ms: Iterable[int]) -> list[Piece]:
    """What is left of the sweep, in its order, without what no checkpoint can have."""
    models, fmts, ms = set(models), set(fmts), set(ms)
    left: list[Piece] = []
    seen = set(done)
    for of_models, of_fmts, of_ms in passes():
        for fmt in (f for f in of_fmts if f in fmts):
            for model in (m for m in of_models if m in models and common.why_not(fmt, common.SHAPES[m]) is None):
                wanted = tuple(m for m in of_ms if m in ms and (model, fmt, m) not in seen)
                seen.update((model, fmt, m) for m in wanted)
                if wanted:
                    left.append(Piece(model, fmt, wanted))
    return left


def share(found: list[Piece], text: str) -> list[Piece]:
    """ "0/2": every second piece from the first on; one process a GPU."""
    part, count = map(int, text.split("/"))
    if not 0 <= part < count:
        raise SystemExit(f"--share: must be I/N with 0 <= I < N, got {text}")
    return found[part::count]


def read(path: Path | None) -> list[dict[str, Any]]:
    """The lines of a result file; none where there is no file. A last line that was cut off is left out."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]


def cell_of(record: dict[str, Any]) -> Cell:
    return record["shape"], record["layer"].partition("/")[2], record["M"]


def cells_done(records: Iterable[dict[str, Any]]) -> set[Cell]:
    """Those that say how long `auto` takes."""
    return {cell_of(r) for r in records if r["event"] == "bench" and r["layer"].startswith(AUTO)}
