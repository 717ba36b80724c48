"""FLASHINFER_NVFP4_4OVER6 changes how FlashInfer quantizes intermediates; layers compute what they say all the same."""

from __future__ import annotations

import pytest
from flashinfer_problems import CUTLASS, TRTLLM
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import cutlass_call, package, trtllm_call

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
import flashinfer_cutlass_cases
import flashinfer_trtllm_cases
from flashinfer_sim import cpp, seam
from tolerances import relative_l2

FUNCTIONS = {TRTLLM: trtllm_call.function_name("nvfp4", True), CUTLASS: cutlass_call.FUNCTION}


@pytest.fixture(name="case")
def _case(backend: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A layer whose intermediates a backend's kernels quantize to NVFP4, where the environment asks for 4 over 6."""
    monkeypatch.setenv(package.FOUR_OVER_SIX, "1")
    if backend == CUTLASS:
        flashinfer_cutlass_cases.use(monkeypatch, flashinfer_cutlass_cases.BLACKWELL)
        return flashinfer_cutlass_cases.NVFP4
    if "per_token_scale" not in package.entry(FUNCTIONS[TRTLLM]).parameters:
        pytest.skip("this release does not quantize to NVFP4 per token")
    seam.allow_cpu(monkeypatch, TRTLLM)
    seam.install(monkeypatch)
    return flashinfer_trtllm_cases.CASES["nvfp4 dynamic"]


def reads_the_environment() -> bool:
    return package.FOUR_OVER_SIX in cpp.source(cpp.ENVIRONMENT)


def takes_the_rule(backend: str) -> bool:
    return "nvfp4_4over6" in package.entry(FUNCTIONS[backend]).parameters


@pytest.mark.parametrize("backend", FUNCTIONS)
def test_the_usual_rule_is_asked_for_or_the_release_is_refused(backend: str, case: Case) -> None:
    raw = make_raw(case)
    why = "; ".join(moe.explain(raw, act_format="nvfp4").against[backend])
    if reads_the_environment() and not takes_the_rule(backend):
        assert f"FLASHINFER_NVFP4_4OVER6 must not be 1: {FUNCTIONS[backend]} of flashinfer" in why
        with pytest.raises(ValueError, match="FLASHINFER_NVFP4_4OVER6 must not be 1"):
            moe.prepare(raw, act_format="nvfp4", backend=backend)
        return
    assert "4OVER6" not in why
    w, oracle = (moe.prepare(raw, act_format="nvfp4", backend=b) for b in (backend, "reference"))
    batch = make_batch(case)
    got, expected = moe.fused_moe_routed(*batch, w), moe.fused_moe_routed(*batch, oracle)  # the simulator looks
    assert relative_l2(got, expected) < 5e-3


@pytest.mark.parametrize("backend", FUNCTIONS)
def test_without_it_no_release_is_refused(backend: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(package.FOUR_OVER_SIX, "true")  # only 1 counts
    assert "4OVER6" not in "; ".join(moe.explain(make_raw(case), act_format="nvfp4").against[backend])


def test_the_release_that_reads_it_first() -> None:
    installed = package.parse_version(str(package.installed_version()))
    assert reads_the_environment() == (installed >= package.parse_version(package.FOUR_OVER_SIX_SINCE))


@pytest.mark.parametrize("backend", FUNCTIONS)
def test_the_simulator_would_notice(backend: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that leaves the rule to the environment."""
    if not takes_the_rule(backend):
        pytest.skip("this release takes no rule")
    w = moe.prepare(make_raw(case), act_format="nvfp4", backend=backend)
    monkeypatch.setattr(package, "USUAL_NVFP4", {})
    with pytest.raises(AssertionError, match="4OVER6"):
        moe.fused_moe_routed(*make_batch(case), w)
