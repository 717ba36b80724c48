"""Packed experts in models that accelerate places: device maps and offloading to the CPU."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

QWEN = CHECKPOINTS / "qwen3_moe_modelopt_nvfp4"
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))


def load(**options: Any) -> Any:
    moeq_transformers.register(act_format="none")
    return transformers.AutoModelForCausalLM.from_pretrained(QWEN, dtype=torch.float32, **options)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.cpu()


def on_meta(model: Any) -> set[str]:
    return {name for name, p in model.named_parameters() if p.device.type == "meta"}


@pytest.mark.parametrize("device_map", ["auto", "balanced", {"": "cpu"}])
def test_device_maps(device_map: Any) -> None:
    """transformers makes a map that is asked for by name; it counts packed experts."""
    model = load(device_map=device_map)
    assert all(hasattr(found.module, "moeq_weights") for found in find_experts(model))
    if not torch.cuda.is_available():
        assert torch.equal(logits(model), logits(load()))


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offloading_leaves_packed_experts_where_they_are(offload_buffers: bool) -> None:
    """Parameters come to the device for their module's forward; packed experts run where they were prepared."""
    want, model = logits(load()), load()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=offload_buffers)
    assert "model.layers.0.self_attn.q_proj.weight" in on_meta(model)
    packed = [found.module.moeq_weights.prepared for found in find_experts(model)]
    assert all(t.device.type == "cpu" for w in packed for t in w.tensors().values())
    for _ in range(2):
        assert torch.equal(logits(model), want)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)


def test_offloaded_to_disk_is_refused() -> None:
    with pytest.raises(ValueError, match="device_map must not offload to disk for a modelopt checkpoint"):
        load(device_map={"": "disk"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_on_another_device_are_refused_or_right() -> None:
    """A layer that a map leaves on the CPU has its experts prepared there, and their op says so; or loading does."""
    places = {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
    with pytest.raises((ValueError, RuntimeError), match="device"):
        logits(load(device_map={**places, "model.layers.0": 0, "model.layers.1": "cpu"}))
