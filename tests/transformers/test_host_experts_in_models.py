"""Transformers models with some experts of each layer on the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tolerances import F32, relative_l2
from torch import Tensor

import torch_moe_ops as moe

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from fixture_layers import CHECKPOINTS  # noqa: E402
from quantized_models import tiny_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402
from torch_moe_ops.transformers.quantizer import PackedExperts  # noqa: E402

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
FOLDER = CHECKPOINTS / "qwen3_moe_modelopt_nvfp4"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_text", "dbrx", "jetmoe"])
@pytest.mark.parametrize("host", [2, {1: [0, 1]}])
def test_a_quantized_model_gives_the_same_logits(name: str, host: Any) -> None:
    model, whole = tiny_model(name), tiny_model(name)
    layers = moeq_transformers.quantize_model(model, "none", host_experts=host)
    moeq_transformers.quantize_model(whole, "none")
    assert relative_l2(logits(model), logits(whole)) < F32
    split = [len(layer.split.host) for layer in layers.values()]
    found = [f.layer for f in find_experts(model)]
    assert split == [2 if host == 2 or number == 1 else 0 for number in found]
    assert all(layer.load.sum() > 0 for layer in layers.values())


def test_from_pretrained_by_one_option_of_register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PackedExperts, "load_options", {})
    moeq_transformers.register(act_format="none")
    whole = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
    moeq_transformers.register(act_format="none", host_experts=5, max_tokens=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
    holders = [found.module.moeq_weights for found in find_experts(model)]
    assert [len(holder.layer.split.host) for holder in holders] == [5] * len(holders)
    assert relative_l2(logits(model), logits(whole)) < 1e-2  # bfloat16, sums in another order
    assert "5 on the host" in repr(model) and "5 on the host" in str(moe.explain(holders[0].layer))
    assert model.to("cpu") is model
    for refused in (lambda: model.save_pretrained(tmp_path), lambda: model.to("meta")):
        with pytest.raises(ValueError, match="experts must"):
            refused()


def test_attach_experts_takes_the_option() -> None:
    config = transformers.AutoConfig.from_pretrained(FOLDER)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    attached = moeq_transformers.attach_experts(model, FOLDER, check_linears=False, host_experts=[0, 1])
    assert all(isinstance(layer, moe.HostExperts) for layer in attached.values())
    assert {layer.split.host for layer in attached.values()} == {(0, 1)}
    assert torch.isfinite(logits(model)).all()
    with pytest.raises(ValueError, match="shared_experts must be False with host_experts, got True"):
        moeq_transformers.attach_experts(model, FOLDER, check_linears=False, host_experts=1, shared_experts=True)
