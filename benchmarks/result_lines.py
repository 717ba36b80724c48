"""Result files of the benchmarks: JSON lines, the first of which says what ran, on what."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import torch_moe_ops as moe


def arguments() -> list[str]:
    """The command line's arguments, files without their folders: a machine's paths do not go into results."""
    return [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]


def environment() -> dict[str, Any]:
    """The first line of a run on a GPU."""
    gpu = torch.cuda.get_device_name()
    return {"event": "env", "torch": torch.__version__, "gpu": gpu, "library": moe.__version__, "argv": arguments()}


def write(lines: Iterable[dict[str, Any]], out: Path | None) -> None:
    """Print the lines, and append them to a file where there is one."""
    texts = [json.dumps(line) for line in lines]
    print(*texts, sep="\n", flush=True)
    if out:
        with out.open("a", encoding="utf-8") as file:
            file.writelines(text + "\n" for text in texts)
