"""Which format a layer has: from its tensors; the config is asked only where tensors cannot tell."""

from __future__ import annotations

from torch_moe_ops.checkpoints.fields import Format
from torch_moe_ops.checkpoints.fp8 import FP8, FP8_INV, FP8_TILES, FP8_TILES_INV
from torch_moe_ops.checkpoints.gptq_awq import AWQ, GPTQ
from torch_moe_ops.checkpoints.integers import CT_INT4, CT_INT8
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.mx import CT_MXFP4, E8M0_FP4, GPT_OSS_MXFP4, MXFP8
from torch_moe_ops.checkpoints.nvfp4 import CT_NVFP4, MODELOPT_NVFP4
from torch_moe_ops.checkpoints.unquantized import UNQUANTIZED
from torch_moe_ops.files.errors import CheckpointError, short

# The first that matches is taken: of two with one signature, the one with a condition comes first.
FORMATS: tuple[Format, ...] = (
    MODELOPT_NVFP4,
    CT_NVFP4,
    GPT_OSS_MXFP4,
    CT_MXFP4,
    E8M0_FP4,
    MXFP8,
    FP8_TILES_INV,
    FP8_TILES,
    FP8,
    FP8_INV,
    CT_INT4,
    CT_INT8,
    AWQ,
    GPTQ,
    UNQUANTIZED,
)


def detect(linear: Linear, config: ModelConfig, where: str) -> Format:
    """The format of a projection.

    Args:
        linear: the projection of the layer with the most tensors, so that one lost tensor does not mislead.
        where: checkpoint and layer, for the message.

    Raises:
        CheckpointError: listing the tensors where no format has such.
    """
    for candidate in FORMATS:
        if candidate.matches(linear, config):
            return candidate
    shown = list(linear.names.items())[:8]
    found = [f"{name} {linear.entry(part).dtype} {short(linear.entry(part).shape)}" for part, name in shown]
    more = "; ..." if len(linear.names) > len(shown) else ""
    raise CheckpointError(f"{where}: no known format stores a weight as {'; '.join(found)}{more}")
