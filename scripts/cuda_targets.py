"""Which machine code the CUDA kernels are compiled to: nvcc's flags, for setup.py and scripts/cuda_compile.sh.

Machine code runs on devices of its major number from its minor one on (sm_80 on 8.9, sm_100 on 10.3), `a` code on that
one number alone. Every other device, and those that come later, compiles the PTX of the oldest target when the library
is loaded there: no kernel outside csrc/cuda/sm90 has code for one architecture.

usage: python scripts/cuda_targets.py NVCC generic|sm90 [ARCH ...]
       prints a flag a line; what this nvcc does not know is left out and named on stderr
"""

from __future__ import annotations

import subprocess
import sys

ARCHES = ("80", "90a", "100", "120")  # of csrc/cuda
HOPPER = "90a"  # of csrc/cuda/sm90
PTX = "80"


def known_numbers(nvcc: str) -> set[str]:
    """The numbers that an nvcc compiles for: {"80", "90", ...}."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return {name.removeprefix("sm_") for name in listed.split() if name.startswith("sm_")}


def split(arches: tuple[str, ...], known: set[str]) -> tuple[list[str], list[str]]:
    """Targets that are known, and the others. nvcc lists plain numbers; a letter exists where its number does."""
    fits = [arch for arch in arches if arch.rstrip("af") in known]
    return fits, [arch for arch in arches if arch not in fits]


def flags(arches: list[str], generic: bool) -> list[str]:
    """nvcc's flags: the generic kernels for every target and PTX, those of sm90 for Hopper alone (maybe none)."""
    wanted = arches if generic else [arch for arch in arches if arch == HOPPER]
    made = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted]
    return [*made, f"-gencode=arch=compute_{PTX},code=compute_{PTX}"] if generic else made


def left_out(nvcc: str, missing: list[str]) -> str:
    """What a build log says of targets that this nvcc does not know."""
    names = ", ".join(f"sm_{arch}" for arch in missing)
    return f"{nvcc} does not know {names}: left out, such devices compile the PTX of compute_{PTX} when they first run"


def main(nvcc: str, kind: str, *arches: str) -> int:
    wanted, missing = split(arches or ARCHES, known_numbers(nvcc))
    if missing:
        print(f"cuda_targets: {left_out(nvcc, missing)}", file=sys.stderr)
    if not wanted:
        print(f"cuda_targets: {nvcc} knows none of {', '.join(missing)}", file=sys.stderr)
        return 2
    print("\n".join(flags(wanted, kind == "generic")))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
