"""int4 weights as GPTQ, AWQ and compressed-tensors store them -> `Int4Weight`, [N, K] with groups along K."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics._arithmetic import require_dtype
from torch_moe_ops.numerics._blocks import require_shape
from torch_moe_ops.numerics.int4 import Int4Weight, unpack_int32


def unpack_gptq(
    qweight: Tensor, qzeros: Tensor | None, scales: Tensor, stores_zero_minus_one: bool = True
) -> Int4Weight:
    """GPTQ, with columns in the file's order: groups are contiguous unless the file was made with desc_act.

    A file with a permuted g_idx is dequantized by `int4.dequantize(..., g_idx=g_idx)`; see `has_contiguous_groups`.

    Args:
        qweight: int32 [..., K / 8, N], nibble i of word (j, n) = k 8j + i.
        qzeros: int32 [..., groups, N / 8], nibble i of word (g, j) = n 8j + i. None: 8 (symmetric files).
        scales: float dtype [..., groups, N], multiplies.
        stores_zero_minus_one: True for checkpoint_format "gptq" (v1; zero 0 is stored as 15), False for "gptq_v2".
    """
    require_dtype("int4_files.unpack_gptq", "qweight", qweight, torch.int32)
    codes = unpack_int32(qweight.transpose(-1, -2))
    groups, n = scales.shape[-2:]
    require_shape("int4_files.unpack_gptq", "scales", scales, (*codes.shape[:-2], groups, codes.shape[-2]))
    if qzeros is None:
        return Int4Weight(codes, scales.transpose(-1, -2), None)
    require_shape("int4_files.unpack_gptq", "qzeros", qzeros, (*codes.shape[:-2], groups, n // 8))
    zeros = unpack_int32(qzeros)
    if stores_zero_minus_one:
        zeros = (zeros + 1) & 15
    return Int4Weight(codes, scales.transpose(-1, -2), zeros.transpose(-1, -2))


def has_contiguous_groups(g_idx: Tensor, group: int) -> bool:
    """True where GPTQ's g_idx [..., K] says nothing new: column k belongs to group k // group."""
    expected = torch.arange(g_idx.shape[-1], device=g_idx.device) // group
    return bool((g_idx == expected).all())


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Int4Weight:
    """AWQ, version "gemm".

    Args:
        qweight: int32 [..., K, N / 8]; nibble i of word j = n 8j + (0, 2, 4, 6, 1, 3, 5, 7)[i].
        qzeros: int32 [..., groups, N / 8], in the same order, stored as they are.
        scales: float dtype [..., groups, N], multiplies.
    """
    codes, zeros = _unpack_awq_words("qweight", qweight), _unpack_awq_words("qzeros", qzeros)
    require_shape("int4_files.unpack_awq", "scales", scales, tuple(zeros.shape))
    require_shape("int4_files.unpack_awq", "qzeros", zeros, (*codes.shape[:-2], zeros.shape[-2], codes.shape[-1]))
    return Int4Weight(codes.transpose(-1, -2), scales.transpose(-1, -2), zeros.transpose(-1, -2))


def _unpack_awq_words(name: str, words: Tensor) -> Tensor:
    """int32 [..., N / 8] -> uint8 [..., N]. Nibble 4a + b holds column 2b + a."""
    require_dtype("int4_files.unpack_awq", name, words, torch.int32)
    return unpack_int32(words).unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)


def unpack_zero_point_rows(packed: Tensor, rows: int) -> Tensor:
    """compressed-tensors' zero points, packed along rows.

    Args:
        packed: int32 [..., ceil(rows / 8), groups], nibble i of word j = row 8j + i.
    Returns: uint8 [..., rows, groups].
    """
    require_dtype("int4_files.unpack_zero_point_rows", "packed", packed, torch.int32)
    shape = (*packed.shape[:-2], -(-rows // 8), *packed.shape[-1:])
    require_shape("int4_files.unpack_zero_point_rows", "packed", packed, shape)
    return unpack_int32(packed.transpose(-1, -2))[..., :rows].transpose(-1, -2)
