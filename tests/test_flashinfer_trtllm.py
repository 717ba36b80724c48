"""`flashinfer_trtllm` against the oracle: FlashInfer's own front on a CPU, a simulator of the module behind it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import Case, make_batch, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS

flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_sim import seam  # noqa: E402

NAME = "flashinfer_trtllm"
TOLERANCE = 5e-3  # relative L2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seam.allow_cpu(monkeypatch, NAME)
    return seam.install(monkeypatch)


def reason(raw: moe.RawWeights, act_format: str) -> str:
    against = moe.explain(raw, act_format=act_format).against[NAME]
    return "; ".join(against)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@dataclasses.dataclass(frozen=True)
class ChannelCase(Case):
    """fp8 weights with one scale a row, as quantize_experts makes them."""


BASE = Case(tokens=5, experts=8, top_k=2, hidden=256, inter=128)
NVFP4 = dataclasses.replace(BASE, act_format="nvfp4", input_scale="tensor")
CHANNEL = ChannelCase(scheme="fp8", act_format="fp8", tokens=5, experts=8, top_k=2, hidden=136, inter=144, foreign=True)
CASES = {
    "nvfp4": NVFP4,
    "nvfp4 half alphas": dataclasses.replace(NVFP4, per_half=True, bias=True),
    "nvfp4 bias": dataclasses.replace(NVFP4, bias=True, hidden=144, inter=176),
    "nvfp4 relu2": dataclasses.replace(NVFP4, activation="relu2_no_mul", inter=176, bias=True),
    "nvfp4 gelu": dataclasses.replace(NVFP4, activation="gelu"),
    "nvfp4 identity": dataclasses.replace(NVFP4, activation="identity_no_mul"),
    "nvfp4 gpt-oss": dataclasses.replace(NVFP4, activation="swigluoai", bias=True, inter=176),
    "nvfp4 dynamic": dataclasses.replace(NVFP4, input_scale="none"),
    "nvfp4 dynamic half alphas": dataclasses.replace(NVFP4, input_scale="none", per_half=True, inter=176),
    "nvfp4 dynamic relu2": dataclasses.replace(NVFP4, input_scale="none", activation="relu2_no_mul", hidden=272),
    "nvfp4 swiglustep": dataclasses.replace(NVFP4, activation="swiglustep"),
    "nvfp4 padded": dataclasses.replace(NVFP4, hidden=272, inter=144, foreign=True, dtype=torch.float16),
    "mxfp4": dataclasses.replace(BASE, scheme="mxfp4"),
    "mxfp4 gpt-oss": dataclasses.replace(BASE, scheme="mxfp4", activation="swigluoai", bias=True, hidden=96, inter=160),
    "mxfp4 mxfp8": dataclasses.replace(BASE, scheme="mxfp4", act_format="mxfp8", bias=True, inter=96),
    "mxfp4 mxfp8 gelu": dataclasses.replace(BASE, scheme="mxfp4", act_format="mxfp8", activation="gelu"),
    "mxfp4 mxfp8 relu2": dataclasses.replace(
        BASE, scheme="mxfp4", act_format="mxfp8", activation="relu2_no_mul", inter=96, bias=True
    ),
    "mxfp8": dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", inter=96, hidden=288),
    "mxfp8 gpt-oss": dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", activation="swigluoai"),
    "mxfp8 swiglustep": dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", activation="swiglustep"),
    "mxfp8 relu2": dataclasses.replace(BASE, scheme="mxfp8", act_format="mxfp8", activation="relu2_no_mul"),
    "mxint4": dataclasses.replace(BASE, scheme="mxint4", inter=256, foreign=True),
    "mxint4 padded": dataclasses.replace(BASE, scheme="mxint4", hidden=160, inter=96),
    "fp8": dataclasses.replace(BASE, scheme="fp8", act_format="fp8", input_scale="tensor", hidden=136, inter=144),
    "fp8 relu2": dataclasses.replace(
        BASE, scheme="fp8", act_format="fp8", input_scale="tensor", activation="relu2_no_mul"
    ),
    "fp8 swiglustep": dataclasses.replace(
        BASE, scheme="fp8", act_format="fp8", input_scale="tensor", activation="swiglustep", hidden=136
    ),
    "fp8 dynamic": dataclasses.replace(BASE, scheme="fp8", act_format="fp8", hidden=136, inter=144),
    "fp8 channel": CHANNEL,
    "fp8 channel relu2": dataclasses.replace(CHANNEL, activation="relu2_no_mul"),
    "fp8_block gpt-oss": dataclasses.replace(
        BASE, scheme="fp8_block", act_format="fp8", activation="swigluoai", hidden=384, inter=256
    ),
    "fp8_block": dataclasses.replace(BASE, scheme="fp8_block", act_format="fp8", hidden=384, inter=256),
    "fp8_block padded": dataclasses.replace(BASE, scheme="fp8_block", act_format="fp8", hidden=136, inter=152),
    "none": dataclasses.replace(BASE, scheme="none"),
    "none gpt-oss": dataclasses.replace(BASE, scheme="none", activation="swigluoai", hidden=144, inter=72),
    "none swiglustep": dataclasses.replace(BASE, scheme="none", activation="swiglustep", inter=72),
    "none relu2": dataclasses.replace(BASE, scheme="none", activation="relu2_no_mul", foreign=True),
}


def raw_of(case: Case) -> moe.RawWeights:
    """quantize_experts gives fp8 weights one scale a row; here most have one a matrix or half."""
    raw = make_raw(case)
    if case.scheme != "fp8" or isinstance(case, ChannelCase):
        return raw
    fields: dict[str, torch.Tensor] = {}
    halves = 1 if case.activation == "swiglustep" or not raw.is_gated else 2
    for name, dense, parts in zip(("w13", "w2"), moe.dequantize_experts(raw), (halves, 1), strict=True):
        wide = dense.float().unflatten(1, (parts, -1))
        scale = wide.abs().amax((2, 3)) / 448
        fields[name] = (wide / scale[..., None, None]).flatten(1, 2).to(torch.float8_e4m3fn)
        fields[f"{name}_scale"] = scale
    return dataclasses.replace(raw, **fields)


def layers(case: Case) -> tuple[moe.PreparedWeights, moe.PreparedWeights]:
    raw = raw_of(case)
    why = reason(raw, case.act_format)
    if "flashinfer must have" in why or "which flashinfer" in why or "needs flashinfer-python" in why:
        pytest.skip(why)
    return tuple(moe.prepare(raw, act_format=case.act_format, backend=b) for b in (NAME, "reference"))


@pytest.mark.parametrize("name", CASES)
def test_routed(name: str, calls: list[str]) -> None:
    case = CASES[name]
    w, oracle = layers(case)
    x, ids, weights = make_batch(case)
    got, expected = moe.fused_moe_routed(x, ids, weights, w), moe.fused_moe_routed(x, ids, weights, oracle)
    assert [c for c in calls if c.endswith("_moe")], calls
    assert error(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_monolithic(name: str, calls: list[str]) -> None:
    case = CASES[name]
    w, oracle = layers(case)
    x, _, _ = make_batch(case)
    logits, routing = torch.randn(case.tokens, case.experts), moe.Routing("renormalize", case.top_k)
    got = moe.fused_moe(x, logits, w, routing=routing)
    assert error(got, moe.fused_moe(x, logits, oracle, routing=routing)) < TOLERANCE


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
    assert error(got, expected) < TOLERANCE
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
