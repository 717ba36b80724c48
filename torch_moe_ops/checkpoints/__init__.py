"""Checkpoints of other tools as RawWeights: see load_experts."""

from torch_moe_ops.checkpoints.load import load_experts
from torch_moe_ops.files.errors import CheckpointError

__all__ = ["CheckpointError", "load_experts"]
