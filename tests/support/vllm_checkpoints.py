"""The third-party fixtures in a form that vLLM runs on a CPU: its attention there has no heads of 16.

Experts, router and embeddings are the fixture's, bit for bit. Attention is replaced by random weights with larger
heads, unquantized, and the config says so.
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
    if quantization["quant_method"] == "fp8":
        projections = [f"self_attn.{p}_proj" for p in "qkvo"]
        named = [f"model.layers.{i}.{p}" for i in range(config["num_hidden_layers"]) for p in projections]
        quantization["modules_to_not_convert"] = [*quantization.get("modules_to_not_convert", []), *named]
