"""The inverse of reading: one projection of one expert as the tensors that a file of some format holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.checkpoints.fields import Fields
from torch_moe_ops.checkpoints.nibbles import CODES_PER_WORD, pack_words
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.weights.raw_weights import RawWeights

MODELOPT = "modelopt"
COMPRESSED_TENSORS = "compressed-tensors"
GPT_OSS = "mxfp4"


@dataclass(frozen=True)
class WrittenFormat:
    """How the experts of a layer are written.

    Args:
        producer: quant_method of config.json; "" for unquantized weights.
        kind: quant_algo of ModelOpt, format of compressed-tensors.
        parts: fields of one projection -> part -> tensor.
        weights, inputs: what compressed-tensors' config says of weights and activations.
    """

    producer: str
    kind: str
    parts: Callable[[Fields], dict[str, Tensor]]
    weights: dict[str, Any] | None = None
    inputs: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """For messages: such as "modelopt NVFP4"."""
        return f"{self.producer} {self.kind}".strip() or "unquantized"


def fields_of(raw: RawWeights, expert: int, projection: str) -> Fields:
    """What `Format.read` gives for a projection ("gate", "up" or "down"), from the layer that was made of it."""
    first = projection != "down"
    name = "w13" if first else "w2"
    halves = 2 if first and raw.is_gated else 1
    half = 1 if projection == "up" and halves == 2 else 0
    sources = {
        "weight": getattr(raw, name),
        "scale": getattr(raw, f"{name}_scale"),
        "zero_point": getattr(raw, f"{name}_zero_point"),
        "bias": getattr(raw, f"{name}_bias"),
    }
    fields = {key: t[expert].chunk(halves)[half] for key, t in sources.items() if _has_halves(t, halves)}
    fields |= {key: t[expert] for key, t in sources.items() if t is not None and key not in fields}
    scale_2, inputs = getattr(raw, f"{name}_scale_2"), getattr(raw, "a13_input_scale" if first else "a2_input_scale")
    if scale_2 is not None:
        of_expert = scale_2[expert].reshape(-1)
        fields["scale_2"] = of_expert[half if of_expert.numel() > 1 else 0]
    if inputs is not None:
        fields["input_scale"] = inputs if inputs.ndim == 0 else inputs[expert]
    return fields


def _has_halves(tensor: Tensor | None, halves: int) -> bool:
    """Whether an expert's first dimension covers the rows of w13; a scale of the whole matrix has one element."""
    return tensor is not None and tensor.shape[1] % halves == 0 and tensor.shape[1] > 1


def format_of(raw: RawWeights, *, gpt_oss: bool = False) -> WrittenFormat:
    """The format in which a layer is written: ModelOpt's for nvfp4, mxfp8 and calibrated fp8, else compressed-tensors'.

    Args:
        gpt_oss: the files of the model hold all experts in one tensor, as gpt-oss does: mxfp4 is written its way.

    Raises: ValueError for a scheme that no format of other tools has.
    """
    if raw.scheme == "none":
        return WrittenFormat("", "", _plain)
    if raw.scheme == "nvfp4":
        return WrittenFormat(MODELOPT, "NVFP4" if raw.a13_input_scale is not None else "W4A16_NVFP4", _nvfp4)
    if raw.scheme == "mxfp8":
        return WrittenFormat(MODELOPT, "MXFP8", _scaled)
    if raw.scheme == "mxfp4":
        return WrittenFormat(GPT_OSS, "", _blocks) if gpt_oss else _mxfp4()
    if raw.scheme in ("fp8", "fp8_block"):
        return _fp8(raw)
    if raw.scheme in ("int4", "mxint4"):
        return WrittenFormat(COMPRESSED_TENSORS, "pack-quantized", _int4, weights=_integers(raw, 4))
    if raw.scheme == "int8":
        inputs = _inputs(8, "int", is_static=raw.a13_input_scale is not None)
        return WrittenFormat(COMPRESSED_TENSORS, "int-quantized", _int8, weights=_integers(raw, 8), inputs=inputs)
    raise ValueError(f"no format that other tools read stores weights of scheme {raw.scheme!r}")


def _mxfp4() -> WrittenFormat:
    weights = _weights(4, "float", "group", group_size=32, scale_dtype="torch.uint8")
    return WrittenFormat(COMPRESSED_TENSORS, "mxfp4-pack-quantized", _packed_mxfp4, weights=weights)


