"""Architectures x formats: from_pretrained after register(), against plain transformers on dequantized weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from safetensors.torch import load_file
from tolerances import F32, relative_l2
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from quantized_models import ARCHITECTURES, FORMATS, REFUSED, write_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.attach import find_experts  # noqa: E402

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def load(folder: Path, **options: Any) -> Any:
    moeq_transformers.register(**{"act_format": "none", **options})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def packed_layers(model: Any) -> int:
    """Layers of experts, all of which must hold packed weights and no parameters."""
    modules = find_experts(model)
    assert all(not list(found.module.parameters()) for found in modules)
    assert all(hasattr(found.module, "moeq_weights") for found in modules)
    return len(modules)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_dequantized_model(architecture: str, format_name: str, tmp_path: Path) -> None:
    written = write_model(tmp_path, architecture, format_name)
    assert written.linears
    model = load(written.quantized)
    assert packed_layers(model)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(written.dequantized, dtype=torch.float32)
    assert relative_l2(logits(model), logits(oracle)) < F32


@pytest.mark.parametrize("name", sorted(folder.name for folder in CHECKPOINTS.iterdir()))
def test_logits_of_checkpoints_that_other_tools_wrote(name: str) -> None:
    expected = load_file(CHECKPOINTS / name / "expected.safetensors")
    model = load(CHECKPOINTS / name)
    assert packed_layers(model)
    assert relative_l2(logits(model, expected["input_ids"]), expected["logits_dequant"]) < F32


@pytest.mark.parametrize("architecture", REFUSED)
def test_refusals_name_their_reason(architecture: str, tmp_path: Path) -> None:
    written = write_model(tmp_path, architecture, "ModelOpt NVFP4")
    reason = r"must (name the experts of|run its experts through the experts interface).* layers \[0, 1\]"
    with pytest.raises(ValueError, match=reason):
        load(written.quantized)
