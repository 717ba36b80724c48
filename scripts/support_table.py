"""Writes the support table of the README from the backend registry.

    python scripts/support_table.py [--write]

A cell is the best that holds for some backend: "tested" (its test suite runs on that device),
"by contract" (checked against a simulator of the kernel's interface), or "not yet".
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_moe_ops.backends import BACKENDS, Problem
from torch_moe_ops.schemes import SCHEMES, Scheme

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support table: made by scripts/support_table.py -->", "<!-- end of the support table -->"

# Column: device type and compute capability.
DEVICES = {
    "CPU": ("cpu", None),
    "Ampere (SM80)": ("cuda", (8, 0)),
    "Hopper (SM90)": ("cuda", (9, 0)),
    "Blackwell (SM100)": ("cuda", (10, 0)),
}
SIZES = {"num_experts": 8, "hidden_size": 1024, "intermediate_size": 1024}


def cell(scheme: Scheme, act_format: str, device: str, capability: tuple[int, int] | None) -> str:
    """Backends other than `reference` that fit, and how far they are verified on that device."""
    scale = "tensor" if act_format in scheme.static_acts else "none"  # calibrated, as published checkpoints are
    where = {"device": device, "capability": capability, "input_scale": scale}
    problem = Problem(scheme.name, act_format=act_format, **where, **SIZES)
    found = []
    for name, backend in BACKENDS.items():
        if name != "reference" and backend.fits_anywhere(problem):
            found.append(f"{name}: {backend.verified(problem)}")
    return "; ".join(found) or "not yet (`reference` runs)"


def table() -> str:
    header = ["scheme", "`act_format`", *DEVICES]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for scheme in SCHEMES.values():
        for act in scheme.act_formats:
            cells = [cell(scheme, act, *where) for where in DEVICES.values()]
            lines.append("| " + " | ".join([f"`{scheme.name}`", f"`{act}`", *cells]) + " |")
    return "\n".join(lines)


def readme_with_table(text: str) -> str:
    """The README with its table replaced."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        README.write_text(readme_with_table(README.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
