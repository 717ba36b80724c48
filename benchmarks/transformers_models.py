"""Whole transformers models of published shapes on random quantized experts, made in code: no file, no network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import torch_moe_ops as moe
from torch_moe_ops.checkpoints.model_config import activation_fields, parse_config
from torch_moe_ops.core.schemes import get_scheme
from torch_moe_ops.transformers.attach import attach_raw
from torch_moe_ops.transformers.experts import IMPLEMENTATION
from torch_moe_ops.transformers.implementation import register_implementation
from torch_moe_ops.transformers.modules import find_experts
from torch_moe_ops.transformers.routers import replace_routers

# config.json of Qwen/Qwen3-30B-A3B and openai/gpt-oss-20b, as far as it decides shapes; the scheme that is run.
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_30b_a3b": (
        "qwen3_moe",
        "nvfp4",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss_20b": (
        "gpt_oss",
        "mxfp4",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
    ),
}
# For a run that only shows that the program works.
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
STD = 0.02


@torch.no_grad()
def build(
    shape: str,
    device: torch.device,
    *,
    scheme: str | None = None,
    route: bool = True,
    tiny: bool = False,
    layers: int | None = None,
) -> Any:
    """The model in bfloat16 on `device`, its experts prepared for the backend that `prepare` takes there.

    Args:
        shape: a key of SHAPES.
        scheme: nvfp4 or mxfp4; None: the one of SHAPES.
        route: whether routers are moeq::route_hidden.
        tiny: the architecture with TINY's sizes.
        layers: how many there are in place of the architecture's own number.
    """
    model_type, usual, sizes = SHAPES[shape]
    settings = {**sizes, **({k: v for k, v in TINY.items() if k in sizes} if tiny else {})}
    settings["num_hidden_layers"] = layers or settings["num_hidden_layers"]
    if model_type == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        settings["layer_types"] = [kinds[i % 2] for i in range(settings["num_hidden_layers"])]
    config = AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    register_implementation()
    modules = find_experts(model)
    said = parse_config(config.to_dict(), {})
    for found in modules:
        assert found.sizes is not None
        fields = activation_fields(said, is_gated=True, is_gpt_oss=said.is_gpt_oss)
        raw = random_experts(found.sizes, scheme or usual, device, bias=found.module.has_bias, **fields)
        attach_raw(found, raw, device, act_format="none")
    model.to_empty(device=device)
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):
            model.set_submodule(name, type(module)(config=config).to(device))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, STD)
    model.set_experts_implementation(IMPLEMENTATION)
    if route:
        replace_routers(model, modules)
    return model.eval()


def random_experts(
    sizes: tuple[int, int, int], scheme: str, device: torch.device, *, bias: bool, **fields: Any
) -> moe.RawWeights:
    """One layer of random codes whose weights have a standard deviation near STD."""
    experts, hidden, inter = sizes
    tensors: dict[str, Tensor] = {}
    for name, rows, k in (("w13", 2 * inter, hidden), ("w2", hidden, inter)):
        block = get_scheme(scheme).scales
        assert block is not None and get_scheme(scheme).pack == 2, "a 4-bit scheme with scales of blocks"
        tensors[name] = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, device=device)
        shape = (experts, rows, k // block.size)
        if scheme == "nvfp4":
            tensors[f"{name}_scale"] = torch.ones(shape, device=device).to(torch.float8_e4m3fn)
            halves = (experts, 2) if name == "w13" else (experts,)
            tensors[f"{name}_scale_2"] = torch.full(halves, STD / 3, device=device)
        else:
            tensors[f"{name}_scale"] = torch.full(shape, 127 - 7, dtype=torch.uint8, device=device)
        if bias:
            tensors[f"{name}_bias"] = torch.zeros(experts, rows, dtype=torch.bfloat16, device=device)
    return moe.RawWeights(scheme=scheme, **tensors, **fields)
