"""What explain() says of each FlashInfer backend: requirements with their reasons, and notes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from flashinfer_problems import CUTLASS, NVFP4, TRTLLM, _installed, _version, against  # noqa: F401 (two fixtures)
from paths import ROOT

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, tested
from torch_moe_ops.backends.explain import Explanation
from torch_moe_ops.backends.flashinfer import package

UNKNOWN_ORDER = "no source says whether nvfp4 kernels apply the scale of a token before or after"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"device": "cpu", "capability": None}, "device must be 'cuda', got 'cpu'"),
        ({"capability": (9, 0)}, "compute capability must be one of 10.0, 10.3 for nvfp4 weights, got 9.0"),
        ({"capability": (12, 0)}, "compute capability must be one of 10.0, 10.3 for nvfp4 weights, got 12.0"),
        ({"act_format": "none"}, "act_format must be one of ['nvfp4'] for scheme 'nvfp4', got 'none'"),
        ({"scheme": "int8"}, "scheme must be one of"),
        (
            {"activation": "gelu_tanh"},
            "activation must be one of ['silu', 'swigluoai', 'gelu', 'swiglustep', 'relu2_no_mul",
        ),
        ({"activation": "situ"}, "its first GEMM writes no block scales (flashinfer issue 5053)"),
        (
            {"input_scale": "expert", "num_local_experts": 64},
            "input_scale must be 'tensor' (the largest of all ranks) where 64 of 128 experts are here, got 'expert'",
        ),
        ({"top_k": 33}, "top_k must be at most 32, got 33"),
        ({"num_experts": 4096}, "num_experts must be at most 2048, got 4096"),
        ({"per_half_alphas": True, "constants": (1.0, 0.0, 7.0)}, "gate and up must share a scale where limit = 7.0"),
        ({"scheme": "mxfp4", "act_format": "none", "capability": (10, 3)}, "must be one of 10.0 for mxfp4 weights"),
        ({"scheme": "mxfp4", "act_format": "none", "dtype": torch.float16}, "dtype must be one of ['torch.bfloat16']"),
        ({"scheme": "fp8", "act_format": "fp8", "weight_scales": "channel"}, "weight_scales must be one of"),
        ({"scheme": "fp8", "act_format": "fp8", "constants": (1.0, 0.0, 7.0)}, "clamp for 'swiglustep' only"),
        (
            {"scheme": "fp8", "act_format": "fp8", "constants": (1.0, 0.0, 7.0), "input_scale": "none"},
            "fp8 kernels with a scale per token take none",
        ),
        (
            {"scheme": "mxfp4", "act_format": "none", "activation": "gelu"},
            "activation must be one of ['silu', 'swigluoai'] for scheme 'mxfp4' with act_format 'none', got 'gelu'",
        ),
        ({"scheme": "fp8_block", "act_format": "fp8", "num_experts": 126}, "num_experts must be a multiple of 4"),
        ({"scheme": "fp8_block", "act_format": "fp8", "top_k": 128}, "top_k must be less than num_experts = 128"),
        ({"scheme": "mxint4", "act_format": "none", "has_bias": True}, "has_bias must be False"),
        ({"input_scale": "none", "has_bias": True}, f"has_bias must be False: {UNKNOWN_ORDER} biases, got True"),
        (
            {"input_scale": "none", "constants": (1.0, 0.0, 7.0)},
            f"constants must have beta 0 and limit inf: {UNKNOWN_ORDER} them, got (1.0, 0.0, 7.0)",
        ),
        ({"input_scale": "none", "constants": (1.702, 1.0, math.inf)}, "constants must have beta 0 and limit inf"),
    ],
)
def test_trtllm_requirements(change: dict[str, object], text: str) -> None:
    assert text in against(dataclasses.replace(NVFP4, **change))


@pytest.mark.parametrize("constants", [None, (1.702, 0.0, math.inf)])
def test_nvfp4_with_a_scale_per_token_needs_no_order(constants: object) -> None:
    assert UNKNOWN_ORDER not in against(dataclasses.replace(NVFP4, input_scale="none", constants=constants))
    static = dataclasses.replace(NVFP4, has_bias=True, constants=(1.702, 1.0, 7.0))
    assert UNKNOWN_ORDER not in against(static)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"capability": (9, 0)}, "compute capability must be one of 10.0, 10.3, 11.0, 12.0, 12.1 for nvfp4"),
        ({"scheme": "fp8_block", "act_format": "fp8"}, "compute capability must be one of 9.0 for fp8_block"),
        ({"scheme": "mxfp4", "act_format": "none"}, "act_format must be one of ['mxfp8'] for scheme 'mxfp4'"),
        ({"scheme": "mxfp4", "act_format": "none"}, "kernels for it run on 9.0 alone"),
        ({"per_half_alphas": True}, "per_half_alphas must be False"),
        ({"num_local_experts": 96}, "must be multiples of the 96 local experts"),
        ({"scheme": "fp8", "act_format": "fp8", "weight_scales": "half"}, "weight_scales must be one of ['tensor']"),
        ({"input_scale": "none"}, "the kernels quantize with one static scale a GEMM, got 'none'"),
        ({"activation": "relu2"}, "activation must be one of ['silu', 'swigluoai', 'gelu', 'gelu_tanh', 'swiglustep'"),
    ],
)
def test_cutlass_requirements(change: dict[str, object], text: str) -> None:
    assert text in against(dataclasses.replace(NVFP4, **change), CUTLASS)


@pytest.mark.parametrize(
    ("release", "change", "text"),
    [
        ("0.6.12", {"constants": (1.0, 0.0, 7.0)}, "constants (1.0, 0.0, 7.0) for nvfp4 weights needs"),
        ("0.6.13", {"constants": (1.0, 0.0, 7.0)}, None),
        ("0.6.15", {"scheme": "fp8_block", "act_format": "fp8", "constants": (1.0, 0.0, 7.0)}, "0.6.18 or newer"),
        ("0.6.18", {"scheme": "fp8_block", "act_format": "fp8", "constants": (1.0, 0.0, 7.0)}, None),
    ],
)
def test_constants_that_earlier_kernels_ignored(
    release: str, change: dict[str, object], text: str | None, version: object
) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    version(release)  # type: ignore[operator]
    found = "; ".join(r for r in moe.explain(dataclasses.replace(NVFP4, **change)).against[TRTLLM] if "or newer" in r)
    assert found == "" if text is None else text in found


def test_arguments_that_a_release_lacks_are_reasons(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = package.entry

    def without(name: str) -> package.Entry:
        found = package.Entry(name)
        found.parameters = real(name).parameters - {"per_token_scale", "situ_beta"}
        return found

    monkeypatch.setattr(package, "entry", without)
    dynamic, situ = dataclasses.replace(NVFP4, input_scale="none"), dataclasses.replace(NVFP4, activation="situ")
    assert "input_scale 'none' needs trtllm_fp4_block_scale_routed_moe(per_token_scale=...)" in against(dynamic)
    if package.has_member("ActivationType", "Situ"):
        assert "activation 'situ' needs cutlass_fused_moe(situ_beta=...)" in against(situ, CUTLASS)


def test_a_release_newer_than_those_of_the_contract_tests_is_named(version: object) -> None:
    newest = package.NEWEST
    for text, said in ((newest, False), (f"{newest}.post1", True), ("9.0", True)):
        version(text)  # type: ignore[operator]
        for backend in (TRTLLM, CUTLASS):
            notes = BACKENDS[backend].notes(dataclasses.replace(NVFP4, device="cpu"))
            assert (
                f"flashinfer {text} is newer than {newest}, the newest that the contract tests ran with" in notes
            ) == said


def test_the_page_names_the_releases_that_are_tested() -> None:
    page = (ROOT / "docs/flashinfer.md").read_text()
    assert f"Supported: flashinfer-python {package.OLDEST} to {package.NEWEST};" in page


HOPPER = {  # what is said of each backend on an H200; "": it fits
    "nvfp4": (
        "compute capability must be one of 10.0, 10.3 for nvfp4 weights, got 9.0",
        "compute capability must be one of 10.0, 10.3, 11.0, 12.0, 12.1 for nvfp4 weights, got 9.0",
    ),
    "fp8_block": ("compute capability must be one of 10.0, 10.3 for fp8_block weights, got 9.0", ""),
    "none": ("compute capability must be one of 10.0, 10.3 for none weights, got 9.0", ""),
}


@pytest.mark.parametrize("scheme", HOPPER)
@pytest.mark.parametrize("device", ["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def test_explain_on_a_hopper_gpu(scheme: str, device: str, installed: str) -> None:
    """CUTLASS serves bf16 and FP8 blocks there; TRTLLM-gen kernels are machine code for Blackwell alone."""
    if device == "real" and (not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("needs a Hopper GPU")
    capability = torch.cuda.get_device_capability() if device == "real" else (9, 0)
    act = {"nvfp4": "nvfp4", "fp8_block": "fp8", "none": "none"}[scheme]
    scale = "tensor" if scheme == "nvfp4" else "none"
    problem = dataclasses.replace(
        NVFP4, scheme=scheme, act_format=act, input_scale=scale, capability=capability, num_experts=128, top_k=8
    )
    for backend, text in zip((TRTLLM, CUTLASS), HOPPER[scheme], strict=True):
        assert against(problem, backend) == text
    explained = moe.explain(problem)
    # Its first call may compile for an hour, so another backend that fits comes first.
    assert explained.chosen != CUTLASS or set(_fitting(explained)) <= {CUTLASS, "reference"}


@pytest.mark.parametrize("backend", [TRTLLM, CUTLASS])
@pytest.mark.parametrize("scheme", HOPPER)
def test_explain_on_a_cpu(scheme: str, backend: str) -> None:
    act = {"nvfp4": "nvfp4", "fp8_block": "fp8", "none": "none"}[scheme]
    problem = dataclasses.replace(NVFP4, scheme=scheme, act_format=act, device="cpu", capability=None)
    assert against(problem, backend).startswith("device must be 'cuda', got 'cpu'")


def test_whether_the_module_is_built_is_said(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(NVFP4, scheme="none", act_format="none", input_scale="none", capability=(9, 0))
    text = "the first call compiles fused_moe_90, which takes an hour or more"
    for there in (True, False):
        monkeypatch.setattr(package, "is_built", lambda name, there=there: there)
        assert (text in moe.explain(problem).notes[CUTLASS]) == (not there)


def _fitting(explanation: Explanation) -> list[str]:
    return [name for name, reasons in explanation.against.items() if not reasons]


def test_notes_say_by_contract_and_what_is_padded() -> None:
    notes = moe.explain(NVFP4).notes
    assert "by contract, not run on SM100; pads hidden_size 2880 -> 2944, intermediate_size 704 -> 768" in notes[TRTLLM]


def test_by_contract_is_said_until_a_record_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(NVFP4, scheme="none", act_format="none", input_scale="none", capability=(9, 0))
    for passed, said in (({}, True), ({CUTLASS: {"none": ["none"]}}, False)):
        monkeypatch.setattr(tested, "records", lambda passed=passed: ({"where": "sm90", "passed": passed},))
        assert ("by contract" in moe.explain(problem).notes[CUTLASS]) == said
