"""Adapters merged into a checkpoint's experts, taken over by the model, written, and read again."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from lora_cases import adapters

import torch_moe_ops as moe

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

# gpt-oss: ModelOpt's file has one scale_2 for all experts of a layer, which merging has to leave so.
NAMES = [
    "qwen3_moe_modelopt_nvfp4",
    "gpt_oss_modelopt_nvfp4",
    "qwen3_moe_modelopt_fp8",
    "gpt_oss_mxfp4",
    "qwen3_moe_ct_int4_g32",
    "qwen3_moe_ct_int8",
]


def load(folder: Path) -> Any:
    moeq_transformers.register(act_format="none")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def experts(model: Any) -> list[moe.RawWeights]:
    return [
        dataclasses.replace(moe.restore(found.module.moeq_weights.prepared), source="") for found in find_experts(model)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_merged_experts_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = load(CHECKPOINTS / name)
    before = experts(model)
    merged = [moe.merge_lora(raw, **adapters(raw), scaling=0.5) for raw in before]
    for found, raw in zip(find_experts(model), merged, strict=True):
        found.module.moeq_weights.prepared.update_(raw)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    for came, raw, old in zip(experts(again), merged, before, strict=True):
        assert came.equal(raw) and not came.equal(old)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
