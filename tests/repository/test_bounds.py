"""The bounds that depend on sizes: what is measured lies within them, and the page states them."""

from __future__ import annotations

import json

import pytest
import torch
from modules_by_path import ROOT, load
from tolerances import FP8_SUM_BACKENDS, FP8_SUMS, MOVED_CODE, fp8_sums_bound, layer_bound

MEASURED = ROOT / "benchmarks" / "results" / "h200_bounds.jsonl"


@pytest.mark.parametrize("error", (2.1e-2, 1.9e-2, 1.8e-2))
@pytest.mark.parametrize("tokens", (2, 5))
def test_a_small_layer_has_a_bound_that_holds(error: float, tokens: int) -> None:
    """Errors seen on 16 experts of 512 x 256, top 4: beyond what large layers are held to."""
    values = tokens * 4 * 256
    assert fp8_sums_bound(1 << 22) < error < fp8_sums_bound(values)


def test_small_results_have_more_room() -> None:
    bounds = [fp8_sums_bound(n) for n in (64, 1024, 1 << 14, 1 << 20)]
    assert bounds == sorted(bounds, reverse=True) and bounds[-1] < 1.5 * FP8_SUMS
    assert fp8_sums_bound(1024, torch.bfloat16) > fp8_sums_bound(1024)
    assert layer_bound("triton", "none", torch.float32, 1 << 20) < 1e-4


@pytest.mark.parametrize("activation", ("silu", "relu2"))
@pytest.mark.parametrize(("rows", "inter"), ((1, 64), (4, 256), (20, 256), (16, 1024)))
def test_codes_that_sums_of_13_bits_move_stay_within(rows: int, inter: int, activation: str) -> None:
    """The model behind the form: gate and up 3e-4 off, codes of e4m3 under a scale a row; GEMM2 keeps relative norms.

    Its largest errors times sqrt(n) are 0.4 to 0.9 beyond 4e-3: neither far within the bound nor beyond it.
    """
    g = torch.Generator().manual_seed(0)
    trials = max(20, (1 << 21) // (rows * inter))
    gate, up = torch.randn(2, trials, rows, inter, generator=g)
    off = [x + 3e-4 * torch.randn(x.shape, generator=g) for x in (gate, up)]

    def codes(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.silu(gate) * up if activation == "silu" else up.relu().square()
        scale = h.abs().amax(-1, keepdim=True) / 448
        return ((h / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)

    right = codes(gate, up)
    errors = (codes(*off) - right).norm(dim=1) / right.norm(dim=1)
    assert 0.15 < errors.max() / fp8_sums_bound(rows * inter) < 1


def test_the_page_states_the_bound() -> None:
    text = " ".join((ROOT / "docs" / "numerics.md").read_text().split())
    assert f"`{FP8_SUMS:.0e} + {MOVED_CODE['fp8']} / sqrt(n)`".replace("e-0", "e-") in text
    for n, said in ((4 * 256, "6.9e-2"), (64 * 8 * 2048, "8.0e-3")):
        assert f"{fp8_sums_bound(n):.1e}".replace("e-0", "e-") == said and said in text


def test_what_was_measured_lies_within() -> None:
    if not MEASURED.exists():
        pytest.skip("scripts/measure_bounds.py has not been run on a GPU")
    lines = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    assert {line["backend"] for line in lines} >= set(FP8_SUM_BACKENDS)
    for line in lines:
        dtype, row = getattr(torch, line["dtype"]), line["top_k"] * line["inter"]
        for name, values in (("worst", line["tokens"] * row), ("worst_row", row)):
            assert line[name] < layer_bound(line["backend"], line["act_format"], dtype, values), (name, line)


def test_a_fit_holds_for_what_it_was_made_of() -> None:
    measure = load("scripts/measure_bounds.py")
    kind = {"backend": "triton_fp8", "scheme": "fp8", "act_format": "fp8", "dtype": "float32", "top_k": 4}
    lines = [
        kind | {"inter": inter, "tokens": tokens, "worst": 3e-3 + 0.7 * (4 * inter * tokens) ** -0.5, "worst_row": 0.02}
        for inter, tokens in ((64, 1), (256, 5), (2048, 64), (4096, 64))
    ]
    (fit,) = measure.fits(lines)
    for line in lines:
        n = 4 * line["inter"] * line["tokens"]
        assert line["worst"] <= fit["worst_many"] + (fit["worst_excess"] + 1e-3) * n**-0.5
    assert 0.5 < fit["worst_excess"] < 0.75 and len(measure.jobs(measure.APPROXIMATE)) > 100
