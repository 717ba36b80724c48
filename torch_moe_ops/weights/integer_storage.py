"""int4 and int8 weights as users hold them -> codes, scales and zero points as RawWeights holds them.

Nothing is inferred from values: shapes and dtypes say how a tensor is packed, the caller says which sign convention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.config._require import require, require_type
from torch_moe_ops.numerics import int4
from torch_moe_ops.numerics.int4_files import unpack_zero_point_rows

INT4_CODES = ("offset", "signed")


def int4_codes(owner: str, name: str, w: Tensor, convention: str) -> Tensor:
    """int32 [E, N, K / 8] with codes 0..15, nibble i of word j = element 8j + i.

    Args:
        w: int32 [E, N, K / 8] in that order, or uint8 [E, N, K / 2], low nibble = even k.
        convention: "offset": nibbles are codes 0..15 (uint4b8 where there are no zero points);
            "signed": nibbles are -8..7 in two's complement, which are codes with the highest bit flipped.
    """
    require(convention in INT4_CODES, owner, "int4_codes", f"be one of {list(INT4_CODES)}", convention)
    known = w.dtype in (torch.int32, torch.uint8)
    require_type(known, owner, name, "have dtype torch.int32 (8 codes) or torch.uint8 (2 codes) for int4", w)
    if w.dtype == torch.uint8:
        require(w.shape[-1] % 4 == 0, owner, name, "hold a multiple of 8 codes along K", f"{2 * w.shape[-1]} codes")
        # A fresh copy: a view as wider elements needs an aligned start. Little-endian words keep the order.
        w = w.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return int4.flip_sign_bit(w) if convention == "signed" else w


def int8_codes(owner: str, name: str, w: Tensor) -> tuple[Tensor, int]:
    """int8 [E, N, K], and what was subtracted from the stored codes (0 or 128).

    Args:
        w: int8 [E, N, K] signed; or codes 0..255 (uint8b128): uint8 [E, N, K], or int32 [E, N, K / 4], low byte first.
    """
    known = w.dtype in (torch.int8, torch.uint8, torch.int32)
    require_type(known, owner, name, "have dtype torch.int8, torch.uint8 or torch.int32 (4 codes) for int8", w)
    if w.dtype == torch.int8:
        return w, 0
    return (w.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8), 128


def rows_of_scales(owner: str, name: str, scale: Tensor, rows: int, halves: int = 1) -> Tensor:
    """[E, rows, groups] from every order that configs carry.

    Args:
        scale: [E], [E, 1], [E, 1, 1] (one for a matrix), [E, halves] (one for each half of the rows), [E, rows],
            [E, rows, groups], or groups before rows as Marlin keeps them, [E, groups, rows].
    """
    experts = scale.shape[0]
    if scale.ndim == 3 and scale.shape[1] == rows:
        return scale
    if scale.ndim == 3 and scale.shape[2] == rows:
        return scale.transpose(1, 2).contiguous()
    flat = scale.reshape(experts, -1)
    text = f"hold one value, one per row, or groups for {rows} rows of each expert"
    require(flat.shape[1] in (1, halves, rows), owner, name, text, scale.shape)
    return flat.repeat_interleave(rows // flat.shape[1], 1)[..., None]


def zero_points(owner: str, name: str, zp: Tensor, shape: torch.Size, scheme: str, stored_offset: int) -> Tensor:
    """Zero points in the codes' own units: uint8 0..15 for int4, int8 for int8; shape [E, rows, groups].

    Args:
        zp: one integer each, [E, rows, groups] or [E, groups, rows]; for int4 also packed along rows: uint8
            [E, rows / 2, groups] (low nibble = even row), int32 [E, ceil(rows / 8), groups] (compressed-tensors).
        shape: of the scales that RawWeights gets.
        stored_offset: what is subtracted from what was stored to get a code of RawWeights: 8 less than the code
            convention for signed int4 (-8), 128 for int8 stored as 0..255.
    """
    experts, rows, groups = shape
    require(not zp.is_floating_point(), owner, name, "have an integer dtype", zp.dtype)
    packed = {torch.uint8: -(-rows // 2), torch.int32: -(-rows // 8)}.get(zp.dtype)
    if scheme == "int4" and tuple(zp.shape) == (experts, packed, groups) and packed != rows:
        wide = _unpack_rows(zp, rows).to(torch.int32)
        # Packed nibbles of signed zero points are two's complement.
        wide = (wide ^ 8) - 8 if stored_offset else wide
    else:
        text = f"have shape {tuple(shape)}, ({experts}, {groups}, {rows}), or be packed along rows"
        fits = zp.numel() == shape.numel() and zp.shape[0] == experts
        require(fits, owner, name, text, zp.shape)
        wide = rows_of_scales(owner, name, zp, rows).to(torch.int32)
    low, high = (0, 15) if scheme == "int4" else (-128, 127)
    codes = wide - stored_offset
    inside = bool(((codes >= low) & (codes <= high)).all())
    limits = f"lie in [{low + stored_offset}, {high + stored_offset}] like the codes"
    require(inside, owner, name, limits, f"{int(wide.min())} to {int(wide.max())}")
    return codes.to(torch.uint8 if scheme == "int4" else torch.int8).contiguous()


def _unpack_rows(packed: Tensor, rows: int) -> Tensor:
    if packed.dtype == torch.int32:
        return unpack_zero_point_rows(packed, rows)
    return int4.unpack(packed.transpose(1, 2))[..., :rows].transpose(1, 2)
