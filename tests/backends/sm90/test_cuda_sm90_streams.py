"""The Hopper kernels where they share the GPU: other streams, graphs, foreign kernels, green contexts, another process.

Two of them wait for other thread blocks of their launch. What does not end is a failure here, not a lost run: every
scenario is a process of its own, and its time is limited.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import PROGRAMS
from sm90_cases import why_not_here
from sm90_streams import OF_ANY_CONTEXT, SCENARIOS

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
PROGRAM = PROGRAMS / "sm90_streams.py"
SECONDS = 120
GIGABYTES = 4  # of a process, with its context
# Matrix products of 64 thread blocks, each of which has a multiprocessor to itself.
FILLER = f"""
import time, torch
long = torch.randn(1024, 1 << 18, device="cuda").bfloat16()
print("filling", flush=True)
end = time.monotonic() + {SECONDS}
while time.monotonic() < end:
    for _ in range(8):
        long @ long.t()
    torch.cuda.synchronize()
"""


def start(*arguments: str, program: Path = PROGRAM) -> subprocess.Popen[str]:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 2 * GIGABYTES:
        pytest.skip(f"needs {2 * GIGABYTES} GiB of free GPU memory, got {free:.1f}")
    command = [sys.executable, str(program), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def text_of(process: subprocess.Popen[str]) -> str:
    try:
        text, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"not done after {SECONDS} s: {process.args}\n{process.communicate()[0]}")
    assert process.returncode == 0, text
    return text


def finish(process: subprocess.Popen[str]) -> None:
    assert "all results are those alone" in text_of(process)


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_results_are_those_alone(scenario: str) -> None:
    finish(start(scenario))


@pytest.mark.parametrize("scenario", sorted(OF_ANY_CONTEXT))
def test_results_in_a_green_context(scenario: str) -> None:
    finish(start(scenario, "--green", "64"))


@pytest.mark.parametrize("places", [("", ""), ("64", "64")], ids=["whole", "green"])
def test_two_processes_at_once(places: tuple[str, str]) -> None:
    both: list[subprocess.Popen[str]] = []
    try:
        for scenario, green in zip(("eager", "graphs"), places, strict=True):
            both.append(start(scenario, *(("--green", green) if green else ())))
        for process in both:
            finish(process)
    finally:
        for process in both:
            process.kill()


@pytest.mark.parametrize("scenario", ["eager", "graphs"])
def test_beside_a_process_that_fills_half_of_the_device(scenario: str) -> None:
    filler = subprocess.Popen([sys.executable, "-c", FILLER], stdout=subprocess.PIPE, text=True)
    try:
        assert filler.stdout is not None and filler.stdout.readline() == "filling\n"
        finish(start(scenario))
        assert filler.poll() is None
    finally:
        filler.kill()
        filler.communicate()


def test_a_wait_without_end_is_ended() -> None:
    text = text_of(start(program=PROGRAMS / "sm90_endless_wait.py"))
    seconds = re.search(r"ended ([0-9.]+) s after", text)
    assert seconds is not None and float(seconds[1]) < 30, text
    assert "decode_few_kernel" in text and "block: [" in text and "must not change under a launch" in text, text
