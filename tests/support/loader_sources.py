"""Small valid checkpoints for fuzzing: the fixtures cut to two experts, and formats that no fixture has."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoints_support import FIXTURES, config_of, stored
from problems import Case, make_raw
from safetensors.torch import save
from torch import Tensor

import torch_moe_ops as moe

ROOT = "model.layers.0.mlp.experts"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_KEPT_EXPERTS = 2


@dataclass(frozen=True)
class Source:
    """A file of tensors, its JSON texts, and what reads it.

    kind: "checkpoint" (load_experts on its folder), "prepared" or "raw" (`load` of that class).
    header, data: what model.safetensors consists of.
    texts: config.json and others, by name.
    """

    name: str
    kind: str
    header: bytes
    data: bytes
    texts: dict[str, bytes] = field(default_factory=dict)


def _source(name: str, kind: str, content: bytes, texts: dict[str, Any] | None = None) -> Source:
    end = 8 + struct.unpack("<Q", content[:8])[0]
    encoded = {file: json.dumps(text).encode() for file, text in (texts or {}).items()}
    return Source(name, kind, content[8:end], content[end:], encoded)


def _fixture(name: str) -> Source:
    """The layers of a fixture with two experts each; beside them, one tensor that is no expert's."""
    tensors, others = {}, 0
    for key, tensor in stored(name).items():
        number = key.partition(".experts.")[2].split(".")[0]
        if number.isdigit() and int(number) >= _KEPT_EXPERTS:
            continue
        others += ".experts." not in key
        if ".experts." in key or others == 1:
            tensors[key] = tensor.contiguous()
    config = config_of(name)
    fused = any(f"experts.{p}" in key for key in tensors for p in ("gate_up_proj", "down_proj"))
    config |= {key: _KEPT_EXPERTS for key in _COUNTS if key in config and not fused}
    texts = {"config.json": config}
    older = FIXTURES / name / "hf_quant_config.json"
    if older.exists():
        texts["hf_quant_config.json"] = json.loads(older.read_text())
    return _source(name, "checkpoint", save(tensors), texts)


def _matrices(hidden: int = 64, inter: int = 32) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}


def _per_expert(make: Any) -> dict[str, Tensor]:
    """{part: tensor} of a matrix (n, k) -> the tensors of two experts."""
    tensors = {}
    for expert in range(_KEPT_EXPERTS):
        for projection, (n, k) in _matrices().items():
            tensors |= {f"{ROOT}.{expert}.{projection}.{part}": t for part, t in make(n, k).items()}
    return tensors


def _written_here() -> list[Source]:
    generator = torch.Generator().manual_seed(12)

    def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        width = torch.empty((), dtype=dtype).element_size()
        return torch.randint(0, 120, (*shape[:-1], shape[-1] * width), generator=generator).byte().view(dtype)

    def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)

    int32, e4m3 = torch.int32, torch.float8_e4m3fn
    formats: dict[str, dict[str, Tensor]] = {
        "gptq": _per_expert(
            lambda n, k: {
                "qweight": codes(k // 8, n, dtype=int32),
                "qzeros": codes(k // 32, n // 8, dtype=int32),
                "scales": scales(k // 32, n),
                "g_idx": torch.arange(k, dtype=int32) // 32,
            }
        ),
        "awq": _per_expert(
            lambda n, k: {
                "qweight": codes(k, n // 8, dtype=int32),
                "qzeros": codes(k // 32, n // 8, dtype=int32),
                "scales": scales(k // 32, n),
            }
        ),
        "int4 with zero points": _per_expert(
            lambda n, k: {
                "weight_packed": codes(n, k // 8, dtype=int32),
                "weight_scale": scales(n, k // 32),
                "weight_shape": torch.tensor([n, k]),
                "weight_zero_point": codes(n // 8, k // 32, dtype=int32),
            }
        ),
        "int8 with zero points": _per_expert(
            lambda n, k: {
                "weight": codes(n, k, dtype=torch.int8),
                "weight_scale": scales(n, 1),
                "weight_zero_point": codes(n, 1, dtype=torch.int8),
            }
        ),
        "mxfp8": _per_expert(lambda n, k: {"weight": codes(n, k, dtype=e4m3), "weight_scale": codes(n, k // 32)}),
        "deepseek_v4": _per_expert(
            lambda n, k: {
                "weight": codes(n, k // 2, dtype=torch.int8),
                "scale": codes(n, k // 32, dtype=torch.float8_e8m0fnu),
            }
        ),
        "bfloat16 with biases": _per_expert(
            lambda n, k: {"weight": scales(n, k, dtype=torch.bfloat16), "bias": scales(n, dtype=torch.bfloat16)}
        ),
        "fused fp8": {
            f"{ROOT}.gate_up_proj": codes(3, 64, 64, dtype=e4m3),
            f"{ROOT}.gate_up_proj_weight_scale": scales(3, dtype=torch.float32),
            f"{ROOT}.down_proj": codes(3, 32, 64, dtype=e4m3),
            f"{ROOT}.down_proj_weight_scale": scales(3, dtype=torch.float32),
        },
    }
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "quantization_config": {"quant_method": "fp8"}}
    made = [_source(name, "checkpoint", save(t), {"config.json": config}) for name, t in formats.items()]
    rows = {
        f"transformer.blocks.0.ffn.experts.mlp.{name}": scales(3 * 32, 64, dtype=torch.bfloat16)
        for name in ("w1", "v1", "w2")
    }
    dbrx = {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 3, "ffn_act_fn": {"name": "silu"}}}
    return [*made, _source("dbrx", "checkpoint", save(rows), {"config.json": dbrx})]


def _saved(folder: Path) -> list[Source]:
    """What RawWeights.save and PreparedWeights.save write."""
    made = []
    cases = [Case(act_format="nvfp4", input_scale="expert", bias=True, per_half=True), Case("int4"), Case("fp8")]
    for case in [*cases, Case("mxfp4", activation="swigluoai", bias=True), Case("none")]:
        raw = make_raw(replace(case, experts=_KEPT_EXPERTS, inter=64))
        raw.save(folder / "saved")
        made.append(_source(f"raw {case.scheme}", "raw", (folder / "saved").read_bytes()))
        act = case.act_format if case.scheme == "nvfp4" else None
        moe.prepare(raw, act_format=act, backend="reference").save(folder / "saved")
        made.append(_source(f"prepared {case.scheme}", "prepared", (folder / "saved").read_bytes()))
    return made


@cache
def sources(folder: Path) -> list[Source]:
    """All of them; `folder` is for files that are written and read back."""
    fixtures = sorted(f.name for f in FIXTURES.iterdir())
    return [*map(_fixture, fixtures), *_written_here(), *_saved(folder)]