def _fp8(raw: RawWeights) -> WrittenFormat:
    """ModelOpt's FP8 has one scale for each matrix and a calibrated one for its input."""
    assert raw.w13_scale is not None
    calibrated = raw.a13_input_scale is not None
    inputs = _inputs(8, "float", is_static=calibrated)
    if raw.scheme == "fp8_block":
        weights = _weights(8, "float", "block", block_structure=[128, 128])
        inputs |= {"strategy": "group", "group_size": 128}
    elif raw.w13_scale.ndim == 3:
        weights = _weights(8, "float", "channel")
    elif calibrated:
        return WrittenFormat(MODELOPT, "FP8", _fp8_per_tensor)
    else:
        weights = _weights(8, "float", "tensor")
    return WrittenFormat(COMPRESSED_TENSORS, "float-quantized", _fp8_compressed, weights=weights, inputs=inputs)


def _weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """compressed-tensors' words for weights."""
    said: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": None}
    return {**said, "dynamic": False, **more}


def _integers(raw: RawWeights, bits: int) -> dict[str, Any]:
    assert raw.w13_scale is not None and raw.w2_scale is not None
    groups = raw.w13_scale.shape[2], raw.w2_scale.shape[2]
    sizes = raw.hidden_size // groups[0], raw.intermediate_size // groups[1]
    if groups == (1, 1):
        grouping: dict[str, Any] = {"strategy": "channel"}
    elif sizes[0] == sizes[1]:
        grouping = {"strategy": "group", "group_size": sizes[0]}
    else:
        raise ValueError(f"compressed-tensors has one group size for all projections, got {sizes} of w13 and w2")
    return _weights(bits, "int", **grouping) | {"symmetric": raw.w13_zero_point is None}


def _inputs(bits: int, kind: str, *, is_static: bool) -> dict[str, Any]:
    how = {"strategy": "tensor", "dynamic": False} if is_static else {"strategy": "token", "dynamic": True}
    return {"num_bits": bits, "type": kind, "symmetric": True, "group_size": None, **how}


def _with_bias(parts: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    return parts | {"bias": fields["bias"]} if "bias" in fields else parts


def _plain(fields: Fields) -> dict[str, Tensor]:
    return _with_bias({"weight": fields["weight"]}, fields)


def _scaled(fields: Fields) -> dict[str, Tensor]:
    return _with_bias({"weight": fields["weight"], "weight_scale": fields["scale"]}, fields)


def _nvfp4(fields: Fields) -> dict[str, Tensor]:
    parts = _scaled(fields) | {"weight_scale_2": fields["scale_2"]}
    return parts | {"input_scale": fields["input_scale"]} if "input_scale" in fields else parts


def _fp8_per_tensor(fields: Fields) -> dict[str, Tensor]:
    scales = {"weight_scale": fields["scale"].reshape(()), "input_scale": fields["input_scale"]}
    return _scaled(fields) | scales


def _fp8_compressed(fields: Fields) -> dict[str, Tensor]:
    return _with_compressed_input(_scaled(fields), fields)


def _with_compressed_input(parts: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    return parts | {"input_scale": fields["input_scale"].reshape(1)} if "input_scale" in fields else parts


def _packed_mxfp4(fields: Fields) -> dict[str, Tensor]:
    return _with_bias({"weight_packed": fields["weight"], "weight_scale": fields["scale"]}, fields)


def _blocks(fields: Fields) -> dict[str, Tensor]:
    """gpt-oss: 16 bytes of codes for each exponent."""
    rows, groups = fields["scale"].shape
    return _with_bias({"blocks": fields["weight"].reshape(rows, groups, 16), "scales": fields["scale"]}, fields)


def _int4(fields: Fields) -> dict[str, Tensor]:
    rows, words = fields["weight"].shape
    parts = {
        "weight_packed": fields["weight"],
        "weight_scale": fields["scale"],
        "weight_shape": torch.tensor([rows, words * SCHEMES["int4"].pack]),
    }
    if "zero_point" in fields:
        # Eight rows share a word, unlike the codes, of which eight columns do.
        codes = fields["zero_point"].new_zeros(fields["zero_point"].shape[1], rows + -rows % CODES_PER_WORD)
        codes[:, :rows] = fields["zero_point"].t()
        parts["weight_zero_point"] = pack_words(codes).t()
    return _with_bias(parts, fields)


def _int8(fields: Fields) -> dict[str, Tensor]:
    parts = _with_compressed_input(_scaled(fields), fields)
    return parts | {"weight_zero_point": fields["zero_point"]} if "zero_point" in fields else parts
