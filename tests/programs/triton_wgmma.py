"""For each GEMM of a layer, compiled for Hopper, a line.

Name, products with an operand in registers, the most products that a step leaves in flight, hazards, the first one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from sass_code import disassemble
from triton_aot import record
from wgmma_hazards import count_products, find_hazards


def main(scheme: str, tokens: int, folder: Path) -> None:
    weights: dict[str, Any] = {"weights": {"group": -1}} if scheme == "int8" else {}
    recorder = record(scheme=scheme, tokens=tokens, hidden=2880, inter=704, experts=8, **weights)
    for name, kernel in recorder.compile(90, pdl=True):
        if name.startswith("gemm"):
            sass = disassemble(kernel.asm["cubin"], folder)
            hazards = find_hazards(sass)
            left = max(map(int, re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", kernel.asm["ptx"])))
            print(name, count_products(sass), left, len(hazards), *hazards[:1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
