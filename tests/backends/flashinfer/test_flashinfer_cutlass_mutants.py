"""The contract tests of the CUTLASS backend can fail as well: each mutant of the adapter is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Case, make_batch

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import cutlass_call, matrices, package, rows

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_cutlass_cases import CASES, NAME, raw_of
from flashinfer_sim import seam
from tolerances import relative_l2

Patch = Callable[[pytest.MonkeyPatch], None]
CLEAR = 0.02  # a mutant's relative L2; results of the unchanged adapter stay below 5e-3


def replace(module: Any, name: str, value: Any) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(module, name, value)


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation numbers as another release counts them."""
    real = package.number
    monkeypatch.setattr(package, "number", lambda name, member: real(name, member) + (name == "ActivationType"))


def changed(name: str, change: Callable[[Any], Any]) -> Patch:
    """The operands of a scheme, one of them changed. name: a field, or quant_scales and the position in it."""
    field, _, position = name.partition(" ")

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for scheme, real in list(cutlass_call.FAMILIES.items()):

            def mutant(call: Any, x: Any, real: Any = real) -> Any:
                operands = real(call, x)
                value = getattr(operands, field)
                if position:
                    value = [change(v) if i == int(position) else v for i, v in enumerate(value)]
                return operands._replace(**{field: value if position else change(value)})

            monkeypatch.setitem(cutlass_call.FAMILIES, scheme, mutant)

    return patch


MUTANTS: dict[str, tuple[str, Patch]] = {
    "halves not swapped": ("bf16", replace(rows, "swap_halves", torch.arange)),
    "halves not swapped, nvfp4": ("nvfp4", replace(rows, "swap_halves", torch.arange)),
    "scales not tiled": ("nvfp4", replace(matrices, "tile_scales", lambda linear, out: out.copy_(linear))),
    "scales of activations not tiled": ("nvfp4", changed("hidden_scale", lambda s: s.view(-1, 4).flip(0).view_as(s))),
    "weight scales of the other GEMM": ("fp8_block", changed("quant_scales 0", lambda s: s.flip(1))),
    "input scale not inverted": ("fp8", changed("quant_scales 0", lambda s: s * 2)),
    "intermediate's scale inverted": ("fp8", changed("quant_scales 1", lambda s: s.reciprocal())),
    "alphas of the other GEMM": ("nvfp4", changed("quant_scales 2", lambda s: s.flip(0))),
    "activation of another release": ("bf16", shifted),
    "no biases": ("fp8 bias", replace(cutlass_call, "_biases", lambda call, dtype: {})),
    "biases in the order of the checkpoint": (
        "bf16 bias",
        replace(cutlass_call, "_bias", lambda b, w, d, real=cutlass_call._bias: real(b, w, d).roll(w.shape[1] // 2, 1)),
    ),
    "constants of situ exchanged": (
        "bf16 situ",
        replace(
            cutlass_call,
            "_activation",
            lambda call, real=cutlass_call._activation: real(
                call._replace(swiglu_alpha=call.swiglu_beta, swiglu_beta=call.swiglu_alpha)
            ),
        ),
    ),
    "constants left out": (
        "nvfp4 gpt-oss",
        replace(
            cutlass_call,
            "_activation",
            lambda call, real=cutlass_call._activation: {"activation_type": real(call)["activation_type"]},
        ),
    ),
    "foreign ids passed on as they are": (
        "nvfp4 padded",
        replace(cutlass_call, "_known_ids", lambda ids, total: ids.clamp(0, total - 1)),
    ),
    "the wrong rank": ("bf16", replace(cutlass_call, "_expert_parallel", lambda call: ((2, 1), 16))),
}


def outcome(case: Case) -> float:
    raw = raw_of(case)
    w, oracle = (moe.prepare(raw, act_format=case.act_format, backend=b) for b in (NAME, "reference"))
    x, ids, weights = make_batch(case)
    return relative_l2(moe.fused_moe_routed(x, ids, weights, w), moe.fused_moe_routed(x, ids, weights, oracle))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulator_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, patch = MUTANTS[name]
    capability, case = CASES[which]
    case = dataclasses.replace(case, hidden=256, inter=128) if which != "nvfp4 padded" else case
    seam.allow_cpu(monkeypatch, NAME, capability)
    seam.install_cutlass(monkeypatch, capability)
    why = "; ".join(moe.explain(raw_of(case), act_format=case.act_format).against[NAME])
    if "flashinfer must have" in why or "which flashinfer" in why:
        pytest.skip(why)
    assert outcome(case) < 5e-3
    patch(monkeypatch)
    try:
        found = outcome(case)
    except AssertionError:
        return  # the simulated launcher refused
    assert not found < CLEAR, f"unnoticed: relative L2 {found:.1e}"
