"""The checkpoints in tests/data, written by third-party tools, and what they say the result is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import torch
from paths import DATA
from safetensors.torch import load_file
from torch import Tensor

CHECKPOINTS = DATA / "checkpoints"

# (checkpoint, layer): every MoE layer of every NVFP4 checkpoint, and of all others.
NVFP4_LAYERS = [
    ("qwen3_moe_modelopt_nvfp4", 0),
    ("qwen3_moe_modelopt_nvfp4", 1),
    ("qwen3_moe_modelopt_nvfp4_w4a16", 0),
    ("deepseek_v3_modelopt_nvfp4", 1),
    ("mixtral_modelopt_nvfp4", 0),
    ("nemotron_h_modelopt_nvfp4", 1),
    ("gpt_oss_modelopt_nvfp4", 0),
    ("qwen3_moe_ct_nvfp4", 0),
]
OTHER_LAYERS = [
    ("gpt_oss_mxfp4", 0),
    ("qwen3_moe_ct_int4_g32", 0),
    ("qwen3_moe_ct_mxfp4", 0),
    ("qwen3_moe_ct_int8", 0),
    ("qwen3_moe_ct_fp8_channel", 0),
    ("qwen3_moe_modelopt_fp8", 0),
    ("qwen3_moe_fp8_block", 0),
]
LAYERS = NVFP4_LAYERS + OTHER_LAYERS


@dataclass(frozen=True)
class Expected:
    """Tensors of expected.safetensors for one layer, and the whole of expected.json."""

    tensors: dict[str, Tensor]
    info: dict[str, object]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def hidden(self) -> Tensor:
        return self.tensors["hidden_in"]

    @property
    def ids(self) -> Tensor:
        return self.tensors["topk_ids"].to(torch.int32)

    @property
    def weights(self) -> Tensor:
        return self.tensors["topk_weights"].float()


@cache
def expected(name: str, layer: int) -> Expected:
    folder = CHECKPOINTS / name
    prefix = f"layers.{layer}."
    found = load_file(folder / "expected.safetensors")
    tensors = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
    return Expected(tensors, json.loads((folder / "expected.json").read_text()))
