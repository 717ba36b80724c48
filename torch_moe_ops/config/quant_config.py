"""FusedMoEQuantConfig: how weights and activations of one MoE layer are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_moe_ops.config._require import require, require_bool, require_int, require_type
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc, GroupShape
from torch_moe_ops.config.formats import QuantDType, canonical_dtype
from torch_moe_ops.config.quant_fields import QuantFields, ScaleLayout
from torch_moe_ops.config.roles import as_activation, as_weight
from torch_moe_ops.config.shapes import OWNER, group_shapes, has_channel_scales
from torch_moe_ops.config.validation import validate


@dataclass(frozen=True, init=False)
class FusedMoEQuantConfig(QuantFields):
    """Quantization of the two expert GEMMs: descriptors of both activations and both weights.

    Use `make` or a builder; the fields are the descriptors of the input (`_a1`), the intermediate
    (`_a2`), w13 (`_w1`) and w2 (`_w2`). Frozen: a kernel that needs other scales makes its own config.

    Args:
        is_nvfp4_scale_swizzled: whether whoever quantizes activations to nvfp4 or mxfp8 writes their scales
            in 128x4 tiles. It says nothing about weight scales.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
        mx_alignment: K of MX activations is padded to a multiple of this many elements; 0: not padded.
        scale_layout: how `w1_scale` and `w2_scale` of nvfp4 and MX weights lie: "linear"
            [num_experts, rows, K / block], or "swizzled" (the 128x4 tiles of tensor core kernels, padded).
            None: not said.
        is_scale_swizzled: the later name of is_nvfp4_scale_swizzled.

    Raises:
        ValueError, TypeError: naming the field, what it must be and what came.
    """

    # Written out because one field has two names, of which a dataclass would know one.
    def __init__(
        self,
        _a1: FusedMoEQuantDesc,
        _a2: FusedMoEQuantDesc,
        _w1: FusedMoEQuantDesc,
        _w2: FusedMoEQuantDesc,
        is_nvfp4_scale_swizzled: bool = True,
        gemm1_alpha: float | None = None,
        gemm1_beta: float | None = None,
        gemm1_clamp_limit: float | None = None,
        mx_alignment: int = 0,
        *,
        scale_layout: ScaleLayout | None = None,
        is_scale_swizzled: bool | None = None,
    ) -> None:
        values: dict[str, Any] = {
            "is_nvfp4_scale_swizzled": _swizzled(is_nvfp4_scale_swizzled, is_scale_swizzled),
            "gemm1_alpha": gemm1_alpha,
            "gemm1_beta": gemm1_beta,
            "gemm1_clamp_limit": gemm1_clamp_limit,
            "mx_alignment": mx_alignment,
            "scale_layout": scale_layout,
        }
        for name, desc in (("_a1", _a1), ("_a2", _a2), ("_w1", _w1), ("_w2", _w2)):
            require_type(isinstance(desc, FusedMoEQuantDesc), OWNER, name, "be a FusedMoEQuantDesc", desc)
            assign = as_activation if name.startswith("_a") else as_weight
            values[name] = assign(desc, name[1:])
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.validate()

    def validate(self) -> None:
        """Check every field and how they fit; construction has done so already."""
        validate(self)

    @classmethod
    def make(
        cls,
        quant_dtype: QuantDType = None,
        per_act_token_quant: bool = False,
        per_out_ch_quant: bool = False,
        block_shape: Sequence[int] | None = None,
        w1_scale: Any = None,
        w2_scale: Any = None,
        a1_scale: Tensor | None = None,
        a2_scale: Tensor | None = None,
        g1_alphas: Tensor | None = None,
        g2_alphas: Tensor | None = None,
        a1_gscale: Tensor | None = None,
        a2_gscale: Tensor | None = None,
        w1_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        w1_zp: Tensor | None = None,
        w2_zp: Tensor | None = None,
        weight_dtype: QuantDType = None,
        is_nvfp4_scale_swizzled: bool = True,
        gemm1_alpha: float | None = None,
        gemm1_beta: float | None = None,
        gemm1_clamp_limit: float | None = None,
        *,
        mx_alignment: int = 0,
        scale_layout: ScaleLayout | None = None,
        is_scale_swizzled: bool | None = None,
    ) -> FusedMoEQuantConfig:
        """A config from flags and tensors.

        Args:
            quant_dtype: element format of the activations; None: not quantized.
            per_act_token_quant: one activation scale per token instead of one per tensor.
            per_out_ch_quant: one weight scale per output channel.
            block_shape: [rows, columns] that share a scale; see `shapes.group_shapes` for whose.
            w1_scale, w2_scale: weight scales, multiply: [num_experts, ...] as the format and the
                flags say. May be left out where only the description is needed.
            a1_scale, a2_scale: static activation scales, float32; multiply a code back to a value.
                One for all, [num_experts], [tokens, 1] or [tokens, blocks] as the flags say.
            g1_alphas, g2_alphas: float32 [num_experts] (g1 also [num_experts, 2]); multiply an
                accumulator. Without a static activation scale: the weight's global scale. With one: that, or
                its product with the input scale, which only the caller knows. For int4 weights with fp8
                activations: scales per output channel.
            a1_gscale, a2_gscale: float32 [] or [num_experts]; multiply an activation before it is quantized.
            w1_bias, w2_bias: [num_experts, rows].
            w1_zp, w2_zp: zero points of int4 and int8 weights, [num_experts, ...], in the packing of their source.
            weight_dtype: element format of the weights; None: that of the activations.
            is_nvfp4_scale_swizzled, is_scale_swizzled: of the activation scales; see the class.
            gemm1_alpha, gemm1_beta, gemm1_clamp_limit: constants of the activation; None: its own.
            mx_alignment, scale_layout: see the class.
        """
        act = canonical_dtype(quant_dtype, OWNER, "quant_dtype")
        weight = act if weight_dtype is None else canonical_dtype(weight_dtype, OWNER, "weight_dtype")
        a_shape, w_shape = group_shapes(act, weight, per_act_token_quant, per_out_ch_quant, block_shape)
        alpha_field = "channel_scale" if has_channel_scales(act, weight) else "alpha"
        if per_out_ch_quant and alpha_field == "channel_scale":
            ok = g1_alphas is not None and g1_alphas.ndim > 1
            require(ok, OWNER, "g1_alphas", "be given per output channel where per_out_ch_quant is True", g1_alphas)
        return cls(
            _a1=FusedMoEQuantDesc(act, a_shape, a1_scale, gscale=a1_gscale),
            _a2=FusedMoEQuantDesc(act, a_shape, a2_scale, gscale=a2_gscale),
            _w1=FusedMoEQuantDesc(weight, w_shape, w1_scale, zp=w1_zp, bias=w1_bias, **{alpha_field: g1_alphas}),
            _w2=FusedMoEQuantDesc(weight, w_shape, w2_scale, zp=w2_zp, bias=w2_bias, **{alpha_field: g2_alphas}),
            is_nvfp4_scale_swizzled=is_nvfp4_scale_swizzled,
            gemm1_alpha=gemm1_alpha,
            gemm1_beta=gemm1_beta,
            gemm1_clamp_limit=gemm1_clamp_limit,
            mx_alignment=mx_alignment,
            scale_layout=scale_layout,
            is_scale_swizzled=is_scale_swizzled,
        )

    @property
    def is_scale_swizzled(self) -> bool:
        """The later name of `is_nvfp4_scale_swizzled`."""
        return self.is_nvfp4_scale_swizzled

    @property
    def is_per_act_token(self) -> bool:
        """One activation scale per token."""
        return self._a1.shape == GroupShape.PER_TOKEN

    @property
    def per_act_token_quant(self) -> bool:
        """The same as `is_per_act_token`."""
        return self.is_per_act_token

    @property
    def per_out_ch_quant(self) -> bool:
        """One weight scale per output channel, alone or beside group scales."""
        channel = self._w1.channel_scale
        return self._w1.shape == GroupShape.PER_TOKEN or (channel is not None and channel.ndim > 1)

    @property
    def is_per_tensor(self) -> bool:
        """One activation scale per tensor."""
        return self._a1.shape == GroupShape.PER_TENSOR

    @property
    def block_shape(self) -> list[int] | None:
        """[rows, columns] of a scaling block: the weight's, or the activation's where the weight has none."""
        for shape in (self._w1.shape, self._a1.shape):
            if shape is not None and shape.is_block():
                return [shape.row, shape.col]
        return None

    @property
    def is_block_quantized(self) -> bool:
        """Whether weights or activations have scaling blocks."""
        return self.block_shape is not None

    def scale_shape(self, max_tokens: int, hidden_dim: int) -> tuple[int, int] | None:
        """Shape of the scales of a quantized activation [max_tokens, hidden_dim], linear layout.

        (max_tokens, ceil(hidden_dim / columns)) for blocks, with hidden_dim padded to `mx_alignment`
        first; (max_tokens, 1) per token; (1, 1) per tensor; None where activations are not quantized.
        """
        require_int(OWNER, "max_tokens", max_tokens, 0)
        require_int(OWNER, "hidden_dim", hidden_dim, 1)
        shape = self._a1.shape
        if shape is None:
            return None
        if shape.is_block():
            return max_tokens, _ceil_div(_align(hidden_dim, self.mx_alignment), shape.col)
        return (max_tokens, 1) if shape.is_per_token() else (1, 1)

    def batched_scale_shape(self, num_experts: int, max_tokens: int, hidden_dim: int) -> tuple[int, int, int] | None:
        """(num_experts, *scale_shape(max_tokens, hidden_dim)), None where activations are not quantized."""
        require_int(OWNER, "num_experts", num_experts, 1)
        shape = self.scale_shape(max_tokens, hidden_dim)
        return None if shape is None else (num_experts, *shape)


def _swizzled(is_nvfp4_scale_swizzled: bool, is_scale_swizzled: bool | None) -> bool:
    """One value of two names. The first one's default, True, does not contradict the second."""
    require_bool(OWNER, "is_nvfp4_scale_swizzled", is_nvfp4_scale_swizzled)
    if is_scale_swizzled is None:
        return is_nvfp4_scale_swizzled
    require_bool(OWNER, "is_scale_swizzled", is_scale_swizzled)
    text = "be False like is_nvfp4_scale_swizzled, its other name"
    require(is_nvfp4_scale_swizzled or not is_scale_swizzled, OWNER, "is_scale_swizzled", text, is_scale_swizzled)
    return is_scale_swizzled


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _align(size: int, alignment: int) -> int:
    return size if alignment == 0 else _ceil_div(size, alignment) * alignment
