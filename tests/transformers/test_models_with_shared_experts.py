"""Shared experts in the call of the routed ones, in models of transformers: logits of the dequantized model."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from checkpoints_support import FIXTURES
from tolerances import F32, relative_l2
from torch import Tensor, nn
from vllm_checkpoints import with_shared_experts

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from quantized_models import write_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402
from torch_moe_ops.transformers.shared_experts import SharedInside, shared_of  # noqa: E402

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
ARCHITECTURES = ["deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_next"]
FORMATS = ["ModelOpt NVFP4", "compressed-tensors MXFP4", "compressed-tensors FP8"]


def _load(folder: Path, **options: Any) -> Any:
    moeq_transformers.register(act_format="none", **options)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        moeq_transformers.register(act_format="none")


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def _inside(model: Any) -> int:
    """Layers whose shared experts are in the call; their own weights must be gone."""
    names = [name for name, module in model.named_modules() if isinstance(module, SharedInside)]
    assert not [p for p, _ in model.named_parameters() if p.startswith(tuple(f"{name}." for name in names))]
    weights = [found.module.moeq_weights.prepared for found in find_experts(model)]
    assert [bool(w.num_shared_experts) for w in weights].count(True) == len(names)
    return len(names)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_dequantized_model(architecture: str, format_name: str, tmp_path: Path) -> None:
    written = write_model(tmp_path, architecture, format_name)
    model = _load(written.quantized, shared_experts=True)
    assert _inside(model) == len(find_experts(model))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(written.dequantized, dtype=torch.float32)
    expected = _logits(oracle)
    assert relative_l2(_logits(model), expected) < F32
    assert relative_l2(_logits(copy.deepcopy(model)), expected) < F32


def test_they_stay_beside_unless_asked_for() -> None:
    assert _inside(_load(FIXTURES / "deepseek_v3_modelopt_nvfp4")) == 0


def test_attach_experts_puts_them_inside() -> None:
    path = FIXTURES / "deepseek_v3_modelopt_nvfp4"
    plain = _load(path)
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"act_format": "none", "check_linears": False, "shared_experts": True}
    moeq_transformers.attach_experts(model, path, **options)
    assert _inside(model) == 1
    assert relative_l2(_logits(model), _logits(plain)) < F32
    moved = model.to(torch.float32)
    assert relative_l2(_logits(moved), _logits(plain)) < F32


def test_a_gate_that_is_wrapped_later_counts(tmp_path: Path) -> None:
    """As adapters wrap linears of a loaded model."""
    folder = write_model(tmp_path, "qwen2_moe", "ModelOpt NVFP4").quantized
    models = [_load(folder, shared_experts=inside) for inside in (False, True)]
    before = _logits(models[0])
    for model in models:
        for found in find_experts(model):
            block = model.get_submodule(found.name.rpartition(".")[0])
            block.shared_expert_gate = nn.Sequential(block.shared_expert_gate, _Times(-9.0))
    beside, inside = (_logits(model) for model in models)
    assert relative_l2(beside, before) > 1e-3
    assert relative_l2(inside, beside) < F32
    assert relative_l2(_logits(copy.deepcopy(models[1])), beside) < F32


def test_attaching_once_more_does_not_lose_them() -> None:
    path = FIXTURES / "deepseek_v3_modelopt_nvfp4"
    model = _load(path, shared_experts=True)
    before = _logits(model)
    for again in (False, True):
        with pytest.raises(ValueError, match=r"shared_experts of .* got it inside experts that were attached before"):
            moeq_transformers.attach_experts(model, path, check_linears=False, shared_experts=again)
    assert torch.equal(_logits(model), before)


def test_those_with_another_activation_stay_beside(caplog: pytest.LogCaptureFixture) -> None:
    """Routed experts that clamp, beside shared ones that do not: HY-V4's."""
    path = FIXTURES / "deepseek_v3_modelopt_nvfp4"
    model = _load(path)
    for found in find_experts(model):
        found.module._apply_gate = _clamped
    beside = copy.deepcopy(model)
    options: dict[str, Any] = {"act_format": "none", "check_linears": False, "swiglu_limit": _LIMIT}
    moeq_transformers.attach_experts(beside, path, **options)
    with caplog.at_level(logging.INFO):
        moeq_transformers.attach_experts(model, path, shared_experts=True, **options)
    assert _inside(model) == 0
    assert "MLP must have the activation of " in caplog.text
    assert torch.equal(_logits(model), _logits(beside))


_LIMIT = 0.01


