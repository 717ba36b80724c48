"""Packed experts where a model is measured, moved, copied, pickled and loaded from a state_dict."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.same_bits import same_bits

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from quantized_models import tiny_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

QWEN = "qwen3_moe_modelopt_nvfp4"
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))


def load(folder: Path | str = QWEN, **options: Any) -> Any:
    moeq_transformers.register(act_format="none")
    return transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / folder, **{"dtype": torch.float32, **options}
    )


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def held(model: Any) -> list[moe.PreparedWeights]:
    return [found.module.moeq_weights.prepared for found in find_experts(model)]


def packed_bytes(model: Any) -> int:
    return sum(t.numel() * t.element_size() for w in held(model) for t in w.tensors().values())


@pytest.mark.parametrize("name", [QWEN, "gpt_oss_mxfp4", "nemotron_h_modelopt_nvfp4", "qwen3_moe_ct_int4_g32"])
def test_memory_and_parameters_are_those_of_the_model(name: str) -> None:
    model = load(name)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    rotary = [b for key, b in model.named_buffers() if "moeq_weights" not in key]
    others = sum(b.numel() * b.element_size() for b in rotary)
    assert packed_bytes(model) > 10_000
    assert model.get_memory_footprint() == own + others + packed_bytes(model)
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / name)
    del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    trainable = model.num_parameters(only_trainable=True)
    assert trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_sizes_by_which_transformers_chooses_devices_count_packed_experts() -> None:
    from transformers.integrations.accelerate import compute_module_sizes

    model = load()
    sizes, _ = compute_module_sizes(model, model.hf_quantizer)
    names = [found.name for found in find_experts(model)]
    assert sum(sizes[name] for name in names) == packed_bytes(model)
    assert sizes[""] == model.get_memory_footprint()


@pytest.mark.parametrize("scheme", [None, "nvfp4", "none"])
def test_device_map_auto_knows_experts_before_they_are_loaded(scheme: str | None, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    options: dict[str, Any] = {"device_map": "auto"}
    folder: Path | str = QWEN
    if scheme is not None:
        tiny_model("mixtral").save_pretrained(tmp_path / "plain")
        folder = tmp_path / "plain"
        options["quantization_config"] = moeq_transformers.MoeqConfig(scheme=scheme)
    whole = load(folder, **options).get_memory_footprint()
    # Beside the last layer, of which accelerate keeps some free, everything would fit but for the experts.
    dense = whole - packed_bytes(load(folder, **options))
    model = load(folder, **options, max_memory={"cpu": 3 * whole})
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert not [name for name, _ in model.named_buffers() if "reserved" in name]
    with pytest.raises(ValueError, match="device_map must not offload to disk"):
        load(folder, **options, max_memory={"cpu": int(1.1 * dense)})


def test_half_precision_leaves_packed_tensors_alone() -> None:
    model = tiny_model("qwen3_moe")
    moeq_transformers.quantize_model(model, "nvfp4")
    before = [{name: t.dtype for name, t in w.tensors().items()} for w in held(model)]
    model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert [{name: t.dtype for name, t in w.tensors().items()} for w in held(model)] == before
    buffers = dict(model.named_buffers())
    for found in find_experts(model):
        for name, tensor in found.module.moeq_weights.prepared.tensors().items():
            assert buffers[f"{found.name}.moeq_weights.{name}"] is tensor


def test_the_meta_device_has_nothing_to_move_back() -> None:
    model = load().to("meta")
    assert {b.device.type for b in model.buffers()} == {"meta"}
    with pytest.raises(ValueError, match="experts on the meta device have no data to move to cpu"):
        find_experts(model)[0].module.to_empty(device="cpu")


def test_copies_are_models_of_their_own() -> None:
    model = load()
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), logits(model))
    mine, theirs = ({t.data_ptr() for w in held(m) for t in w.tensors().values()} for m in (model, other))
    assert not mine & theirs
    buffers = dict(find_experts(other)[0].module.moeq_weights.named_buffers())
    assert all(buffers[name] is tensor for name, tensor in held(other)[0].tensors().items())


@pytest.mark.parametrize("name", [QWEN, "gpt_oss_mxfp4"])
def test_pickled_models_come_back(name: str) -> None:
    model = load(name)
    file = io.BytesIO()
    torch.save(model, file)
    again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert all(
        same_bits(here, there)
        for w, other in zip(held(model), held(again), strict=True)
        for here, there in zip(w.tensors().values(), other.tensors().values(), strict=True)
    )
    assert torch.equal(logits(again), logits(model))


def other_weights(name: str = QWEN) -> Any:
    """The same model on other weights."""
    model = load(name)
    for found in find_experts(model):
        holder = found.module.moeq_weights
        raw = moe.restore(holder.prepared)
        holder.prepared = moe.prepare(
            dataclasses.replace(raw, w13=raw.w13.flip(0).contiguous()), act_format="none", backend=holder.backend
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0).contiguous()
    return model


@pytest.mark.parametrize("name", [QWEN, "gpt_oss_mxfp4", "nemotron_h_modelopt_nvfp4", "qwen3_moe_fp8_block"])
def test_state_dicts_go_round(name: str) -> None:
    model, other = load(name), other_weights(name)
    assert not torch.equal(logits(other), logits(model))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    addresses = [t.data_ptr() for w in held(other) for t in w.tensors().values()]
    other.load_state_dict(state, strict=True)
    assert [t.data_ptr() for w in held(other) for t in w.tensors().values()] == addresses
    assert torch.equal(logits(other), logits(model))


def test_a_state_dict_of_another_backend_is_laid_out_anew() -> None:
    model = load()
    theirs = copy.deepcopy(model)
    for found in find_experts(theirs):
        holder = found.module.moeq_weights
        holder.prepared = moe.prepare(moe.restore(holder.prepared), act_format="none", backend="reference")
    assert {w.backend for w in held(theirs)} != {w.backend for w in held(model)}
    other = other_weights()
    other.load_state_dict(theirs.state_dict(), strict=True)
    assert {w.backend for w in held(other)} == {w.backend for w in held(model)}
    assert torch.equal(logits(other), logits(model))


def test_a_model_on_the_meta_device_is_assigned_a_state_dict() -> None:
    model = load()
    other = load().to("meta")
    with pytest.raises(RuntimeError, match="experts on the meta device have no memory to load into: give assign=True"):
        other.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict(), assign=True)
    assert all(
        a is b
        for w, o in zip(held(model), held(other), strict=True)
        for a, b in zip(w.tensors().values(), o.tensors().values(), strict=True)
    )


def test_state_dicts_that_do_not_fit_say_so() -> None:
    model = load()
    root = "model.layers.0.mlp.experts.moeq_weights"
    state = dict(model.state_dict())
    lost = {name: t for name, t in state.items() if not name.startswith(root)}
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{root}.a13_input_scale"'):
        model.load_state_dict(lost)
    partial = {name: t for name, t in state.items() if name != f"{root}.w13"}
    with pytest.raises(RuntimeError, match=rf"{root}: fields of PreparedWeights must match, .* missing \['w13'\]"):
        model.load_state_dict(partial)
    other = load()
    for found in find_experts(other):
        raw = moe.restore(found.module.moeq_weights.prepared)
        found.module.moeq_weights.prepared = moe.prepare(raw, activation="gelu", act_format="none")
    with pytest.raises(RuntimeError, match="activation must be 'silu' as prepared, got 'gelu'"):
        model.load_state_dict(other.state_dict())
    plain = tiny_model("qwen3_moe")
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{root}'):
        plain.load_state_dict(state)
