"""The contract tests can fail: each mutant of the adapter is noticed, by an assertion or by a wrong result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Case, make_batch
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import layout, matrices, package, routing, rows, trtllm_operands

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_sim import seam
from flashinfer_trtllm_cases import CASES, NAME, NVFP4, layers, raw_of
from tolerances import relative_l2

Patch = Callable[[pytest.MonkeyPatch], None]
CLEAR = 0.02  # a mutant's relative L2; results of the unchanged adapter stay below 5e-3


def replace(module: Any, name: str, value: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(module, name, value)


def identity(rows_: int, *_: Any) -> Tensor:
    return torch.arange(rows_)


def padded_behind_both_halves(matrix: Tensor, halves: int, rows_: int, cols: int) -> Tensor:
    padded = matrix.new_zeros(rows_, cols)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def unmasked(ids: Tensor, weights: Tensor) -> Tensor:
    return (ids << 16) | weights.to(torch.bfloat16).view(torch.int16).to(torch.int32)


def swapped_scalars(alpha: Tensor, gscale: Tensor | None, gated: bool) -> tuple[Tensor, Tensor]:
    return SCALARS(alpha.flip(1) if alpha.ndim == 2 else alpha, gscale, gated)


def unscaled(alpha: Tensor, gscale: Tensor | None, gated: bool) -> tuple[Tensor, Tensor]:
    return alpha.contiguous(), alpha.contiguous()


def real_units(name: str) -> Callable[..., dict[str, Tensor | None]]:
    """One constant as if the accumulators were in real units."""
    return lambda call, units=None: CONSTANTS(call, units) | {name: CONSTANTS(call, None)[name]}


def swapped_halves_of_rows(scale: Tensor, weight: Tensor) -> Tensor:
    return PER_ROW(scale.flip(1) if scale.ndim == 2 else scale, weight)


SCALARS, CONSTANTS, PER_ROW = trtllm_operands._scalars, trtllm_operands.constant_tensors, trtllm_operands._per_row


def shifted(enum: str, by: int) -> Patch:
    """Numbers of an enum as another release counts them."""
    real = package.number

    def number(name: str, member: str) -> int:
        return real(name, member) + (by if name == enum else 0)

    return replace(package, "number", number)


def as_old_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        package.Entry, "accepts_pairs", property(lambda self: False, lambda self, value: None), raising=False
    )
    package.entry.cache_clear()


def unmasked_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    as_old_release(monkeypatch)
    monkeypatch.setattr(routing, "pack", unmasked)


PADDED = dataclasses.replace(NVFP4, inter=176)
STEP = dataclasses.replace(NVFP4, activation="swiglustep")
HALVES, BIAS = CASES["nvfp4 half alphas"], CASES["mxfp4 gpt-oss"]

MUTANTS: dict[str, tuple[Case, Patch]] = {
    "halves not swapped": (NVFP4, replace(rows, "swap_halves", identity)),
    "halves not interleaved": (NVFP4, replace(rows, "interleave_halves", identity)),
    "rows not shuffled": (NVFP4, replace(rows, "shuffle_blocks", identity)),
    "shuffle of the other tile": (
        NVFP4,
        replace(rows, "shuffle_blocks", lambda n, block, real=rows.shuffle_blocks: real(n, 48 - block)),
    ),
    "shuffle of the other tile, fp8_block": (
        CASES["fp8_block"],
        replace(rows, "shuffle_blocks", lambda n, block, real=rows.shuffle_blocks: real(n, 48 - block)),
    ),
    "scales not tiled": (NVFP4, replace(matrices, "tile_scales", lambda linear, out: out.copy_(linear))),
    "scales not tiled, e8m0": (CASES["mxfp4"], replace(matrices, "tile_scales", lambda linear, out: out.copy_(linear))),
    "scales not tiled, mxfp8": (
        CASES["mxfp8"],
        replace(matrices, "tile_scales", lambda linear, out: out.copy_(linear)),
    ),
    "constants left out, mxfp8": (CASES["mxfp8 gpt-oss"], replace(trtllm_operands, "_given", lambda tensors: {})),
    "scales not permuted": (
        NVFP4,
        replace(
            matrices,
            "arrange_scales",
            lambda s, out, order, halves, real=matrices.arrange_scales: real(s, out, order.sort().values, halves),
        ),
    ),
    "padding behind both halves": (PADDED, replace(matrices, "pad_matrix", padded_behind_both_halves)),
    "alphas of the other half": (HALVES, replace(trtllm_operands, "_scalars", swapped_scalars)),
    "no requantization factor": (NVFP4, replace(trtllm_operands, "_scalars", unscaled)),
    "one factor where nothing is gated": (
        CASES["nvfp4 relu2"],
        replace(trtllm_operands, "_scalars", lambda a, g, gated, real=trtllm_operands._scalars: real(a, g, True)),
    ),
    "biases in real units": (
        CASES["nvfp4 bias"],
        replace(trtllm_operands, "_bias_before_scaling", lambda bias, *_: bias),
    ),
    "biases not permuted": (BIAS, replace(layout.LayerLayout, "_bias_order", lambda self, n, halves: torch.arange(n))),
    "limit in real units": (STEP, replace(trtllm_operands, "constant_tensors", real_units("gemm1_clamp_limit"))),
    "limit in real units, fp8": (
        CASES["fp8 swiglustep"],
        replace(trtllm_operands, "constant_tensors", real_units("gemm1_clamp_limit")),
    ),
    "beta in real units": (
        CASES["nvfp4 gpt-oss"],
        replace(trtllm_operands, "constant_tensors", real_units("gemm1_beta")),
    ),
    "constants left out, fp8_block": (
        CASES["fp8_block gpt-oss"],
        replace(trtllm_operands, "_given", lambda tensors: {}),
    ),
    "token scales inverted": (
        CASES["nvfp4 dynamic"],
        replace(torch.Tensor, "reciprocal", lambda self: self.clone()),
    ),
    "scales of rows not permuted": (
        CASES["fp8 channel"],
        replace(
            layout,
            "_arrange_rows",
            lambda s, order, halves, real=layout._arrange_rows: real(s, order.sort()[0], halves),
        ),
    ),
    "scales of the other half's rows": (
        CASES["fp8 dynamic"],
        replace(trtllm_operands, "_per_row", swapped_halves_of_rows),
    ),
    "activation of another release": (NVFP4, shifted("ActivationType", 1)),
    "weight layout of another release": (CASES["none"], shifted("WeightLayout", -1)),
    "nibbles not flipped": (
        CASES["mxint4"],
        replace(torch.Tensor, "bitwise_xor_", lambda self, mask: self),
    ),
    "packed ids not masked": (NVFP4, unmasked_packing),
    "foreign ids passed on as they are": (
        dataclasses.replace(NVFP4, foreign=True),
        lambda monkeypatch: (
            as_old_release(monkeypatch),
            monkeypatch.setattr(torch.Tensor, "masked_fill", lambda self, mask, value: self),
        )[0],
    ),
}


def signed_batch(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Every third routing weight is negative."""
    x, ids, weights = make_batch(case)
    return x, ids, torch.where(torch.arange(weights.numel()).view_as(weights) % 3 == 0, -weights, weights)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, patch = MUTANTS[name]
    seam.allow_cpu(monkeypatch, NAME)
    seam.install(monkeypatch)
    w, oracle = layers(case)
    raw, batch = raw_of(case), signed_batch(case)
    expected = moe.fused_moe_routed(*batch, oracle)
    assert relative_l2(moe.fused_moe_routed(*batch, w), expected) < 5e-3
    patch(monkeypatch)  # what is compared with is not the mutant's
    try:
        mutant = moe.prepare(raw, act_format=case.act_format, backend=NAME)
        found = relative_l2(moe.fused_moe_routed(*batch, mutant), expected)
    except AssertionError:
        return  # the simulated launcher refused
    else:
        assert not found < CLEAR, f"unnoticed: relative L2 {found:.1e}"
    finally:
        package.forget()


def test_packing_survives_negative_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart of a mutant: masked packing of the same weights is right."""
    seam.allow_cpu(monkeypatch, "flashinfer_trtllm")
    seam.install(monkeypatch)
    as_old_release(monkeypatch)
    try:
        case = dataclasses.replace(NVFP4, foreign=True)
        batch = signed_batch(case)
        got, expected = (moe.fused_moe_routed(*batch, w) for w in layers(case))
        assert relative_l2(got, expected) < 5e-3
    finally:
        package.forget()
