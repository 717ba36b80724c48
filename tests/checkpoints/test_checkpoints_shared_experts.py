"""load_experts(shared_experts=True): what ModelOpt wrote for DeepSeek-V3, and why other layers are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints_support import FIXTURES, changed, config_of, decode, stored, write
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.checkpoints import CheckpointError, load_experts
from torch_moe_ops.checkpoints.index import open_checkpoint
from torch_moe_ops.checkpoints.writing import format_of
from torch_moe_ops.checkpoints.writing_layer import layer_tensors

DEEPSEEK, NEMOTRON, QWEN = "deepseek_v3_modelopt_nvfp4", "nemotron_h_modelopt_nvfp4", "qwen3_moe_modelopt_nvfp4"
ROOT = "model.layers.1.mlp.shared_experts"


def _renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def _alone(folder: Path) -> moe.RawWeights:
    """The shared experts of the file as the only expert of a layer: what reads routed experts reads them."""
    found = {name: t for name, t in stored(DEEPSEEK).items() if name.startswith(ROOT)}
    _renamed(found, "shared_experts", "experts.0")
    config = {k: v for k, v in config_of(DEEPSEEK).items() if k != "n_routed_experts"}
    return load_experts(write(folder, found, config), 1)


def test_deepseek_v3(tmp_path: Path) -> None:
    raw, shared = load_experts(FIXTURES / DEEPSEEK, 1, shared_experts=True), _alone(tmp_path)
    routed = load_experts(FIXTURES / DEEPSEEK, 1)
    assert routed.num_shared_experts == 0
    parts = shared.intermediate_size // routed.intermediate_size
    assert (raw.num_shared_experts, raw.num_experts) == (parts, routed.num_experts + parts)
    assert raw.equal(moe.with_shared_experts(routed, shared))
    # The file's own matrix, decoded by hand.
    gate = stored(DEEPSEEK)[f"{ROOT}.gate_proj.weight"]
    assert gate.shape[0] == shared.intermediate_size
    rows = torch.from_numpy(decode(shared, "w13", 0))[: routed.intermediate_size]
    mine = torch.from_numpy(decode(raw, "w13", routed.num_experts))[: routed.intermediate_size]
    assert torch.equal(mine, rows)


def test_all_layers_one_by_one() -> None:
    every = list(load_experts(FIXTURES / DEEPSEEK, None, shared_experts=True))
    assert every and all(raw.num_shared_experts for raw in every)


@pytest.mark.parametrize("name", ["shared_expert", "shared_experts"])
def test_either_name_and_a_gate_beside(tmp_path: Path, name: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        _renamed(tensors, ".shared_experts.", f".{name}.")
        tensors["model.layers.1.mlp.shared_expert_gate.weight"] = torch.ones(1, 128)

    raw = load_experts(changed(tmp_path, DEEPSEEK, change), 1, shared_experts=True)
    own = load_experts(FIXTURES / DEEPSEEK, 1, shared_experts=True)
    assert dataclasses.replace(raw, source=own.source).equal(own)


def test_without_input_scales() -> None:
    raw = load_experts(FIXTURES / DEEPSEEK, 1, shared_experts=True, input_scales=False)
    assert raw.num_shared_experts and raw.a13_input_scale is None


def _lost(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{ROOT}.up_proj.weight_scale_2"]


def _unknown(tensors: dict[str, Tensor]) -> None:
    tensors[f"{ROOT}.extra.weight"] = torch.ones(1)


def _unquantized(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(ROOT) and not name.endswith("_proj.weight")]:
        del tensors[name]
    for projection, shape in (("gate", (64, 128)), ("up", (64, 128)), ("down", (128, 64))):
        tensors[f"{ROOT}.{projection}_proj.weight"] = torch.zeros(shape, dtype=torch.bfloat16) + 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_lost, "expert 0, up: tensor weight_scale_2 is missing .beside .*shared_experts"),
        (_unknown, "layer 1: unused tensor .*shared_experts.extra"),
        (_unquantized, "layer 1: .* cannot join .*shared_experts=False.*scheme of shared must be nvfp4"),
    ],
)
def test_refused(tmp_path: Path, change: Any, text: str) -> None:
    folder = changed(tmp_path, DEEPSEEK, change)
    with pytest.raises(CheckpointError, match=text):
        load_experts(folder, 1, shared_experts=True)
    load_experts(folder, 1)  # as ever: the shared experts are the model's


def test_layers_without_any_and_with_others() -> None:
    with pytest.raises(CheckpointError, match=r"has no shared experts \(tensors under model.layers.0.mlp.shared_exp"):
        load_experts(FIXTURES / QWEN, 0, shared_experts=True)
    with pytest.raises(CheckpointError, match=r"scheme of shared must be nvfp4, .* got none"):
        load_experts(FIXTURES / NEMOTRON, 1, shared_experts=True)


def test_not_written_as_routed_ones() -> None:
    raw, (names, *_) = (
        load_experts(FIXTURES / DEEPSEEK, 1, shared_experts=True),
        open_checkpoint(FIXTURES / DEEPSEEK).layers,
    )
    with pytest.raises(ValueError, match="num_shared_experts must be 0 of a layer that is written, got"):
        layer_tensors(raw, names, format_of(raw))
