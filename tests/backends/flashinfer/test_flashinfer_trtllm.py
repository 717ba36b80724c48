"""`flashinfer_trtllm` against the oracle: FlashInfer's own front on a CPU, a simulator of the module behind it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS

flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_sim import seam  # noqa: E402
from flashinfer_trtllm_cases import BASE, CASES, NAME, NVFP4, layers, raw_of  # noqa: E402
from tolerances import relative_l2  # noqa: E402

TOLERANCE = 5e-3  # relative L2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seam.allow_cpu(monkeypatch, NAME)
    return seam.install(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_routed(name: str, calls: list[str]) -> None:
    case = CASES[name]
    w, oracle = layers(case)
    x, ids, weights = make_batch(case)
    got, expected = moe.fused_moe_routed(x, ids, weights, w), moe.fused_moe_routed(x, ids, weights, oracle)
    assert [c for c in calls if c.endswith("_moe")], calls
    assert relative_l2(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_monolithic(name: str, calls: list[str]) -> None:
    case = CASES[name]
    w, oracle = layers(case)
    x, _, _ = make_batch(case)
    logits, routing = torch.randn(case.tokens, case.experts), moe.Routing("renormalize", case.top_k)
    got = moe.fused_moe(x, logits, w, routing=routing)
    assert relative_l2(got, moe.fused_moe(x, logits, oracle, routing=routing)) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_restore_inverts_prepare(name: str, calls: list[str]) -> None:
    w, _ = layers(CASES[name])
    assert moe.restore(w).equal(raw_of(CASES[name]))


def test_backend_is_registered_before_the_others() -> None:
    assert list(BACKENDS).index(NAME) == 0


def test_calls_that_the_kernels_cannot_serve_say_why(calls: list[str]) -> None:
    """Requirements look at problems; these are calls with prepared weights."""
    batch = make_batch(NVFP4)
    w, _ = layers(NVFP4)
    with pytest.raises(RuntimeError, match="a2_gscale must be given: backend flashinfer_trtllm takes calibrated"):
        moe.fused_moe_routed(*batch, dataclasses.replace(w, a2_gscale=None))
    with pytest.raises(RuntimeError, match=r"a1_gscale must have shape \(\): one calibrated scale for all experts"):
        moe.fused_moe_routed(*batch, dataclasses.replace(w, a1_gscale=torch.ones(8)))
    mx, _ = layers(CASES["mxfp4"])
    with pytest.raises(
        RuntimeError, match=r"hidden_states must have one of the dtypes .*bfloat16.*, got torch.float16"
    ):
        moe.fused_moe_routed(batch[0].half(), *batch[1:], mx)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("nvfp4 dynamic", {"swiglu_limit": 7.0}, "swiglu_limit must be inf for backend .* before or after it, got 7.0"),
        ("nvfp4 dynamic", {"w13_bias": True}, "w13_bias must be None for backend .* before or after biases, got"),
        ("nvfp4 dynamic", {"w2_bias": True}, "w2_bias must be None for backend .* before or after biases, got"),
        ("fp8 channel", {"swiglu_limit": 7.0}, "swiglu_limit must be inf .* with a scale per token take no constants"),
        ("fp8 channel", {"w2_bias": True}, "w2_bias must be None .* kernels of fp8 weights take none"),
        ("fp8_block", {"w13_bias": True}, "w13_bias must be None .* kernels of fp8_block weights take none"),
        ("mxfp8", {"w2_bias": True}, "w2_bias must be None .* kernels of mxfp8 weights take none"),
        ("mxint4", {"w13_bias": True}, "w13_bias must be None .* kernels of mxint4 weights take none"),
        ("none", {"w2_bias": True}, "w2_bias must be None .* kernels of none weights take none"),
    ],
)
@pytest.mark.parametrize("monolithic", [False, True])
def test_what_kernels_cannot_be_told_is_refused_at_the_call(
    monolithic: bool, name: str, change: dict[str, object], text: str, calls: list[str]
) -> None:
    """Of prepared weights that were changed, or of an op called by hand: nothing is left out in silence."""
    case = CASES[name]
    w, _ = layers(case)
    rows = {"w13_bias": w.w13.shape[-2], "w2_bias": w.w2.shape[-2]}
    biases = {n: torch.zeros(case.experts, rows[n]) for n, value in change.items() if value is True}
    changed = dataclasses.replace(w, **{**change, **biases})
    x, ids, weights = make_batch(case)
    with pytest.raises(RuntimeError, match=text):
        if monolithic:
            logits = torch.zeros(case.tokens, case.experts)
            moe.fused_moe(x, logits, changed, routing=moe.Routing("renormalize", case.top_k))
        else:
            moe.fused_moe_routed(x, ids, weights, changed)


def test_packed_fp8_is_refused_per_tensor_and_taken_per_block(calls: list[str]) -> None:
    block, oracle = layers(CASES["fp8_block"])
    x, ids, weights = make_batch(CASES["fp8_block"])
    codes, scale = torch.ops.moeq.quantize_fp8(x, None, 128)
    got, expected = (moe.fused_moe_routed(codes, ids, weights, w, hidden_states_scale=scale) for w in (block, oracle))
    assert relative_l2(got, expected) < TOLERANCE
    w, _ = layers(CASES["fp8"])
    x, ids, weights = make_batch(CASES["fp8"])
    codes, scale = torch.ops.moeq.quantize_fp8(x)
    with pytest.raises(RuntimeError, match="hidden_states must be unquantized for flashinfer_trtllm"):
        moe.fused_moe_routed(codes, ids, weights, w, hidden_states_scale=scale)


def test_int8_weights_are_refused_at_the_call(calls: list[str]) -> None:
    raw = make_raw(dataclasses.replace(BASE, scheme="int8"))
    w = dataclasses.replace(moe.prepare(raw, backend="reference"), backend=NAME)
    with pytest.raises(RuntimeError, match="backend must be one that runs int8 weights, got 'flashinfer_trtllm'"):
        moe.fused_moe_routed(*make_batch(BASE), w)
