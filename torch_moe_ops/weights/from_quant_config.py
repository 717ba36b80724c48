"""From a quant config of the field and packed weights to RawWeights.

A config does not say everything that its tensors mean: whether `g*_alphas` contain the input scale, and how `w*_scale`
lie where their shape fits two layouts. The caller says it; nothing is guessed.

What the conversion does to numbers: codes and scales keep their values, with two exceptions. int4's float32 scales per
output channel are folded into its group scales, fl(scale * channel). A config that gives products with an input scale
has it divided out, in the order that lets `prepare` multiply it back to the same product (see `divided_by`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.config._require import require, require_type
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc, is_precision_config
from torch_moe_ops.config.formats import FP8
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig
from torch_moe_ops.config.queries import scheme_name
from torch_moe_ops.config.weight_scales import fitting_layouts, fitting_shapes, possible_layouts
from torch_moe_ops.core.schemes import Scheme, get_scheme
from torch_moe_ops.numerics import e8m0, fp6
from torch_moe_ops.numerics.swizzle import unswizzle_scale
from torch_moe_ops.weights.input_scales import agrees, divided_by, input_scale_of
from torch_moe_ops.weights.integer_storage import int4_codes as codes_of_int4
from torch_moe_ops.weights.integer_storage import int8_codes as codes_of_int8
from torch_moe_ops.weights.integer_storage import rows_of_scales, zero_points
from torch_moe_ops.weights.quant_config_readings import PRODUCTS, WEIGHTS, check_alphas_reading, layout_reading

OWNER = "from_quant_config"


def fields_of_quant_config(
    w13: Tensor,
    w2: Tensor,
    quant_config: FusedMoEQuantConfig,
    *,
    int4_codes: str = "offset",
    alphas: str | None = None,
    weight_scale_layout: str | None = None,
) -> dict[str, Any]:
    """The fields of RawWeights: what `RawWeights.from_quant_config` documents, which calls this."""
    _require_arguments(w13, w2, quant_config)
    scheme = get_scheme(scheme_name(quant_config))
    check_alphas_reading(OWNER, quant_config, alphas)
    layout = layout_reading(OWNER, quant_config, weight_scale_layout)
    # K of w13 is hidden_size: four fp6 codes in three bytes show there, and w2 is packed alike.
    packed_fp6 = 4 * w13.shape[2] == 3 * w2.shape[1]
    tensors: dict[str, Tensor | None] = {}
    halves = 1
    for gemm, name, input_name, w in (("2", "w2", "a2", w2), ("1", "w13", "a13", w13)):
        input_scale = tensors[f"{input_name}_input_scale"] = input_scale_of(OWNER, quant_config, gemm)
        operand = _Operand(quant_config, scheme, gemm, w, halves, input_scale, int4_codes, packed_fp6, alphas, layout)
        parts = operand.parts()
        tensors |= {f"{name}{part}": tensor for part, tensor in parts.items()}
        halves = 2 if w13.shape[1] == 2 * operand.k(parts[""]) else 1  # of w13: K of w2 is the intermediate size
    return {
        "scheme": scheme.name,
        **tensors,
        "w13_bias": quant_config.w1_bias,
        "w2_bias": quant_config.w2_bias,
        "swiglu_alpha": quant_config.gemm1_alpha,
        "swiglu_beta": quant_config.gemm1_beta,
        "swiglu_limit": quant_config.gemm1_clamp_limit,
    }


def _require_arguments(w13: Tensor, w2: Tensor, config: FusedMoEQuantConfig) -> None:
    ok = isinstance(config, FusedMoEQuantConfig)
    require_type(ok, OWNER, "quant_config", "be a FusedMoEQuantConfig", config)
    for name, w in (("w13", w13), ("w2", w2)):
        require_type(isinstance(w, Tensor), OWNER, name, "be a Tensor", w)
        require(w.ndim == 3, OWNER, name, "have 3 dimensions [num_experts, rows, K]", w.shape)
    text = "be a Tensor: a PrecisionConfig's scales lie as its own package wants them"
    require_type(not is_precision_config(config._w1.scale), OWNER, "w1_scale", text, config._w1.scale)


@dataclass(frozen=True)
class _Operand:
    """One weight on its way. Its codes come first: they say the sizes that its scales must have."""

    config: FusedMoEQuantConfig
    scheme: Scheme
    gemm: str  # "1" or "2"
    w: Tensor
    halves: int  # of its rows: 2 for a gated w13
    input_scale: Tensor | None
    int4_codes: str
    packed_fp6: bool
    alphas: str | None
    layout: str | None  # of block scales; None: not said

    def parts(self) -> dict[str, Tensor | None]:
        """{suffix of a RawWeights field: tensor}."""
        return _PARTS[self.scheme.name](self)

    @property
    def desc(self) -> FusedMoEQuantDesc:
        return self.config._w1 if self.gemm == "1" else self.config._w2

    @property
    def rows(self) -> int:
        return self.w.shape[1]

    @property
    def weight_name(self) -> str:
        return "w13" if self.gemm == "1" else "w2"

    @property
    def scale_name(self) -> str:
        return f"w{self.gemm}_scale"

    def k(self, codes: Tensor | None) -> int:
        """K of codes as RawWeights stores them."""
        assert codes is not None
        return self.scheme.logical_k(codes.shape[2])

    def scale(self) -> Tensor:
        """The weight scale, which must be there."""
        scale = self.desc.scale
        require(scale is not None, OWNER, self.scale_name, "be a Tensor", None)
        return scale

    def alpha(self) -> Tensor | None:
        """The global scale of the weight alone: `g*_alphas`, without the input scale if it is contained."""
        alpha = self.desc.alpha
        if alpha is None or self.alphas != PRODUCTS:
            return alpha
        assert self.input_scale is not None  # products have one: checked before
        return divided_by(alpha, self.input_scale)


Parts = dict[str, Tensor | None]


def _plain(op: _Operand) -> Parts:
    return {"": op.w}


def _as_bytes(name: str, w: Tensor, *dtypes: str) -> Tensor:
    """uint8, from uint8 or a torch dtype of one byte under its own name."""
    known = (torch.uint8, *(d for n in dtypes if (d := getattr(torch, n, None)) is not None))
    require_type(w.dtype in known, OWNER, name, f"have dtype {' or '.join(str(d) for d in known)}", w)
    return w.view(torch.uint8)


def _block_scale(op: _Operand, scale: Tensor, k: int) -> Tensor:
    """[E, rows, K / block], unswizzled."""
    assert op.scheme.scales is not None  # of block formats
    cols = -(-k // op.scheme.scales.size)
    fits = fitting_layouts(scale, op.rows, cols)
    shape = tuple(scale.shape)
    text = (
        f"be 'linear' ([E, rows, K / block], as in a checkpoint) or 'swizzled' (128x4 tiles): {op.scale_name} {shape}"
    )
    require(op.layout is not None or len(fits) < 2, OWNER, "weight_scale_layout", f"{text} fits both", None)
    if (op.layout or (fits or possible_layouts(scale))[0]) == "linear":
        return scale  # RawWeights says what is wrong with its shape
    require("swizzled" in fits, OWNER, op.scale_name, fitting_shapes(scale, op.rows, cols, "swizzled"), shape)
    return unswizzle_scale(scale.flatten(1), op.rows, cols)


def _nvfp4(op: _Operand) -> Parts:
    codes = _as_bytes(op.weight_name, op.w, "float4_e2m1fn_x2")
    scale, alpha = _block_scale(op, op.scale(), op.k(codes)), op.alpha()
    require(alpha is not None, OWNER, f"g{op.gemm}_alphas", "be a Tensor", None)
    assert alpha is not None
    scale_2 = alpha[:, None] if op.gemm == "1" and alpha.ndim == 1 else alpha
    return {"": codes, "_scale": scale, "_scale_2": scale_2}


def _mx(op: _Operand) -> Parts:
    codes, element = op.w, op.scheme.element
    if element == "e4m3":
        codes = _as_bytes(op.weight_name, op.w, "float8_e4m3fn").view(torch.float8_e4m3fn)
    else:
        codes = _as_bytes(op.weight_name, op.w, *(["float4_e2m1fn_x2"] if element == "e2m1" else []))
    if element in fp6.ELEMENTS and op.packed_fp6:
        codes = fp6.unpack(codes)
    scale = _as_bytes(op.scale_name, op.scale(), "float8_e8m0fnu")
    return {"": codes, "_scale": _block_scale(op, scale, op.k(codes))}


def _fp8_scale(op: _Operand) -> Tensor:
    scale = op.scale()
    # e8m0 by its bits: 2^-127 is a subnormal that a conversion may flush.
    return e8m0.decode(scale.view(torch.uint8)) if scale.element_size() == 1 else scale.float()


def _fp8_codes(op: _Operand) -> Tensor:
    return _as_bytes(op.weight_name, op.w, "float8_e4m3fn").view(torch.float8_e4m3fn)


def _fp8(op: _Operand) -> Parts:
    """[E, 1], [E, 2] or [E, rows, 1]."""
    alpha = op.alpha()
    if op.desc.scale is None and alpha is not None:
        return {"": _fp8_codes(op), "_scale": alpha.reshape(alpha.shape[0], -1)}
    scale = _fp8_scale(op)
    flat = scale.reshape(scale.shape[0], -1)
    text = f"hold one scale, one per half or one per row (of {op.rows}) of each expert"
    require(flat.shape[1] in (1, 2, op.rows), OWNER, op.scale_name, text, scale.shape)
    _require_fp8_alpha(op, flat)
    return {"": _fp8_codes(op), "_scale": flat[..., None] if flat.shape[1] > 2 else flat}


def _require_fp8_alpha(op: _Operand, scale: Tensor) -> None:
    """Alphas beside scales [E, 1 or 2] say nothing new: they must agree, in the reading that was said or in either."""
    if op.desc.alpha is None:
        return
    readings = {WEIGHTS: scale}
    if op.input_scale is not None:
        readings[PRODUCTS] = scale * (op.input_scale[:, None] if op.input_scale.ndim else op.input_scale)
    said = [op.alphas] if op.alphas else list(readings)
    alpha = op.desc.alpha.reshape(len(scale), -1)
    agree = scale.shape[1] <= 2 and any(agrees(alpha, readings[name]) for name in said)
    names = {WEIGHTS: op.scale_name, PRODUCTS: f"{op.scale_name} times the input scale"}
    text = f"be {' or '.join(names[name] for name in said)}"
    require(agree, OWNER, f"g{op.gemm}_alphas", text, "other values")


def _fp8_block(op: _Operand) -> Parts:
    return {"": _fp8_codes(op), "_scale": _fp8_scale(op)}


def _int4(op: _Operand) -> Parts:
    codes = codes_of_int4(OWNER, op.weight_name, op.w, op.int4_codes)
    scale = _integer_scale(op, codes)
    channel = op.desc.channel_scale
    if channel is not None:
        scale = scale.float() * rows_of_scales(OWNER, f"g{op.gemm}_alphas", channel, op.rows)
    elif scale.dtype == FP8:
        scale = scale.float()
    return {"": codes, "_scale": scale, "_zero_point": _zero_point(op, scale, -8 if op.int4_codes == "signed" else 0)}


def _int8(op: _Operand) -> Parts:
    codes, offset = codes_of_int8(OWNER, op.weight_name, op.w)
    scale = _integer_scale(op, codes)
    return {"": codes, "_scale": scale, "_zero_point": _zero_point(op, scale, offset)}


def _integer_scale(op: _Operand, codes: Tensor) -> Tensor:
    """[E, rows, groups], as many groups as the config's block says, if it says one."""
    scale, k, shape = rows_of_scales(OWNER, op.scale_name, op.scale(), op.rows, op.halves), op.k(codes), op.desc.shape
    if shape is not None and shape.is_block():
        require(shape.row == 1, OWNER, "block_shape", "be [1, group] for integer weights", list(shape))
        text = f"hold a scale per {shape.col} of K = {k}"
        require(scale.shape[2] * shape.col == k, OWNER, op.scale_name, text, op.scale().shape)
    return scale


def _zero_point(op: _Operand, scale: Tensor, offset: int) -> Tensor | None:
    zp = op.desc.zp
    return None if zp is None else zero_points(OWNER, f"w{op.gemm}_zp", zp, scale.shape, op.scheme.name, offset)


_PARTS: dict[str, Callable[[_Operand], Parts]] = {
    "none": _plain,
    "nvfp4": _nvfp4,
    "mxfp4": _mx,
    "mxfp8": _mx,
    "mxfp6_e3m2": _mx,
    "mxfp6_e2m3": _mx,
    "int4": _int4,
    "fp8": _fp8,
    "fp8_block": _fp8_block,
    "int8": _int8,
}
