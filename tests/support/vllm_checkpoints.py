"""Checkpoints that vLLM runs on a CPU.

The third-party fixtures have heads of 16, which vLLM's attention there has not: `graft` keeps experts, router and
embeddings bit for bit and replaces the attention by random weights with larger heads, unquantized, and the config says
so.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_moe_ops as moe

HEAD = 64


def graft(fixture: Path, folder: Path) -> Path:
    """Write the fixture with another attention into `folder`.

    Raises ValueError for a tensor of the attention that has no known place.
    """
    folder.mkdir(parents=True)
    config = json.loads((fixture / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(fixture.glob("model*.safetensors")):
        tensors |= load_file(file)
    layers = {m[1] for name in tensors if (m := re.match(r"(.*layers\.\d+\.self_attn)\.", name))}
    kept = {name: t for name, t in tensors.items() if ".self_attn." not in name}
    generator = torch.Generator().manual_seed(1)
    for prefix in sorted(layers):
        parts = {name.removeprefix(f"{prefix}.") for name in tensors if name.startswith(f"{prefix}.")}
        kept |= {f"{prefix}.{part}": value for part, value in _attention(parts, config, generator).items()}
    config |= {"head_dim": HEAD, "max_position_embeddings": 128}
    _ignore_attention(config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    if (fixture / "generation_config.json").exists():
        shutil.copy(fixture / "generation_config.json", folder)
    return folder


def _attention(parts: set[str], config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    heads, groups, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (heads * HEAD, hidden),
        "k_proj.weight": (groups * HEAD, hidden),
        "v_proj.weight": (groups * HEAD, hidden),
        "o_proj.weight": (hidden, heads * HEAD),
        "q_norm.weight": (HEAD,),
        "k_norm.weight": (HEAD,),
        "q_proj.bias": (heads * HEAD,),
        "k_proj.bias": (groups * HEAD,),
        "v_proj.bias": (groups * HEAD,),
        "o_proj.bias": (hidden,),
        "sinks": (heads,),
    }
    scales = {p for p in parts if p.endswith(("_scale", "_scale_2", "_scale_inv"))}
    if unknown := parts - scales - shapes.keys():
        raise ValueError(f"parts of the attention must be among {sorted(shapes)}, got {sorted(unknown)}")
    made = {}
    for part in sorted(parts - scales):
        noise = torch.randn(shapes[part], generator=generator) * 0.08
        made[part] = (1 + noise if "norm" in part else noise).to(torch.bfloat16)
    return made


def _ignore_attention(config: dict[str, Any]) -> None:
    quantization = config["quantization_config"]
    if quantization["quant_method"] == "modelopt":
        quantization["ignore"] = [*quantization.get("ignore", []), "*self_attn*"]
    if quantization["quant_method"] == "compressed-tensors":
        quantization["ignore"] = [*quantization.get("ignore", []), "re:.*self_attn.*"]
    if quantization["quant_method"] == "fp8":
        projections = [f"self_attn.{p}_proj" for p in "qkvo"]
        named = [f"model.layers.{i}.{p}" for i in range(config["num_hidden_layers"]) for p in projections]
        quantization["modules_to_not_convert"] = [*quantization.get("modules_to_not_convert", []), *named]


# Architectures with shared experts: one with a gate, one without and with a bias of its router.
SHARED = {
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 64},
    "glm4_moe": {
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.5,
    },
}


def with_shared_experts(folder: Path, architecture: str = "qwen2_moe") -> Path:
    """A small model of SHARED with random weights, its routed experts in ModelOpt's NVFP4 format; shared ones are plain."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 96}
    sizes |= {"num_hidden_layers": 1, "num_experts_per_tok": 2, "head_dim": HEAD, **SHARED[architecture]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = AutoConfig.for_model(architecture, **sizes, **heads, norm_topk_prob=True, tie_word_embeddings=False)
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = {}
    corrections = {name: buffer for name, buffer in model.named_buffers() if "correction_bias" in name}
    for name, parameter in [*model.named_parameters(), *corrections.items()]:
        noise = torch.randn(parameter.shape) * (0.35 if ".gate.weight" in name else 0.1)
        value = (1 + noise if "norm" in name else noise).to(parameter.dtype)
        if ".experts." not in name:
            tensors[name] = value
        parameter.data.copy_(value)
    experts = model.model.layers[0].mlp.experts
    raw = moe.quantize_experts(experts.gate_up_proj.data, experts.down_proj.data, scheme="nvfp4")
    tensors |= {f"model.layers.0.mlp.experts.{name}": t.clone() for name, t in _modelopt_nvfp4(raw).items()}
    folder.mkdir(parents=True)
    written = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    written["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}, "targets": ["Linear"]}},
        "ignore": ["lm_head", "model.embed_tokens", "*self_attn*", "*shared_expert*", "*mlp.gate"],
    }
    (folder / "config.json").write_text(json.dumps(written, default=str))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_quantized_shared_experts(folder: Path, architecture: str, format_name: str) -> tuple[Path, Path]:
    """A small model whose routed and shared experts are in one format, and the same model dequantized.

    GLM-4.5's block of shared experts is twice as wide as a routed expert.
    """
    from quantized_models import write_model

    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "vocab_size": 96, "num_hidden_layers": 1}
    sizes |= {"head_dim": HEAD, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    own = {
        "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 128, "norm_topk_prob": True},
        "glm4_moe": {"first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    }[architecture]
    written = write_model(folder, architecture, format_name, attention=False, **sizes, **own)
    config = json.loads((written.quantized / "config.json").read_text()) | {"dtype": "bfloat16"}
    _ignore_attention(config)
    (written.quantized / "config.json").write_text(json.dumps(config))
    return written.quantized, written.dequantized


def _modelopt_nvfp4(raw: moe.RawWeights) -> dict[str, Tensor]:
    """ "EXPERT.PROJECTION.PART" -> tensor."""
    assert raw.w13_scale is not None and raw.w2_scale is not None
    assert raw.w13_scale_2 is not None and raw.w2_scale_2 is not None
    gate, up = raw.w13.chunk(2, 1)
    gate_scale, up_scale = raw.w13_scale.chunk(2, 1)
    gate_2, up_2 = raw.w13_scale_2[:, 0], raw.w13_scale_2[:, -1]
    matrices = {"gate_proj": (gate, gate_scale, gate_2), "up_proj": (up, up_scale, up_2)}
    matrices["down_proj"] = (raw.w2, raw.w2_scale, raw.w2_scale_2)
    parts = ("weight", "weight_scale", "weight_scale_2")
    return {
        f"{expert}.{projection}.{part}": tensor[expert].contiguous()
        for projection, tensors in matrices.items()
        for part, tensor in zip(parts, tensors, strict=True)
        for expert in range(raw.num_experts)
    }
