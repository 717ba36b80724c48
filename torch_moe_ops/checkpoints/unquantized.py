"""Experts in bf16, f16 or f32."""

from __future__ import annotations

from torch_moe_ops.checkpoints.fields import Fields, Format, add_bias
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.validate import check_numbers

FLOAT_DTYPES = ("BF16", "F16", "F32")


def _read(linear: Linear, config: ModelConfig) -> Fields:
    weight = linear.matrix("weight", *FLOAT_DTYPES)
    return add_bias({"weight": check_numbers(linear, "weight", weight)}, linear)


UNQUANTIZED = Format(
    "unquantized",
    scheme="none",
    signature={"weight": FLOAT_DTYPES},
    required=frozenset({"weight"}),
    optional=frozenset({"bias"}),
    read=_read,
)
