"""The installed package: versions, enums by name, signatures, and what explain() says with and without it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.explain import Explanation
from torch_moe_ops.flashinfer import package, routing, trtllm_call, warmup

TRTLLM, CUTLASS = "flashinfer_trtllm", "flashinfer_cutlass"
NVFP4 = moe.Problem(
    "nvfp4",
    act_format="nvfp4",
    device="cuda",
    capability=(10, 0),
    num_experts=128,
    hidden_size=2880,
    intermediate_size=704,
    input_scale="tensor",
)


def against(problem: moe.Problem, backend: str = TRTLLM) -> str:
    return "; ".join(moe.explain(problem).against[backend])


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> object:
    """Pretend that some release is installed."""
    monkeypatch.setattr(package, "import_error", lambda: None)
    return lambda text: monkeypatch.setattr(package, "installed_version", lambda: text)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("0.6.7", "flashinfer-python must be at least 0.6.8, got 0.6.7"),
        ("0.6.8rc1", "must be at least 0.6.8, got 0.6.8rc1"),
        ("0.6.16rc4", None),
        ("0.6.16rc5", "192-token tiles give NaN"),
        ("0.6.16", "got 0.6.16"),
        ("0.6.16.post4", "flashinfer issue 4486"),
        ("0.6.17", "got 0.6.17"),
        ("0.6.18", None),
        ("0.7.2.post1", None),
        (None, "flashinfer-python (at least 0.6.8) must be installed, got none"),
    ],
)
def test_releases(text: str | None, bad: str | None, version: object) -> None:
    version(text)  # type: ignore[operator]
    found = package.package_unmet("nvfp4", importing=False)
    assert (found is None) if bad is None else (found is not None and bad in found)


def test_a_release_that_is_bad_for_one_scheme_serves_the_others(version: object) -> None:
    version("0.6.17")  # type: ignore[operator]
    assert package.package_unmet("mxfp4", importing=False) is None


def test_importing_the_library_does_not_import_flashinfer() -> None:
    code = (
        "import sys, torch_moe_ops as moe;"
        "moe.explain(moe.Problem('nvfp4', hidden_size=64, intermediate_size=64));"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'flashinfer']"
    )
    root = str(Path(__file__).parent.parent)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": root}, timeout=120)


def test_a_package_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "installed_version", lambda: "0.7.2")
    monkeypatch.setattr(package, "import_error", lambda: "ModuleNotFoundError: No module named 'tvm_ffi'")
    assert "flashinfer must be importable, got ModuleNotFoundError: No module named 'tvm_ffi'" in against(NVFP4)


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
    ],
)
def test_trtllm_requirements(change: dict[str, object], text: str) -> None:
    assert text in against(dataclasses.replace(NVFP4, **change))


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
    assert ("by contract" in explained.notes[CUTLASS]) == (scheme == "nvfp4")
    assert BACKENDS[CUTLASS].verified(problem) == ("by contract" if scheme == "nvfp4" else "tested")
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
    assert all(BACKENDS[name].verified(NVFP4) == "by contract" for name in (TRTLLM, CUTLASS))


def test_warmup_refuses_other_backends() -> None:
    from problems import Case, make_raw

    with pytest.raises(ValueError, match="must be a FlashInfer backend, got 'reference'"):
        warmup(moe.prepare(make_raw(Case()), backend="reference"), top_k=2)


# ------------------------------------------------------------------ against the installed release


@pytest.fixture
def installed() -> str:
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    return str(package.installed_version())


def test_numbers_are_looked_up_by_name(installed: str) -> None:
    from flashinfer.tllm_enums import ActivationType, RoutingMethodType

    assert package.number("ActivationType", "Identity") == ActivationType.Identity
    assert package.number("RoutingMethodType", "MiniMax2") == RoutingMethodType.MiniMax2
    with pytest.raises(RuntimeError, match=rf"flashinfer {installed} has no RoutingMethodType.Nonsense"):
        package.number("RoutingMethodType", "Nonsense")


# What each function must take by keyword; `output` and the layout of scales are passed where they exist.
_COMMON = {"hidden_states", "gemm1_weights", "gemm2_weights", "num_experts", "top_k", "n_group", "topk_group"}
_COMMON |= {"intermediate_size", "local_expert_offset", "local_num_experts", "routed_scaling_factor"}
_COMMON |= {"routing_method_type"}


@pytest.mark.parametrize("scheme", list(trtllm_call.FAMILIES))
@pytest.mark.parametrize("routed", [True, False])
def test_functions_take_our_keywords(scheme: str, routed: bool, installed: str) -> None:
    entry = package.entry(trtllm_call.function_name(scheme, routed))
    if entry.function is None:
        assert routed and scheme in ("mxint4", "fp8") and package.parse_version(installed) < (0, 7, 0, 0, 0)
        return
    assert entry.parameters >= _COMMON | ({"topk_ids"} if routed else {"routing_logits", "routing_bias"})
    assert ("routing_bias" in entry.parameters) == (not routed or trtllm_call.FAMILIES[scheme].bias_in_routed)


OLDEST, NEWEST = (0, 6, 8), (0, 7, 2)
PARAMETERS = {  # of the compiled function, in the oldest and in the newest release that this was written against
    "trtllm_fp4_block_scale_moe": (34, 43),
    "trtllm_fp8_block_scale_moe": (29, 42),
    "trtllm_bf16_moe": (25, 33),
    "trtllm_mxint4_block_scale_moe": (25, 33),
    "trtllm_fp8_per_tensor_scale_moe": (25, 29),
    "trtllm_fp8_per_channel_scale_moe": (0, 29),
}


@pytest.mark.parametrize("op", PARAMETERS)
def test_compiled_functions_have_the_known_parameters(op: str, installed: str) -> None:
    """An alarm: a parameter that comes or goes in a new release means that the adapter has to be looked at."""
    from flashinfer_sim import cpp

    version = package.parse_version(installed)[:3]
    if PARAMETERS[op][0] == 0 and version < NEWEST:
        pytest.skip("not in this release")
    names = cpp.parameters(op)
    assert len(set(names)) == len(names) and "output" in names
    if version == OLDEST:
        assert len(names) == PARAMETERS[op][0], names
    elif version >= NEWEST:
        assert len(names) == PARAMETERS[op][1], names


def test_routing_methods_exist_by_name(installed: str) -> None:
    missing = {n for n in routing.METHODS.values() if not package.has_member("RoutingMethodType", n)}
    assert missing <= {"Sigmoid", "TopKSigmoid"}
    if package.parse_version(installed) >= (0, 6, 18, 1, 0):
        assert not missing


# Where FlashInfer names an argument of the function otherwise than the parameter of the compiled one.
_SYNONYMS = {
    "output1_scale_scalar": "output1_scales_scalar",
    "output1_scale_gate_scalar": "output1_scales_gate_scalar",
    "output2_scale_scalar": "output2_scales_scalar",
    "per_token_scale": "per_token_scales",
}


NAMED_CASES = ["nvfp4 bias", "nvfp4 dynamic", "mxfp4 gpt-oss", "mxfp4 mxfp8", "mxint4", "fp8", "fp8 channel"]
NAMED_CASES += ["fp8_block", "mxfp8", "none"]


@pytest.mark.parametrize("scheme", NAMED_CASES)
def test_every_tensor_arrives_under_its_name(scheme: str, installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapter sends by keyword, and what reaches the compiled function by position."""
    from flashinfer_sim import cpp, seam, trtllm
    from problems import make_batch
    from test_flashinfer_trtllm import CASES, layers

    seam.allow_cpu(monkeypatch, TRTLLM)
    seam.install(monkeypatch)
    sent: dict[str, object] = {}
    arrived: dict[str, object] = {}
    real_value, real_simulate = package.Entry.value, trtllm.simulate

    def value(self: package.Entry, optional: dict[str, object], **arguments: object) -> object:
        sent.update(arguments)
        return real_value(self, optional, **arguments)

    def simulate(op: str, values: tuple[object, ...]) -> object:
        arrived.update(zip(cpp.parameters(op), values, strict=True))
        return real_simulate(op, values)

    monkeypatch.setattr(package.Entry, "value", value)
    monkeypatch.setattr(trtllm, "simulate", simulate)
    case = CASES[scheme]
    w, _ = layers(case)
    moe.fused_moe_routed(*make_batch(case), w)
    tensors = {name: t for name, t in sent.items() if isinstance(t, torch.Tensor) and name != "topk_ids"}
    assert len(tensors) >= 3
    for name, tensor in tensors.items():
        landed = arrived[_SYNONYMS.get(name, name)]
        assert isinstance(landed, torch.Tensor) and landed.data_ptr() == tensor.data_ptr(), name
    plain = ("num_experts", "top_k", "intermediate_size", "local_expert_offset", "local_num_experts")
    assert all(arrived[name] == sent[name] for name in plain)
