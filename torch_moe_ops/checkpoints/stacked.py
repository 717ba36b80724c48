"""Unquantized experts of DBRX: each projection of a layer is [num_experts * intermediate, hidden], the second too."""

from __future__ import annotations

from torch_moe_ops.checkpoints.index import CheckpointIndex
from torch_moe_ops.checkpoints.naming import ExpertLayer
from torch_moe_ops.files.errors import CheckpointError, short
from torch_moe_ops.files.tensor_reader import TensorReader

# Of the projections, the one that such files hold as [K, rows] of each expert.
TRANSPOSED = frozenset({"down"})


def with_experts_dimension(
    reader: TensorReader[CheckpointIndex], layer: ExpertLayer, num_experts: int | None
) -> TensorReader[CheckpointIndex]:
    """A reader for which the layer's tensors are [num_experts, intermediate, hidden].

    Args:
        num_experts: as config.json says it; the files do not.

    Raises: CheckpointError without a number, or where rows cannot be divided by it or differ between projections.
    """
    names = list(layer.tensor_names())
    first = reader.index.entries[names[0]]
    if not num_experts:
        raise CheckpointError(
            f"{reader.index.path}: config.json must say moe_num_experts, got none: tensor {names[0]} has the rows of "
            "all experts below each other"
        )
    for name in names:
        entry = reader.index.entries[name]
        if len(entry.shape) != 2 or entry.shape != first.shape or entry.shape[0] % num_experts:
            wanted = f"shape {short(first.shape)} like {names[0]}" if entry.shape != first.shape else "two dimensions"
            raise CheckpointError(
                f"{entry.file}: tensor {name} must have {wanted}, and rows of {short(num_experts)} experts, "
                f"got {short(entry.shape)}"
            )
    rows, columns = first.shape
    return reader.with_shapes(dict.fromkeys(names, (num_experts, rows // num_experts, columns)))
