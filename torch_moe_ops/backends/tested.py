"""Where backends have been tested, from the records of test runs (made by scripts/support_table.py --write).

{"format": 1, "records": [{"where": "sm90", "device": name, "commit": ..., "changed": [backend, ...],
 "passed": {backend: {scheme: [act_format, ...]}}}]}
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "tested.json"


@cache
def records() -> tuple[dict[str, Any], ...]:
    """The records that the library came with."""
    return tuple(json.loads(FILE.read_text())["records"]) if FILE.exists() else ()


def where_of(device: str, capability: tuple[int, int] | None) -> str:
    """What stands for a kind of device: "cpu", "sm90"."""
    return f"sm{capability[0]}{capability[1]}" if device == "cuda" and capability is not None else device


def was_run(backend: str, scheme: str, act_format: str, device: str, capability: tuple[int, int] | None) -> bool:
    """Whether a record has tests that passed with this backend and format on such a device."""
    where = where_of(device, capability)
    return any(
        record["where"] == where and act_format in record["passed"].get(backend, {}).get(scheme, ())
        for record in records()
    )
