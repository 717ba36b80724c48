"""Shared experts in the call of the routed ones, inside vLLM: its layer in every format, and whole models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_checkpoints import with_quantized_shared_experts, with_shared_experts
from vllm_runs import INSTALLED, NOT_INSTALLED, WHOLE_MODELS, check_tokens

from torch_moe_ops.vllm import log, settings

pytestmark = pytest.mark.skipif(not INSTALLED, reason=NOT_INSTALLED)
INSIDE = "torch_moe_ops: shared experts in the call of the routed ones (first in model.layers.0.mlp.experts)"
BESIDE = "torch_moe_ops: shared experts left to vLLM: "
FORMATS = [
    "ModelOpt NVFP4",
    "ModelOpt FP8",
    "compressed-tensors NVFP4",
    "compressed-tensors MXFP4",
    "compressed-tensors FP8",
    "compressed-tensors INT4",
    "FP8 128x128",
]


@pytest.fixture(scope="module")
def _groups() -> Iterator[None]:
    from vllm_shared_layers import one_process

    with one_process():
        yield


@pytest.fixture
def layer_of(_groups: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Layers whose activations are not quantized."""
    from vllm_shared_layers import Layer, without_kernels

    log._said.clear()
    monkeypatch.setenv(settings.ACT_FORMAT, "none")
    without_kernels(monkeypatch)
    return Layer


def _is_inside(layer: Any) -> bool:
    """Nothing of the block may be left where it is."""
    weights = layer.runner.routed_experts.moeq_weights
    inside = layer.runner.shared_experts is None
    assert weights.num_shared_experts == (layer.width if inside else 0)
    linears = (layer.block.gate_up_proj, layer.block.down_proj)
    assert all(not list(linear.parameters()) for linear in linears) == inside
    return inside


@pytest.mark.parametrize("width, gated, factor", [(1, True, 1.0), (2, False, 2.5)], ids=["gate", "factor"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_the_layer_gives_both(layer_of: Any, format_name: str, width: int, gated: bool, factor: float) -> None:
    layer = layer_of(format_name, width, gated, factor)
    layer.process()
    assert _is_inside(layer)
    x, logits = torch.randn(5, 128).to(torch.bfloat16), torch.randn(5, 6)
    found, expected = layer(x, logits).float(), layer.expected(x, logits)
    assert (found - expected).norm() <= 6e-3 * expected.norm()


def test_a_layer_that_is_processed_first_takes_them_too(layer_of: Any) -> None:
    layer = layer_of("FP8 128x128")
    for module in (layer.runner.routed_experts, layer.block.gate_up_proj, layer.block.down_proj):
        module.quant_method.process_weights_after_loading(module)
    assert _is_inside(layer)


# Settings of a layer, and why its shared experts stay beside.
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"shared_format": "compressed-tensors FP8"}, "weight of gate_up_proj of shared experts must be"),
    "more": ({"shared_format": "ModelOpt FP8"}, "weight_scale of gate_up_proj of shared experts must be"),
    "float16": ({"factor": 2.5, "dtype": torch.float16}, "hidden states must be bfloat16 where the layer scales"),
    "limit": ({"swiglu_limit": 7.0}, "the routed experts must have silu without a limit"),
    "columns": ({"width": 31}, "top_k and shared experts of the routed ones' width must be at most 32, got 2 and 31"),
    "width": ({"width": 1.5}, "with_shared_experts: intermediate_size of shared must be a multiple of"),
}


