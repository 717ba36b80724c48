"""Experts in bf16, f16 or f32."""

from __future__ import annotations

from torch_moe_ops.checkpoints.fields import Fields, Format, add_bias
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig

FLOAT_DTYPES = ("BF16", "F16", "F32")


def _read(linear: Linear, config: ModelConfig) -> Fields:
    return add_bias({"weight": linear.matrix("weight", *FLOAT_DTYPES)}, linear)


UNQUANTIZED = Format(
    "unquantized",
    scheme="none",
    signature={"weight": FLOAT_DTYPES},
    required=frozenset({"weight"}),
    optional=frozenset({"bias"}),
    read=_read,
)
