"""The installed package: versions, enums by name, signatures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from flashinfer_problems import CUTLASS, NVFP4, TRTLLM, _installed, _version, against  # noqa: F401 (two fixtures)
from paths import ROOT

import torch_moe_ops as moe
from torch_moe_ops.backends.flashinfer import package, routing, trtllm_call
from torch_moe_ops.flashinfer import warmup


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
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)


def test_a_package_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "installed_version", lambda: "0.7.2")
    monkeypatch.setattr(package, "import_error", lambda: "ModuleNotFoundError: No module named 'tvm_ffi'")
    assert "flashinfer must be importable, got ModuleNotFoundError: No module named 'tvm_ffi'" in against(NVFP4)


def test_warmup_refuses_other_backends() -> None:
    from problems import Case, make_raw

    with pytest.raises(ValueError, match="must be a FlashInfer backend, got 'reference'"):
        warmup(moe.prepare(make_raw(Case()), backend="reference"), top_k=2)


# ------------------------------------------------------------------ against the installed release


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


OLDEST, NEWEST = (package.parse_version(text)[:3] for text in (package.OLDEST, package.NEWEST))
PARAMETERS = {  # of the compiled function, in the oldest and in the newest release
    "trtllm_fp4_block_scale_moe": (34, 46),
    "trtllm_fp8_block_scale_moe": (29, 44),
    "trtllm_bf16_moe": (25, 35),
    "trtllm_mxint4_block_scale_moe": (25, 35),
    "trtllm_fp8_per_tensor_scale_moe": (25, 31),
    "trtllm_fp8_per_channel_scale_moe": (0, 31),
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
    from flashinfer_trtllm_cases import CASES, layers
    from problems import make_batch

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
