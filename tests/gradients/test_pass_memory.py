"""What passes of Triton's kernels hold at most (gradients/on_gpu.py). No kernel runs: buffers are made all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from live_bytes import LiveBytes
from lora_cases import factors_of
from problems import Case, make_raw
from triton_passes import make_call

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.triton_engine import backward_launch, grouped, rank_sums, ranks
from torch_moe_ops.backends.triton_engine.backward_pass import Decoder
from torch_moe_ops.gradients import chunks, on_gpu
from torch_moe_ops.gradients.chunks import WINDOW_COLUMNS
from torch_moe_ops.gradients.lora import NO_LORA, Lora, LoraArguments

CASE = Case(tokens=2048, experts=16, top_k=4, hidden=256, inter=128)
PAIRS = CASE.tokens * CASE.top_k
CHUNK = CASE.experts // 2 * 2 * CASE.inter * CASE.hidden  # weights that are decoded at once: a half of w13
OF_PAIR = {"h": 2 * CASE.inter, "z": 4 * CASE.inter, "dx": 2 * CASE.hidden}  # bytes
RESULT = 2 * CASE.tokens * CASE.hidden
SMALL = 64 * PAIRS  # how slots are sorted, what gradients of routing weights are made of
RANK = 16
OF_FACTORS = 2 * CASE.experts * RANK * (2 * CASE.hidden + 3 * CASE.inter)
OF_RANKS = 4 * RANK * PAIRS  # what an adapter's factor makes of rows


class _NoKernel:
    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **constants: None


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels = (
        (grouped, "grouped_kernel"),
        *((backward_launch, f"{name}_kernel") for name in ("hidden", "weights", "bias", "gather_sum")),
        (ranks, "low_kernel"),
        (ranks, "outer_kernel"),
        (rank_sums, "low_and_sums_kernel"),
        (rank_sums, "add_parts_kernel"),
    )
    for module, name in kernels:
        monkeypatch.setattr(module, name, _NoKernel())
        monkeypatch.setattr(module, "target_of", lambda device: {"USE_PTX": False})
    for name in ("WORKSPACE_ELEMENTS", "MOST_ELEMENTS"):
        monkeypatch.setattr(chunks, name, CHUNK)
    monkeypatch.setattr(chunks, "PROCESSORS", 1)
    monkeypatch.setattr(chunks, "processors_of", lambda device: 1)  # a GPU's would want more weights at once
    yield


def _peaks(adapters: bool, case: Case = CASE) -> tuple[int, int]:
    """Bytes that a forward and a backward pass hold beyond what they are given, results included."""
    call, sizes = make_call(case, "cuda_sm90")
    backend = replace(
        BACKENDS["cuda_sm90"],
        dequantize=lambda *given: Decoder(1.0, lambda *of: None),
        rows_by_slot=None,
        few_rows=None,
    )
    x, lora = call.hidden_states, NO_LORA
    if adapters:
        given = factors_of(make_raw(case), 1, RANK, torch.bfloat16)
        arguments = LoraArguments(given.a13, given.b13, given.a2, given.b2, torch.ones(1), None)
        lora = Lora.of(arguments, sizes, x)
        for factors in lora:
            assert factors is not None
            factors.want(True, True)
    with LiveBytes() as forward:
        p = on_gpu.make_pass(call, sizes, x, x, (None, None))
        forward_result = on_gpu.run_forward(p, backend, lora, torch.bfloat16)
    with LiveBytes() as backward:
        p = on_gpu.make_pass(call, sizes, x, x, (None, None))
        found = on_gpu.run_pass(p, backend, torch.bfloat16, True, False, False, lora)
    assert forward_result is not None and found.hidden is not None
    return forward.peak, backward.peak


def test_forward_with_adapters() -> None:
    """The intermediate, the rows to combine, and decoded weights, or else the result."""
    peak, _ = _peaks(adapters=True)
    rows = PAIRS * (OF_PAIR["h"] + 2 * CASE.hidden) + 2 * OF_RANKS
    assert rows <= peak <= rows + max(2 * CHUNK, RESULT) + SMALL


@pytest.mark.parametrize("adapters", [False, True])
def test_backward(adapters: bool) -> None:
    """The gradient of GEMM1's results and that of its rows; the intermediate, where adapters see it; decoded weights, or
    else the result."""
    _, peak = _peaks(adapters)
    rows = PAIRS * (OF_PAIR["z"] + OF_PAIR["dx"])
    if adapters:
        rows += PAIRS * OF_PAIR["h"] + 4 * OF_RANKS
    most = max(2 * CHUNK, RESULT + OF_FACTORS * adapters)
    assert rows <= peak <= rows + most + SMALL


def test_a_narrower_window_does_not_keep_the_workspace_of_the_others() -> None:
    case = replace(CASE, hidden=2560)  # windows of 768 columns and of 256
    _, peak = _peaks(False, case)
    window, result = 2 * PAIRS * 768, 2 * case.tokens * case.hidden
    expected = PAIRS * OF_PAIR["z"] + window + result
    assert expected <= peak <= expected + 2 * CHUNK + SMALL


def test_backward_of_long_rows() -> None:
    """Of the gradients of rows there are as many columns at once as a window has."""
    case = replace(CASE, hidden=4 * WINDOW_COLUMNS)
    _, peak = _peaks(False, case)
    window, result = 2 * PAIRS * WINDOW_COLUMNS, 2 * case.tokens * case.hidden
    expected = PAIRS * OF_PAIR["z"] + window + result
    assert expected <= peak <= expected + 2 * CHUNK + SMALL
    assert peak < PAIRS * (OF_PAIR["z"] + 2 * case.hidden)  # without windows