def _clamped(halves: Tensor) -> Tensor:
    gate, up = halves.chunk(2, dim=-1)
    return nn.functional.silu(gate.clamp(max=_LIMIT)) * up.clamp(-_LIMIT, _LIMIT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_in_one_graph(architecture: str, tmp_path: Path) -> None:
    model = _load(write_model(tmp_path, architecture, "ModelOpt NVFP4").quantized, shared_experts=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_l2(_logits(compiled), _logits(model)) < F32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_on_a_gpu_eager_and_compiled(architecture: str, tmp_path: Path) -> None:
    """In bfloat16, where the sum is rounded once instead of twice."""
    written = write_model(tmp_path, architecture, "ModelOpt NVFP4")
    models = []
    for inside in (True, False):
        moeq_transformers.register(act_format="none", shared_experts=inside)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": 0}}
        models.append(transformers.AutoModelForCausalLM.from_pretrained(written.quantized, **options).eval())
    moeq_transformers.register(act_format="none")
    model, beside = models
    assert _inside(model) and not _inside(beside)
    ids = IDS.cuda()
    with torch.no_grad():
        expected = beside(input_ids=ids, use_cache=False).logits
        found = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True)(input_ids=ids, use_cache=False).logits
    assert relative_l2(found, expected) < 2e-2
    assert relative_l2(compiled, expected) < 2e-2


def test_a_model_with_them_inside_is_not_saved(tmp_path: Path) -> None:
    model = _load(FIXTURES / "deepseek_v3_modelopt_nvfp4", shared_experts=True)
    with pytest.raises(ValueError, match="num_shared_experts must be 0 of a layer that is written, got 1"):
        model.save_pretrained(tmp_path)


def test_those_of_another_scheme_stay_beside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_shared_experts(tmp_path / "model")
    with caplog.at_level(logging.INFO):
        model = _load(folder, shared_experts=True)
    assert _inside(model) == 0
    assert "shared experts beside model.layers.0.mlp.experts run as before" in caplog.text
    assert relative_l2(_logits(model), _logits(_load(folder))) == 0


class _Block(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.experts, self.shared_experts = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.experts(hidden_states) + self.factor * self.shared_experts(hidden_states)


class _Hashed(_Block):
    """As in DeepSeek-V4, where early layers choose experts by the token."""

    def forward(self, hidden_states: Tensor, input_ids: Any = None) -> Tensor:
        return super().forward(hidden_states) + 0 * input_ids.reshape(-1, 1)


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, values: Tensor) -> Tensor:
        return values * self.factor


class _Packed(nn.Module):
    """A quantized linear as loaders leave it: codes, whose dtype and columns say nothing of hidden states."""

    def __init__(self, columns: int, rows: int, codes: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = columns, rows
        shape = (rows * columns // 2, 1) if codes is torch.uint8 else (rows, columns)
        self.weight = nn.Parameter(torch.zeros(shape).to(codes), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.ones(1, 1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError("no kernel for it here")


class _QuantizedBlock(nn.Module):
    def __init__(self, codes: torch.dtype, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.gate = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
        self.experts = nn.Linear(8, 8)
        self.shared_experts = nn.ModuleDict({"gate_proj": _Packed(8, 6, codes), "down_proj": _Packed(6, 8, codes)})

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.gate(hidden_states)
        return self.experts(hidden_states, logits) + self.factor * self.shared_experts(hidden_states)


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_shared_experts_of_quantized_linears(codes: torch.dtype) -> None:
    """They are not run to find out what a block does with them: transformers' FP8 linears need a GPU."""
    assert shared_of(_QuantizedBlock(codes), "experts", "shared_experts").name == "shared_experts"
    with pytest.raises(ValueError, match="must add its shared_experts as they are to its routed experts"):
        shared_of(_QuantizedBlock(codes, 0.5), "experts", "shared_experts")


def test_a_block_that_does_more_than_add_is_refused() -> None:
    assert shared_of(_Block(1.0), "experts", "shared_experts").gate is None
    with pytest.raises(ValueError, match="_Block must add its shared_experts as they are to its routed experts"):
        shared_of(_Block(0.5), "experts", "shared_experts")
    with pytest.raises(ValueError, match=r"_Hashed must take hidden states alone: .*reshape"):
        shared_of(_Hashed(1.0), "experts", "shared_experts")
    divided = _Block(1.0)
    divided.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="experts must be on one device, got them divided among ranks"):
        shared_of(divided, "experts", "shared_experts")
