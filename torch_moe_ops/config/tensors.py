"""The tensors of a quant config, under the names of the field."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_moe_ops.config._require import require_type
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc
from torch_moe_ops.config.shapes import OWNER


class QuantTensors:
    """Mixin of FusedMoEQuantConfig: scales, zero points and biases, each with its direction."""

    _a1: FusedMoEQuantDesc
    _a2: FusedMoEQuantDesc
    _w1: FusedMoEQuantDesc
    _w2: FusedMoEQuantDesc

    @property
    def a1_scale(self) -> Tensor | None:
        """Static scale of the input; multiplies a code back to a value. None: dynamic."""
        return self._a1.scale

    @property
    def a2_scale(self) -> Tensor | None:
        """Static scale of the intermediate; multiplies a code back to a value. None: dynamic."""
        return self._a2.scale

    @property
    def a1_gscale(self) -> Tensor | None:
        """Multiplies the input before it is quantized (1 / input scale), [] or [num_experts]."""
        return self._a1.gscale

    @property
    def a2_gscale(self) -> Tensor | None:
        """Multiplies the intermediate before it is quantized, [] or [num_experts]."""
        return self._a2.gscale

    @property
    def w1_scale(self) -> Tensor | None:
        """Scale of w13, multiplies. TypeError where a PrecisionConfig holds it."""
        return _tensor_scale(self._w1, "w1")

    @property
    def w2_scale(self) -> Tensor | None:
        """Scale of w2, multiplies. TypeError where a PrecisionConfig holds it."""
        return _tensor_scale(self._w2, "w2")

    @property
    def w1_precision(self) -> Any:
        """The PrecisionConfig of w13, or None. TypeError where the scale is a Tensor."""
        return _precision(self._w1, "w1")

    @property
    def w2_precision(self) -> Any:
        """The PrecisionConfig of w2, or None. TypeError where the scale is a Tensor."""
        return _precision(self._w2, "w2")

    @property
    def w1_zp(self) -> Tensor | None:
        return self._w1.zp

    @property
    def w2_zp(self) -> Tensor | None:
        return self._w2.zp

    @property
    def w1_bias(self) -> Tensor | None:
        """Added to the rows of the first GEMM, [num_experts, rows of w13]."""
        return self._w1.bias

    @property
    def w2_bias(self) -> Tensor | None:
        """Added to an expert's output before it is weighted, [num_experts, hidden_size]."""
        return self._w2.bias

    @property
    def g1_alphas(self) -> Tensor | None:
        """Multiply the first accumulator; with or without the input scale. See also `w1_channel_scale`."""
        return self._w1.alpha_or_gscale

    @property
    def g2_alphas(self) -> Tensor | None:
        """Multiply the second accumulator."""
        return self._w2.alpha_or_gscale

    @property
    def w1_channel_scale(self) -> Tensor | None:
        """`g1_alphas` where they are scales per output channel (int4 weights, fp8 activations)."""
        return self._w1.channel_scale

    @property
    def w2_channel_scale(self) -> Tensor | None:
        """`g2_alphas` where they are scales per output channel."""
        return self._w2.channel_scale


def _tensor_scale(desc: FusedMoEQuantDesc, operand: str) -> Tensor | None:
    ok = desc.scale is None or isinstance(desc.scale, Tensor)
    require_type(ok, OWNER, f"{operand}_scale", f"be a Tensor (read {operand}_precision instead)", desc.scale)
    return desc.scale


def _precision(desc: FusedMoEQuantDesc, operand: str) -> Any:
    ok = not isinstance(desc.scale, Tensor)
    require_type(ok, OWNER, f"{operand}_precision", f"be a PrecisionConfig (read {operand}_scale instead)", desc.scale)
    return desc.scale
