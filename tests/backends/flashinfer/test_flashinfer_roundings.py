"""What the kernels round besides what the numerics contract rounds: said by explain(), and bounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import package

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
import flashinfer_cutlass_cases as cutlass
import flashinfer_trtllm_cases as trtllm
from flashinfer_problems import CUTLASS, TRTLLM
from flashinfer_problems import NVFP4 as PROBLEM
from flashinfer_sim import experts, seam
from tolerances import relative_l2

OUTPUT = "rounds what the second GEMM gives to bfloat16 before the sum over experts"
BLOCKS = "rounds what the first GEMM gives to e4m3, in groups of 128, before the activation"
ROWS = "rounds the intermediate to bfloat16 before it is quantized per token"
WEIGHTS = "rounds routing weights to bfloat16"


# Relative L2 against the oracle, as docs/flashinfer.md states it: of schemes, or of schemes with a scale per token.
TRTLLM_BOUNDS = {"fp8_block": 7e-2, "nvfp4 per token": 6e-2, "fp8 per token": 4e-2}
TRTLLM_BOUND = 5e-3  # of all others
CUTLASS_BOUNDS = {"none": 8e-3, "fp8": 1.5e-2, "fp8_block": 2.5e-2, "nvfp4": 6e-2, "mxfp4": 2.5e-2, "mxfp8": 1.5e-2}


def trtllm_bound(case: Case) -> float:
    per_token = case.act_format in ("nvfp4", "fp8") and case.input_scale == "none" and case.scheme != "fp8_block"
    return TRTLLM_BOUNDS.get(case.scheme + " per token" * per_token, TRTLLM_BOUND)


def both(case: Case, layers: Iterable[moe.PreparedWeights]) -> Iterator[float]:
    """Relative L2 of a routed and of a monolithic call."""
    w, oracle = layers
    x, ids, weights = make_batch(case)
    yield relative_l2(*(moe.fused_moe_routed(x, ids, weights, layer) for layer in (w, oracle)))
    logits, routing = torch.randn(case.tokens, case.experts), moe.Routing("renormalize", case.top_k)
    yield relative_l2(*(moe.fused_moe(x, logits, layer, routing=routing) for layer in (w, oracle)))


@pytest.fixture
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated kernels round as the real ones do."""
    monkeypatch.setattr(experts, "ROUNDS", True)


@pytest.mark.usefixtures("_rounding")
@pytest.mark.parametrize("name", trtllm.CASES)
def test_trtllm_keeps_within_the_stated_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seam.allow_cpu(monkeypatch, TRTLLM)
    seam.install(monkeypatch)
    case = dataclasses.replace(trtllm.CASES[name], tokens=17)
    found = list(both(case, trtllm.layers(case)))
    bound = trtllm_bound(case)
    assert bound / 20 < min(found) and max(found) < bound


@pytest.mark.usefixtures("_rounding")
@pytest.mark.parametrize("name", cutlass.CASES)
def test_cutlass_keeps_within_the_stated_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, case = cutlass.CASES[name]
    cutlass.use(monkeypatch, capability)
    case, raw = dataclasses.replace(case, tokens=17), cutlass.raw_of(case)
    if "flashinfer" in "; ".join(moe.explain(raw, act_format=case.act_format).against[CUTLASS]):
        pytest.skip("this release lacks it")
    prepared = [moe.prepare(raw, act_format=case.act_format, backend=b) for b in (CUTLASS, "reference")]
    found = list(both(case, prepared))
    bound = CUTLASS_BOUNDS[case.scheme]
    assert bound / 20 < min(found) and max(found) < bound


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({}, (OUTPUT, f"{WEIGHTS} where the kernel routes")),
        ({"scheme": "fp8_block", "act_format": "fp8", "input_scale": "none"}, (BLOCKS, OUTPUT)),
        ({"input_scale": "none"}, (ROWS, OUTPUT)),
        ({"scheme": "fp8", "act_format": "fp8", "input_scale": "none"}, (ROWS, OUTPUT, WEIGHTS)),
        ({"scheme": "mxint4", "act_format": "none", "input_scale": "none"}, (OUTPUT, WEIGHTS)),
        ({"scheme": "none", "act_format": "none", "input_scale": "none"}, (OUTPUT,)),
    ],
)
def test_explain_says_what_is_rounded(change: dict[str, Any], texts: tuple[str, ...]) -> None:
    notes = moe.explain(dataclasses.replace(PROBLEM, **change)).notes[TRTLLM]
    assert [text for text in (BLOCKS, ROWS, OUTPUT) if text in notes] == [t for t in texts if WEIGHTS not in t]
    # Routed functions that take ids and weights apart keep float32; those that take them packed do not.
    packed = change.get("scheme") in ("mxint4", "fp8") or not package.entry("trtllm_bf16_routed_moe").accepts_pairs
    assert notes.endswith(WEIGHTS if packed else f"{WEIGHTS} where the kernel routes")


def test_explain_says_nothing_of_weights_that_are_on_the_input() -> None:
    problem = dataclasses.replace(PROBLEM, router_weight_on_input=True)
    assert WEIGHTS not in moe.explain(problem).notes[TRTLLM]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element off an address that 16 divides."""
    storage = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    start = next(i for i in range(16) if storage[i:].data_ptr() % 16 == tensor.element_size())
    return storage[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("backend", [TRTLLM, CUTLASS])
@pytest.mark.parametrize("packed", [False, True])
def test_tensors_that_kernels_cannot_access_are_copied(
    packed: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated launchers refuse hidden states and outputs at addresses that 16 does not divide."""
    seam.allow_cpu(monkeypatch, backend)
    seam.install(monkeypatch)
    seam.install_cutlass(monkeypatch, (10, 0))
    case = trtllm.NVFP4 if packed else dataclasses.replace(trtllm.BASE, scheme="none")
    w = moe.prepare(make_raw(case), act_format=case.act_format, backend=backend)
    x, ids, weights = make_batch(case)
    scale: dict[str, torch.Tensor] = {}
    if packed:
        x, block = moe.quantize_nvfp4(x, w.a1_gscale)
        scale = {"hidden_states_scale": block}
    plain = moe.fused_moe_routed(x, ids, weights, w, **scale)
    out = misaligned(torch.full_like(plain, 7.0))
    assert moe.fused_moe_routed(misaligned(x), ids, weights, w, out=out, **scale) is out
    assert torch.equal(out, plain)