@pytest.mark.parametrize("options, reason", REASONS.values(), ids=REASONS)
def test_others_stay_beside_and_why(
    layer_of: Any, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = layer_of("ModelOpt NVFP4" if reason.startswith("weight of") else "compressed-tensors FP8", **options)
    assert BESIDE + reason in _said(layer, caplog)
    assert layer.runner.shared_experts is not None
    assert list(layer.block.down_proj.parameters())


CALIBRATED = ["ModelOpt NVFP4", "ModelOpt FP8", "compressed-tensors NVFP4"]


@pytest.mark.parametrize("sides", [("routed",), ("shared",)])
@pytest.mark.parametrize("format_name", CALIBRATED)
def test_calibrated_on_one_side_stays_beside(
    layer_of: Any,
    format_name: str,
    sides: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(settings.ACT_FORMAT, "checkpoint")
    layer = layer_of(format_name, calibrated=sides)
    here, there = ("['a13_input_scale', 'a2_input_scale']", "none") if sides == ("routed",) else ("none", "['a13_input")
    assert f"{BESIDE}calibrated scales of shared experts must be {here}, as the routed ones, got {there}" in _said(
        layer, caplog
    )
    experts = layer.runner.routed_experts
    experts.quant_method.process_weights_after_loading(experts)
    assert layer.runner.shared_experts is not None and not experts.moeq_weights.num_shared_experts


@pytest.mark.parametrize("sides", [(), ("routed", "shared")])
@pytest.mark.parametrize("format_name", CALIBRATED)
def test_calibrated_on_both_sides_or_none_go_inside(
    layer_of: Any, format_name: str, sides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.ACT_FORMAT, "checkpoint")
    layer = layer_of(format_name, calibrated=sides)
    layer.process()
    assert _is_inside(layer)


@pytest.mark.parametrize("format_name", CALIBRATED)
def test_on_one_side_without_use_go_inside(layer_of: Any, format_name: str) -> None:
    layer = layer_of(format_name, calibrated=("routed",))
    layer.process()
    assert _is_inside(layer)


def test_another_block_stays_beside(layer_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer = layer_of("FP8 128x128")
    layer.block.__class__ = type("OtherMLP", (type(layer.block),), {})
    reason = "the block of shared experts must be one of ['DeepseekV2MLP', 'Glm4MoeMLP', 'Qwen2MoeMLP'], got OtherMLP"
    assert BESIDE + reason in _said(layer, caplog)


def test_they_stay_beside_where_asked_for(
    layer_of: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(settings.SHARED_EXPERTS, "beside")
    assert "shared experts" not in _said(layer_of("FP8 128x128"), caplog)


def _said(layer: Any, caplog: pytest.LogCaptureFixture) -> str:
    """What the log has of a layer whose shared experts stay beside."""
    logger = logging.getLogger("vllm.torch_moe_ops")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            assert layer.runner.routed_experts.quant_method.shared_experts is None
    finally:
        logger.removeHandler(caplog.handler)
    return caplog.text


@pytest.mark.parametrize("is_taken", [False, True])
def test_linears_are_processed_unless_they_are_taken(is_taken: bool) -> None:
    from torch_moe_ops.vllm.shared_experts import keep_until_prepared

    linear, processed = torch.nn.Linear(2, 2), []

    def create_weights(layer: Any, dtype: torch.dtype) -> None:
        layer.register_parameter("input_scale", torch.nn.Parameter(torch.zeros(2, dtype=dtype)))

    method = SimpleNamespace(process_weights_after_loading=processed.append, create_weights=create_weights)
    block = SimpleNamespace(gate_up_proj=linear, down_proj=torch.nn.Linear(2, 2))
    runners = {"attention": object(), "experts": SimpleNamespace(shared_experts=SimpleNamespace(_layer=block))}
    keep_until_prepared(method, runners, lambda runner: is_taken)
    method.create_weights(linear, dtype=torch.float32)
    assert linear.input_scale.isnan().all(), "whoever loads nothing can be told"
    method.process_weights_after_loading(linear)
    assert processed == ([] if is_taken else [linear])


WHOLE = [("qwen2_moe", "compressed-tensors INT4"), ("glm4_moe", "compressed-tensors FP8")]


class TestWholeModels:
    pytestmark = WHOLE_MODELS

    @pytest.mark.parametrize("architecture, format_name", WHOLE)
    def test_tokens_are_those_of_the_dequantized_model(
        self, architecture: str, format_name: str, tmp_path: Path
    ) -> None:
        folder, dequantized = with_quantized_shared_experts(tmp_path, architecture, format_name)
        written = check_tokens(folder, f"{format_name} experts on backend cpu", [True, False], dequantized)
        assert written.count(INSIDE) == 2
        assert BESIDE not in written

    def test_those_that_are_not_quantized_stay_beside(self, tmp_path: Path) -> None:
        folder = with_shared_experts(tmp_path / "model")
        written = check_tokens(folder, "ModelOpt W4A16_NVFP4 experts on backend cpu", [True])
        assert f"{BESIDE}weight of gate_up_proj of shared experts must be torch.uint8 of [128, 64]" in written
        assert INSIDE not in written
