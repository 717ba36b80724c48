"""benchmarks/bench_backward_host.py, and what it counts: launches of a training step, and which of them are looked up."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from paths import ROOT

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU that is not there")

SCRIPT = ROOT / "benchmarks" / "bench_backward_host.py"
# Of Qwen3-30B's layer at 4096 tokens: 8 chunks of w2, 16 of w13, and 5 in each of 4 windows of hidden states.
STEP = {
    "experts_sm90": 2,
    "count_slots_kernel": 1,
    "start_slots_kernel": 1,
    "place_slots_kernel": 1,
    "dequantize_tiles_kernel": 8 + 16 + 4 * 5,
    "grouped_kernel": 8 + 4 * 5,
    "hidden_kernel": 16,
    "gather_sum_kernel": 4,
    "weights_kernel": 1,
}
WITH_ADAPTERS = STEP | {
    "count_slots_kernel": 2,
    "start_slots_kernel": 2,
    "place_slots_kernel": 2,
    "experts_sm90_rows": 2,
    "gather_sum_kernel": 1 + 4,
    "low_kernel": 4,
    "low_and_sums_kernel": 2,
    "add_parts_kernel": 2,
    "outer_kernel": 2,
}
del WITH_ADAPTERS["experts_sm90"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the program writes, in a process of its own: it changes how memory is allocated."""
    out = tmp_path_factory.mktemp("host") / "lines.jsonl"
    command = [sys.executable, str(SCRIPT), "--steps", "3", "--label", "of a test", "--json", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_launches_of_a_step(lines: list[dict[str, Any]]) -> None:
    assert [line["kernels"] for line in lines[:2]] == [STEP, WITH_ADAPTERS]
    assert [line["launches"] for line in lines[:2]] == [98, 112]


def test_few_launches_are_looked_up(lines: list[dict[str, Any]]) -> None:
    """None after the first step."""
    assert [line["looked_up"] for line in lines[:2]] == [0, 0]


def test_lines(lines: list[dict[str, Any]]) -> None:
    assert [line["label"] for line in lines] == ["of a test"] * 3
    assert all(0 < line["tenth_us"] <= line["step_us"] for line in lines[:2])
    # Which of them is longer is Triton's: with 3.9 a launch that is looked up took less time here than one by its own call.
    assert all(lines[2][name] > 0 for name in ("looked_up_us", "by_triton_us", "stand_in_us", "found_again_us"))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter compiles nothing")
def test_other_numbers_of_tokens_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And behind it tensors are the host's again."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench, gpu = (importlib.import_module(name) for name in ("bench_backward_host", "host_gpu"))
    with gpu.host_gpu() as counts:
        for tokens in (700, 701, 900):
            counts.clear()
            bench.step_of(bench.Shape(8, 2, 256, 128), tokens, 16)()
        assert not counts.looked_up
    assert not torch.zeros(1).is_cuda
