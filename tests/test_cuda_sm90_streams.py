"""The Hopper kernels where they share the GPU: other streams, graphs, foreign kernels, another process.

Two of them wait for other thread blocks of their launch. What does not end is a failure here, not a lost run: every
scenario is a process of its own, and its time is limited.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sm90_cases import why_not_here
from sm90_streams import SCENARIOS

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
PROGRAM = Path(__file__).parent / "sm90_streams.py"
SECONDS = 120
GIGABYTES = 4  # of a process, with its context


def start(scenario: str) -> subprocess.Popen[str]:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 2 * GIGABYTES:
        pytest.skip(f"needs {2 * GIGABYTES} GiB of free GPU memory, got {free:.1f}")
    command = [sys.executable, str(PROGRAM), scenario]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    try:
        text, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"not done after {SECONDS} s: {process.args}\n{process.communicate()[0]}")
    assert process.returncode == 0, text
    assert "all results are those alone" in text


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_results_are_those_alone(scenario: str) -> None:
    finish(start(scenario))


def test_two_processes_at_once() -> None:
    both: list[subprocess.Popen[str]] = []
    try:
        for scenario in ("eager", "graphs"):
            both.append(start(scenario))
        for process in both:
            finish(process)
    finally:
        for process in both:
            process.kill()
