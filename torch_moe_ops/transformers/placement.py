"""What packed experts will weigh, while transformers decides which device takes which module."""

from __future__ import annotations

import torch

from torch_moe_ops.checkpoints.index import CheckpointIndex
from torch_moe_ops.checkpoints.naming import ExpertLayer
from torch_moe_ops.core.schemes import get_scheme
from torch_moe_ops.transformers.modules import ExpertsModule

_RESERVED = "moeq_reserved"


def reserve(modules: list[ExpertsModule], index: CheckpointIndex, scheme: str | None) -> None:
    """Give every module a buffer without data, as large as its experts will be.

    Args:
        scheme: into which unquantized experts are quantized; None: experts stay as the files have them.
    """
    stored = {layer.number: layer for layer in index.layers if not layer.mtp}
    for found in modules:
        if scheme is None or scheme == "none" or found.sizes is None:
            size = _stored_bytes(stored[found.layer], index)
        else:
            size = _quantized_bytes(scheme, found.sizes, 2 if found.module.has_gate else 1)
        reserved = torch.empty(size, dtype=torch.uint8, device="meta")
        found.module.register_buffer(_RESERVED, reserved, persistent=False)


def release(modules: list[ExpertsModule]) -> None:
    """Drop what `reserve` gave."""
    for found in modules:
        found.module._buffers.pop(_RESERVED, None)
        found.module._non_persistent_buffers_set.discard(_RESERVED)


def _stored_bytes(layer: ExpertLayer, index: CheckpointIndex) -> int:
    return sum(index.entries[name].nbytes for name in layer.tensor_names())


def _quantized_bytes(scheme: str, sizes: tuple[int, int, int], halves: int) -> int:
    experts, hidden, inter = sizes
    return experts * (_matrix_bytes(scheme, halves * inter, hidden, halves) + _matrix_bytes(scheme, hidden, inter, 1))


def _matrix_bytes(name: str, rows: int, k: int, halves: int) -> int:
    """Codes and scales, as quantize_experts makes them or one scale for fewer weights."""
    scheme = get_scheme(name)
    codes = rows * scheme.storage_k(k) * scheme.weight_dtypes[0].itemsize
    if scheme.scales is None:
        return codes
    scales = scheme.scales.shapes(rows, k, halves)[0]
    return codes + scales[0] * scales[1] * scheme.scales.dtypes[0].itemsize
