"""Tiny transformers models as checkpoints of every format, encoded here from the formats' definitions.

Nothing of the library is used: a checkpoint and the weights that it means come from the same few lines of torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Parts = dict[str, Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
INPUT_SCALE = torch.tensor(0.01)


def _e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values within +-6 -> codes packed along K (low nibble first), and what they mean."""
    index = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = index | (values < 0).long() << 3
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), E2M1[index] * values.sign()


def _nvfp4(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, e4m3 scales per 16 of K, the scale of the matrix (multiplies), meaning."""
    scale_2 = w.abs().amax() / (6 * 448)
    blocks = w.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1) / (6 * scale_2)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    factor = scale.float()[..., None] * scale_2
    codes, values = _e2m1((blocks / factor).clamp(-6, 6).flatten(-2))
    return codes, scale, scale_2, values * factor.expand_as(blocks).flatten(-2)


def _exponents(w: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """e8m0 bytes per 32 of K that never clip, and the factors [..., K]."""
    amax = w.unflatten(-1, (-1, 32)).abs().amax(-1)
    exponent = torch.ceil(torch.log2(amax / largest))
    return (exponent + 127).to(torch.uint8), (2.0**exponent).repeat_interleave(32, -1)


def modelopt_nvfp4(w: Tensor) -> tuple[Parts, Tensor]:
    codes, scale, scale_2, meaning = _nvfp4(w)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2, "input_scale": INPUT_SCALE}, meaning


def modelopt_fp8(w: Tensor) -> tuple[Parts, Tensor]:
    scale = w.abs().amax() / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": INPUT_SCALE}, codes.float() * scale


def mxfp8(w: Tensor) -> tuple[Parts, Tensor]:
    exponents, factor = _exponents(w, 448)
    codes = (w / factor).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": exponents}, codes.float() * factor


def ct_nvfp4(w: Tensor) -> tuple[Parts, Tensor]:
    codes, scale, scale_2, meaning = _nvfp4(w)
    globals_ = {"weight_global_scale": 1 / scale_2, "input_global_scale": 1 / INPUT_SCALE}
    return {"weight_packed": codes, "weight_scale": scale} | {k: v.reshape(1) for k, v in globals_.items()}, meaning


def ct_mxfp4(w: Tensor) -> tuple[Parts, Tensor]:
    exponents, factor = _exponents(w, 6)
    codes, values = _e2m1(w / factor)
    return {"weight_packed": codes, "weight_scale": exponents}, values * factor


def _int4(w: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 with 8 for zero, scales per 32 of K, meaning."""
    blocks = w.unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(-1) / 7.5).to(scale_dtype)
    codes = (blocks / scale.float()[..., None]).round().clamp(-8, 7)
    return (codes.flatten(-2) + 8).int(), scale, (codes * scale.float()[..., None]).flatten(-2)


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[n, 8m] -> int32 [n, m]; nibble i of a word is column order[i] of its eight."""
    groups = codes.long().unflatten(-1, (-1, 8))
    word = sum(groups[..., column] << 4 * nibble for nibble, column in enumerate(order))
    return torch.where(word >= 2**31, word - 2**32, word).int()


def ct_int4(w: Tensor) -> tuple[Parts, Tensor]:
    codes, scale, meaning = _int4(w, torch.bfloat16)
    return {"weight_packed": _words(codes), "weight_scale": scale, "weight_shape": torch.tensor(w.shape)}, meaning


def ct_int8(w: Tensor) -> tuple[Parts, Tensor]:
    scale = w.abs().amax(-1, keepdim=True) / 127.5
    codes = (w / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def ct_fp8(w: Tensor) -> tuple[Parts, Tensor]:
    scale = w.abs().amax(-1, keepdim=True) / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_block(w: Tensor) -> tuple[Parts, Tensor]:
    rows, columns = ((size + 127) // 128 for size in w.shape)
    scale, factor = torch.empty(rows, columns), torch.empty_like(w)
    for i in range(rows):
        for j in range(columns):
            tile = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = factor[tile] = w[tile].abs().amax() / 448
    codes = (w / factor).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * factor


def gptq(w: Tensor) -> tuple[Parts, Tensor]:
    codes, scale, meaning = _int4(w, torch.float16)
    zeros = torch.full((scale.shape[1], w.shape[0]), 7)  # version 1 of the format stores zero - 1
    parts = {"qweight": _words(codes).T, "qzeros": _words(zeros), "scales": scale.T}
    return parts | {"g_idx": torch.arange(w.shape[1], dtype=torch.int32) // 32}, meaning


def awq(w: Tensor) -> tuple[Parts, Tensor]:
    codes, scale, meaning = _int4(w, torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    zeros = torch.full((scale.shape[1], w.shape[0]), 8)
    return {"qweight": _words(codes.T, order), "qzeros": _words(zeros, order), "scales": scale.T}, meaning


def _compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": kind}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }


def _weights(bits: int, kind: str, strategy: str, group: int | None = None) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": True}


_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
FORMATS: dict[str, tuple[Callable[[Tensor], tuple[Parts, Tensor]], dict[str, Any]]] = {
    "ModelOpt NVFP4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "ModelOpt FP8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "ModelOpt MXFP8": (mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "compressed-tensors NVFP4": (
        ct_nvfp4,
        _compressed(
            "nvfp4-pack-quantized",
            _weights(4, "float", "tensor_group", 16),
            {"num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group", "group_size": 16},
        ),
    ),
    "compressed-tensors MXFP4": (ct_mxfp4, _compressed("mxfp4-pack-quantized", _weights(4, "float", "group", 32))),
    "compressed-tensors MXFP8": (mxfp8, _compressed("mxfp8-quantized", _weights(8, "float", "group", 32))),
    "compressed-tensors INT4": (ct_int4, _compressed("pack-quantized", _weights(4, "int", "group", 32))),
    "compressed-tensors INT8": (
        ct_int8,
        _compressed("int-quantized", _weights(8, "int", "channel"), {"num_bits": 8, "type": "int", **_TOKEN}),
    ),
    "compressed-tensors FP8": (
        ct_fp8,
        _compressed("float-quantized", _weights(8, "float", "channel"), {"num_bits": 8, "type": "float", **_TOKEN}),
    ),
    "FP8 128x128": (
        fp8_block,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
}

_PACKS_ROWS = ("GPTQ", "AWQ")  # eight zero points of rows a word

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_GROUPED = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
# model_type -> settings of a tiny model. head sizes differ from hidden / heads where the architecture says so.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "topk_method": "greedy"},
    "deepseek_v3": {**_ROUTED, **_LATENT, **_GROUPED},
    "glm4_moe": {**_ROUTED, **_GROUPED},
    "dots1": {**_ROUTED, **_GROUPED},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_offset": 0, "attn_layer_period": 1},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "intermediate_size": 32,
        "interleave_moe_layer_step": 1,
    },
}

_SPARSE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_LINEAR_ATTENTION = {
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# In one format by the usual tests, in all of them by the slow ones; some are not in older releases of transformers.
MORE_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "granitemoeshared": {**_SPARSE, "shared_intermediate_size": 32},
    "granitemoe_swa": _SPARSE,
    "exaone_moe": {
        **_EXPERTS,
        **_ONE_GROUP,
        "num_shared_experts": 1,
        "layer_types": ["full_attention", "full_attention"],
        "is_moe_layer": [True, True],
        "first_k_dense_replace": 0,
        "sliding_window": 8,
    },
    "hunyuan_v1_moe": {**_EXPERTS, "moe_topk": 2, "num_shared_expert": 1},
    "glm4_moe_lite": {**_ROUTED, **_LATENT, **_GROUPED},
    "solar_open": {**_ROUTED, **_ONE_GROUP},
    "afmoe": {
        **_EXPERTS,
        **_ONE_GROUP,
        "num_shared_experts": 1,
        "num_dense_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
    },
    "laguna": _EXPERTS,
    "cohere2_moe": _EXPERTS,
    "mellum": _EXPERTS,
    "mimo_v2_flash": _ROUTED,
    "hy_v3": _EXPERTS,
    "qwen3_next": {**_EXPERTS, **_LINEAR_ATTENTION},
    "qwen3_5_moe_text": {**_EXPERTS, **_LINEAR_ATTENTION},
    "axk1": {**_ROUTED, **_LATENT, **_GROUPED},
    "minimax": {**_SPARSE, "layer_types": ["full_attention", "full_attention"]},
    "kimi_linear": _EXPERTS,
    "deepseek_v32": {
        **_ROUTED,
        **_LATENT,
        **_GROUPED,
        "index_topk": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "dbrx": {
        "d_model": 64,  # what its other configs take from it is taken before `hidden_size` is understood
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "jetmoe": {**_SPARSE, "kv_channels": 16},
}

REFUSED_FORMAT = "ModelOpt NVFP4"
# Those whose experts this library does not run: named otherwise, or not run through transformers' experts interface.
REFUSED: dict[str, dict[str, Any]] = {
    "longcat_flash": {
        **_LATENT,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
}

_LINEAR = re.compile(r"\.(layers|blocks)\..+(_proj|Wqkv|experts\.\d+\.w[123])\.weight$")


_DBRX = re.compile(r"\.experts\.mlp\.(w1|v1|w2)$")
_FUSED = re.compile(r"\.(gate_up_proj|down_proj|input_linear|output_linear)(\.weight)?$")


def tiny_model(architecture: str, **changes: Any) -> Any:
    """A random model in float32 whose logits react to every expert. changes: of its config."""
    settings = {**_SIZES, **(ARCHITECTURES | MORE_ARCHITECTURES | REFUSED)[architecture], **changes}
    config = AutoConfig.for_model(architecture, **settings)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if tensor.ndim >= 2 and tensor.is_floating_point():
            tensor.copy_(torch.randn_like(tensor) * (0.5 if "embed" in name else 1.5 * tensor.shape[-1] ** -0.5))
    return model.eval()


@dataclass
class Written:
    """A checkpoint in some format, and the same model on what its tensors mean."""

    quantized: Path
    dequantized: Path
    linears: list[str] = field(default_factory=list)  # quantized outside the experts


def write_model(
    folder: Path, architecture: str, format_name: str, *, experts: bool = True, attention: bool = True, **changes: Any
) -> Written:
    """Quantize every projection of the layers, or all but those of experts or attention. changes: of the config."""
    encode, settings = FORMATS[format_name]
    written = Written(folder / "quantized", folder / "dequantized")
    tiny_model(architecture, **changes).save_pretrained(written.dequantized)
    tensors = load_file(written.dequantized / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        meant[name] = tensor.clone()
        matrices = _matrices(name, meant[name], experts) if attention or ".self_attn." not in name else []
        if format_name in _PACKS_ROWS and any(matrix.shape[0] % 8 for _, matrix in matrices):
            matrices = []  # such tools leave it as it is
        for module, matrix in matrices:
            parts, meaning = encode(matrix.contiguous())
            matrix.copy_(meaning)
            stored |= {
                f"{module}.{part}": value.clone(memory_format=torch.contiguous_format) for part, value in parts.items()
            }
            if ".experts." not in module:
                written.linears.append(name)
        if not matrices:
            stored[name] = tensor
    save_file(meant, written.dequantized / "model.safetensors", metadata={"format": "pt"})
    written.quantized.mkdir()
    save_file(stored, written.quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((written.dequantized / "config.json").read_text())
    (written.quantized / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return written


def _matrices(name: str, tensor: Tensor, experts: bool) -> list[tuple[str, Tensor]]:
    """The matrices of a tensor that are quantized, as views, by the name of their module.

    Experts in one tensor are split into single ones, as the tools do that write such checkpoints.
    """
    if dbrx := _DBRX.search(name):
        # Rows of all experts below each other; ModelOpt makes linears of them.
        single = tensor.unflatten(0, (4, -1)) if experts else ()
        root = f"{name[: dbrx.start(1)]}{dbrx[1]}_linear"
        return [(f"{root}.{e}", matrix.T if dbrx[1] == "w2" else matrix) for e, matrix in enumerate(single)]
    if ".self_attention.experts." in name:  # JetMoe's attention, which is no gated layer
        return []
    fused = _FUSED.search(name)
    if tensor.ndim == 3 and fused and experts:
        root = f"{name[: fused.start()].removesuffix('.experts')}.experts"
        # Llama 4 keeps [K, rows]; the others' matrices are [rows, K].
        found = [(e, matrix.T if "feed_forward" in root else matrix) for e, matrix in enumerate(tensor)]
        if fused[1] in ("down_proj", "output_linear"):
            return [(f"{root}.{e}.down_proj", matrix) for e, matrix in found]
        halves = [(e, *pair.chunk(2)) for e, pair in found]
        return [
            (f"{root}.{e}.{p}_proj", half) for e, *pair in halves for p, half in zip(("gate", "up"), pair, strict=True)
        ]
    if tensor.ndim != 2 or not _LINEAR.search(name) or not (experts or ".experts." not in name):
        return []
    return [(name.removesuffix(".weight"), tensor)]


def _table() -> str:
    heads = [name.replace("compressed-tensors", "CT") for name in FORMATS]
    rows = [[f"`{name}`", *["yes"] * len(heads)] for name in (*ARCHITECTURES, *MORE_ARCHITECTURES)]
    rows += [[f"`{name}`", *("refused" if form == REFUSED_FORMAT else "-" for form in FORMATS)] for name in REFUSED]
    lines = [["model_type", *heads], ["---"] * (len(heads) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# For the guide: what the test of architectures and formats runs.
TABLE = _table()
