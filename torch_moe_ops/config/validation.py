"""What must hold inside a FusedMoEQuantConfig: pairs, combinations, dtypes, shapes, devices.

Only shapes and dtypes are read, never values: a check must not synchronize with a GPU.
Sizes of the layer are not known here; `FusedMoEConfig.validate_quant_config` checks against them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_moe_ops.config._require import require, require_int, require_type
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc, is_precision_config
from torch_moe_ops.config.formats import FORMATS, FP8, OCP_MX_DTYPES, fixed_block
from torch_moe_ops.config.quant_fields import QuantFields
from torch_moe_ops.config.runnable import check_runnable
from torch_moe_ops.config.shapes import OWNER
from torch_moe_ops.config.weight_scales import check_weight_scales


def validate(config: QuantFields) -> None:
    """Raise ValueError or TypeError that names the first field which does not fit."""
    _check_pairs(config._a1, config._a2, ("a1", "a2"))
    _check_pairs(config._w1, config._w2, ("w1", "w2"))
    _check_formats(config._a1, config._w1)
    tensors = named_tensors(config)
    _check_devices(tensors)
    _check_absences(config, tensors)
    for operand, desc in (("w1", config._w1), ("w2", config._w2)):
        _check_factors(operand, desc)
    _check_layout(config)
    check_runnable(config)
    check_weight_scales(config)
    # After the dimensions: a scale without its first one would otherwise set a wrong number of experts.
    experts = _check_experts(tensors)
    for operand, desc in (("a1", config._a1), ("a2", config._a2)):
        _check_activation(operand, desc, experts)
    _check_constants(config)


def named_tensors(config: QuantFields) -> dict[str, Tensor]:
    """Every tensor of the config under the name by which a caller passed it."""
    found: dict[str, Tensor] = {}
    for operand in ("a1", "a2", "w1", "w2"):
        desc: FusedMoEQuantDesc = getattr(config, f"_{operand}")
        for field, tensor in desc.tensors().items():
            found[field_name(operand, field)] = tensor
    return found


def field_name(operand: str, field: str) -> str:
    """("w1", "alpha") -> "g1_alphas", ("a2", "gscale") -> "a2_gscale"."""
    return f"g{operand[1]}_alphas" if field in ("alpha", "channel_scale") else f"{operand}_{field}"


def _check_pairs(first: FusedMoEQuantDesc, second: FusedMoEQuantDesc, names: tuple[str, str]) -> None:
    for field in ("dtype", "shape"):
        a, b = getattr(first, field), getattr(second, field)
        require(a == b, OWNER, f"_{names[1]}.{field}", f"be {a} like that of {names[0]}", b)
    # A static scale for one GEMM only, or one zero point, is a loader that forgot the other.
    for field in ("scale", "gscale", "zp", "alpha", "channel_scale"):
        has = [getattr(desc, field) is not None for desc in (first, second)]
        given, missing = names if has[0] else names[::-1]
        text = f"be given where {field_name(given, field)} is"
        require(has[0] == has[1], OWNER, field_name(missing, field), text, None)


def _check_formats(act: FusedMoEQuantDesc, weight: FusedMoEQuantDesc) -> None:
    require(act.dtype != "int4", OWNER, "quant_dtype", "not be int4: activations have no 4-bit integer format", "int4")
    accepted = FORMATS[weight.dtype].activations
    names = ", ".join(str(d) for d in accepted)
    require(act.dtype in accepted, OWNER, "quant_dtype", f"be one of {names} for weights {weight.dtype}", act.dtype)


def _check_devices(tensors: dict[str, Tensor]) -> None:
    first = next(iter(tensors), "")
    for name, tensor in tensors.items():
        device = tensors[first].device
        require(tensor.device == device, OWNER, name, f"be on {device} like {first}", tensor.device)


def _check_absences(config: QuantFields, tensors: dict[str, Tensor]) -> None:
    """No tensor that nothing would read."""
    act, weight = config._a1.dtype, config._w1.dtype
    for i in "12":
        if act is None or fixed_block(act) is not None:
            absent = f"a{i}_scale" not in tensors
            kind = "not quantized" if act is None else f"{act}, whose block scales are dynamic"
            require(absent, OWNER, f"a{i}_scale", f"be None: activations are {kind}", "a Tensor")
        absent = act in ("nvfp4", FP8) or f"a{i}_gscale" not in tensors
        require(absent, OWNER, f"a{i}_gscale", f"be None for activations of dtype {act}", "a Tensor")
        if weight is None:
            require(getattr(config, f"_w{i}").scale is None, OWNER, f"w{i}_scale", "be None for plain weights", "given")
        absent = weight in ("nvfp4", FP8) or getattr(config, f"_w{i}").alpha is None
        require(absent, OWNER, f"g{i}_alphas", f"be None for weights of dtype {weight}", "a Tensor")
        channel = getattr(config, f"_w{i}").channel_scale
        absent = channel is None or (weight == "int4" and act == FP8)
        require(absent, OWNER, f"g{i}_alphas", "be None: only int4 with fp8 activations has channel scales", "a Tensor")
        absent = FORMATS[weight].has_zero_points or f"w{i}_zp" not in tensors
        require(absent, OWNER, f"w{i}_zp", f"be None for weights of dtype {weight}", "a Tensor")
    # nvfp4 without its float32 factor would be wrong by orders of magnitude.
    missing = weight == "nvfp4" and config._w1.scale is not None and config._w1.alpha is None
    require(not missing, OWNER, "g1_alphas", "be given with w1_scale: nvfp4 has a float32 scale per expert", None)


def _check_experts(tensors: dict[str, Tensor]) -> int | None:
    """The number of experts that every per-expert tensor agrees on."""
    first, experts = "", None
    for name, tensor in tensors.items():
        if not name.startswith(("w", "g")):
            continue
        require(tensor.ndim >= 1, OWNER, name, "have num_experts as its first dimension", tensor.shape)
        if experts is None:
            first, experts = name, tensor.shape[0]
            require(experts >= 1, OWNER, name, "hold at least one expert", tensor.shape)
        require(tensor.shape[0] == experts, OWNER, name, f"hold {experts} experts like {first}", tensor.shape)
    return experts


def _check_activation(operand: str, desc: FusedMoEQuantDesc, experts: int | None) -> None:
    for field, tensor in (("scale", desc.scale), ("gscale", desc.gscale)):
        if tensor is None:
            continue
        name = field_name(operand, field)
        require_type(isinstance(tensor, Tensor), OWNER, name, "be a Tensor", tensor)
        require(tensor.dtype == torch.float32, OWNER, name, "have dtype torch.float32", tensor.dtype)
        per_expert = tensor.ndim == 1 and (experts is None or tensor.shape[0] == experts)
        count = "num_experts" if experts is None else str(experts)
        text = f"have one element or shape ({count},)"
        require(tensor.numel() == 1 or per_expert, OWNER, name, text, tensor.shape)


def _check_factors(operand: str, desc: FusedMoEQuantDesc) -> None:
    name = field_name(operand, "alpha")
    if desc.alpha is not None:
        require(desc.alpha.dtype == torch.float32, OWNER, name, "have dtype torch.float32", desc.alpha.dtype)
        halves = operand == "w1" and desc.alpha.ndim == 2 and desc.alpha.shape[1] in (1, 2)
        shapes = "(num_experts,) or (num_experts, 2)" if operand == "w1" else "(num_experts,)"
        require(desc.alpha.ndim == 1 or halves, OWNER, name, f"have shape {shapes}", desc.alpha.shape)
    channel = desc.channel_scale
    if channel is not None:
        require(channel.dtype == torch.float32, OWNER, name, "have dtype torch.float32", channel.dtype)
        ok = channel.ndim in (1, 2) or (channel.ndim == 3 and channel.shape[2] == 1)
        shapes = "(num_experts,), (num_experts, rows) or (num_experts, rows, 1)"
        require(ok, OWNER, name, f"have shape {shapes}", channel.shape)
    if desc.bias is not None:
        require(desc.bias.is_floating_point(), OWNER, f"{operand}_bias", "have a float dtype", desc.bias.dtype)
        require(desc.bias.ndim == 2, OWNER, f"{operand}_bias", "have shape (num_experts, rows)", desc.bias.shape)
    if desc.zp is not None:
        name = f"{operand}_zp"
        require(desc.zp.ndim in (2, 3), OWNER, name, "have 2 or 3 dimensions (num_experts, ...)", desc.zp.shape)
        known = (torch.uint8, torch.int8, torch.int32)
        require(desc.zp.dtype in known, OWNER, name, f"have a dtype of {[str(d) for d in known]}", desc.zp.dtype)


def _check_layout(config: QuantFields) -> None:
    layout, weight = config.scale_layout, config._w1.dtype
    known = layout in (None, "linear", "swizzled")
    require(known, OWNER, "scale_layout", "be 'linear', 'swizzled' or None (not said)", layout)
    ok = layout != "swizzled" or fixed_block(weight) is not None
    require(ok, OWNER, "scale_layout", f"be 'linear' or None for weights of dtype {weight}", layout)
    ok = layout != "swizzled" or not is_precision_config(config._w1.scale)
    require(ok, OWNER, "scale_layout", "be 'linear' or None beside a PrecisionConfig, which has its own layout", layout)


def _check_constants(config: QuantFields) -> None:
    for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
        value = getattr(config, name)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        require_type(number, OWNER, name, "be a number or None", value)
        require(not math.isnan(value), OWNER, name, "be a number", value)
    limit = config.gemm1_clamp_limit
    require(limit is None or limit > 0, OWNER, "gemm1_clamp_limit", "be positive", limit)
    alignment = config.mx_alignment
    require_int(OWNER, "mx_alignment", alignment, 0)
    require(alignment % 32 == 0, OWNER, "mx_alignment", "be a multiple of 32, the MX block", alignment)
    act = config._a1.dtype
    ok = alignment == 0 or act in OCP_MX_DTYPES
    require(ok, OWNER, "mx_alignment", f"be 0 for activations of dtype {act}", alignment)
