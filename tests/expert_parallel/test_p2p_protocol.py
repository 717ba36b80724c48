"""The kernels of transport "p2p" on threads of the CPU: their bytes, and the order in which blocks write and wait."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import CPP, ROOT

SOURCES = ROOT / "csrc" / "cuda"
# Small blocks, so that some calls take many steps.
SMALL = {"kBlocks": 3, "kBlockThreads": 8, "kStepVectors": 32, "kPartsVectors": 64}
SMALL |= {"kRemoteThreads": 32, "kWordBlocks": 2, "kWordThreads": 16, "kRenewal": 4}
CALLS = "12"


def adapted(text: str, constants: dict[str, int]) -> str:
    """A header of the kernels as C++ for the CPU: sizes, instructions, shared memory."""
    for name, value in constants.items():
        text = re.sub(rf"\b{name} = \d+;", f"{name} = {value};", text)
    for function, call in (
        ("store_release", "store_flag(flag, value)"),
        ("load_acquire", "return load_flag(flag)"),
        ("nanoseconds", "return clock_ns()"),
        ("or_of_warp", "return mine"),
        ("store_words", "store_words_of(target, words)"),
        ("load_words", "return load_words_of(source)"),
    ):
        text = re.sub(rf"({function}\([^)]*\)) {{\n.*?\n}}\n", rf"\1 {{ {call}; }}\n", text, flags=re.DOTALL)
    # Lanes have nothing from each other here: each looks at all slots.
    text = text.replace("threadIdx.x % 32, 32));", "0, 1));")
    text = re.sub(r"__shared__ uint32_t (\w+)\[kMostRanks\];", r"uint32_t* \1 = block->shared;", text)
    text = re.sub(r'extern "C" [^;]*__assert_fail[^;]*;', "", text)
    text = re.sub(r"struct Float16 {.*?\n};\n", "", text, flags=re.DOTALL)
    return re.sub(r"#include <cuda_\w+.h>\n", "", text).replace('"../load16.cuh"', '"load16.cuh"')


def build(folder: Path, **constants: int) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ with C++20")
    headers = [
        SOURCES / "expert_parallel" / f"{name}.cuh"
        for name in ("buffer", "patience", "flags", "words", "placing", "dispatch", "combine", "remote")
    ]
    for header in (*headers, SOURCES / "load16.cuh"):
        (folder / header.name).write_text(adapted(header.read_text(), SMALL | constants))
    program = folder / "exchange"
    source = str(CPP / "ep_exchange_on_threads.cpp")
    command = [compiler, "-O1", "-std=c++20", "-pthread", "-w", f"-I{folder}", source, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def test_random_exchanges(tmp_path: Path) -> None:
    program = build(tmp_path)
    for seed in range(8):
        done = subprocess.run([program, str(seed), CALLS], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (seed, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"kSlots": 2}, {"kSlots": 1}, {"kWordSlots": 1}, {"kRenewal": 1048576}], ids=str)
def test_less_is_too_little(change: dict[str, int], tmp_path: Path) -> None:
    """That the test above would see an overwritten slot, and a word of long ago."""
    program = build(tmp_path, **change)
    outcomes = []
    for seed in range(32):  # the first ones that go wrong end it
        try:
            done = subprocess.run([program, str(seed), CALLS], capture_output=True, text=True, timeout=60)
            outcomes.append(done.returncode)
        except subprocess.TimeoutExpired:
            outcomes.append(-1)
        if outcomes[-1]:
            return
    raise AssertionError(outcomes)
