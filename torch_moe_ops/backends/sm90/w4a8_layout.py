"""The layouts of weights for fp8 GEMMs, and of bytes: NVFP4 and MXFP4, e4m3 and int8 codes, and their exact inverses.

csrc/cuda/sm90/layout/w4a8_layout.h says where bits lie; numerics/w4a8.py, how 4-bit weights are rounded. A weight
[E, N, K] is [E, row tiles, K tiles, bytes] in tiles of 64 rows x 128 values. Rows and K are padded with zeros; where
gated, each half of w13 by itself, to multiples of 128, as it becomes K of the second GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_moe_ops.backends.sm90 import packed_scales
from torch_moe_ops.backends.sm90.packed_scales import PackedScales
from torch_moe_ops.backends.sm90.scales import LARGEST_EXPONENT
from torch_moe_ops.core.kernel_facts import Sm90W4a8
from torch_moe_ops.numerics import w4a8

ROWS, TILE_K = Sm90W4a8.TILE_ROWS, Sm90W4a8.TILE_K
MX_BLOCK = 32
MX_BYTES = ROWS * TILE_K // MX_BLOCK
PACKED_BYTES, FP8_BYTES = Sm90W4a8.PACKED_BYTES, Sm90W4a8.FP8_BYTES
NO_SCALE = 40  # of padding: its table is not a slow one
# Bit of a code's sign in a word: as the checkpoint has it, and as the kernel wants it.
_SIGNS = tuple(zip(range(3, 32, 4), Sm90W4a8.SIGN_BITS, strict=True))
_MAGNITUDES = 0x77777777


def tiles(size: int, tile: int) -> int:
    """Tiles that hold `size` rows or values of K."""
    return -(-size // tile)


def padded_rows(rows: int, gated: bool) -> int:
    """Rows of all tiles of a weight that has `rows`."""
    return 2 * TILE_K * tiles(rows // 2, TILE_K) if gated else ROWS * tiles(rows, ROWS)


def codes_shape(experts: int, rows: int, k: int, tile_bytes: int) -> tuple[int, ...]:
    """Shape of a weight's codes; rows: padded."""
    return experts, rows // ROWS, tiles(k, TILE_K), tile_bytes


def strip_shape(experts: int, rows: int, k: int, kind: PackedScales) -> tuple[int, ...]:
    """Shape of block scales with exponents, policy `packed`; rows: padded."""
    return experts, rows // ROWS, tiles(k, TILE_K) * kind.tile_bytes + ROWS


def pack(codes: Tensor, scale: Tensor, rows: int, gated: bool, name: str) -> tuple[Tensor, Tensor]:
    """Policy `packed`: 4-bit codes, block scales relative to the exponent of their row, and the exponents.

    Args:
        codes: uint8 [E, N, K / 2], low nibble = even element, rows [gate; up] where gated.
        scale: NVFP4's, float8_e4m3fn [E, N, K / 16], or MXFP4's, uint8 [E, N, K / 32]; rows: N padded.
    Raises: ValueError in the name of the argument, where a scale is negative, NaN or cannot be kept (packed_scales.py).
    """
    experts, _, columns = codes.shape
    kind = packed_scales.kind_of(scale)
    shape = codes_shape(experts, rows, 2 * columns, PACKED_BYTES)
    out, strip = codes.new_empty(shape), codes.new_empty(strip_shape(experts, rows, 2 * columns, kind))
    for e in range(experts):
        kind.check(scale[e], name, e)
        exponent = w4a8.row_exponent(w4a8.decode(codes[e], scale[e]))
        scale_bytes = kind.to_bytes(scale[e], exponent[:, None], _has_codes(codes[e], kind), name, e)
        words = _to_tiles(_words(codes[e]), rows, gated, TILE_K // 8, 0)
        out[e].view(torch.int32).view(*shape[1:3], 2, 4, 8, 4, 2, 2).copy_(
            _to_kernel(words).unflatten(5, (2, 4, 2)).permute(0, 4, 5, 1, 3, 6, 7, 2)
        )
        scales = _to_tiles(scale_bytes, rows, gated, TILE_K // kind.block, NO_SCALE)
        _tile_of_scales(strip[e], shape[2], kind).copy_(scales.unflatten(5, (2, -1)).permute(0, 4, 1, 3, 6, 5, 2))
        strip[e, :, -ROWS:] = _exponent_bytes(exponent, rows, gated, kind)
    return out, strip


def fold(codes: Tensor, scale: Tensor, rows: int, gated: bool, name: str) -> tuple[Tensor, Tensor]:
    """Policy `folded`: e4m3 weights and a power of two for each row, float32 [E, rows, 1].

    Arguments and errors as `pack` has them.
    """
    experts, _, columns = codes.shape
    out = codes.new_empty(codes_shape(experts, rows, 2 * columns, FP8_BYTES))
    scales = torch.empty((experts, rows, 1), dtype=torch.float32, device=codes.device)
    for e in range(experts):
        packed_scales.kind_of(scale).check(scale[e], name, e)
        rounded, exponent = w4a8.round_weights(codes[e], scale[e])
        _tile_expert(rounded.view(torch.uint8), gated, out[e])
        power = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        scales[e] = pad_rows(power[:, None], rows, gated)
    return out, scales


def tile_fp8(codes: Tensor, rows: int, gated: bool, name: str) -> Tensor:
    """e4m3 weights float8_e4m3fn [E, N, K] -> uint8 tiles; rows: N padded.

    Raises ValueError in the name of the argument where a weight is NaN: the decode kernel would read 480.
    """
    for e in range(codes.shape[0]):
        _check_codes(codes[e], name, e)
    return _tile_bytes(codes, rows, gated)


def tile_int8(codes: Tensor, rows: int, gated: bool) -> Tensor:
    """int8 weights [E, N, K] -> int8 tiles; rows: N padded."""
    return _tile_bytes(codes, rows, gated).view(torch.int8)


def _tile_bytes(codes: Tensor, rows: int, gated: bool) -> Tensor:
    experts, _, k = codes.shape
    out = torch.empty(codes_shape(experts, rows, k, FP8_BYTES), dtype=torch.uint8, device=codes.device)
    for e in range(experts):
        _tile_expert(codes[e].contiguous().view(torch.uint8), gated, out[e])
    return out


def untile_fp8(tiled: Tensor, rows: int, k: int, gated: bool) -> Tensor:
    """Inverse of tile_fp8 for a weight of `rows` rows (not padded) and K = k."""
    return untile_bytes(tiled, rows, k, gated).view(torch.float8_e4m3fn)


def untile_bytes(tiled: Tensor, rows: int, k: int, gated: bool) -> Tensor:
    """Inverse of _tile_bytes for a weight of `rows` rows (not padded) and K = k; codes in the dtype of the tiles."""
    out = tiled.new_empty((tiled.shape[0], rows, k))
    for e in range(tiled.shape[0]):
        pieces = _swizzled(tiled[e].view(*_sizes(tiled[e])))
        natural = pieces.view(*pieces.shape[:5], 2, 2, 2, 4, 4).permute(0, 2, 3, 4, 1, 5, 8, 6, 7, 9).flatten(5)
        _from_tiles(natural, gated, out[e])
    return out


def tile_mx_scales(scales: Tensor, rows: int, gated: bool, name: str) -> Tensor:
    """Exponents of mxfp8, uint8 [E, N, K / 32] -> [E, row tiles, K tiles, 256]; rows: N padded.

    Raises ValueError in the name of the argument where an exponent is NaN or above 2^33: bfloat16 operands could not
    hold it.
    """
    experts, _, columns = scales.shape
    out = scales.new_empty(codes_shape(experts, rows, MX_BLOCK * columns, MX_BYTES))
    for e in range(experts):
        if int(scales[e].max()) > LARGEST_EXPONENT:
            wrong = int(scales[e][scales[e] > LARGEST_EXPONENT][0])
            text = f"{name} must hold exponents of at most 2^33 (byte {LARGEST_EXPONENT:#x})"
            raise ValueError(f"backend 'cuda_sm90': {text}, got code {wrong:#x} in expert {e}")
        blocks = _to_tiles(scales[e].contiguous(), rows, gated, TILE_K // MX_BLOCK, 0)
        out[e].view(*_mx_sizes(out[e])).copy_(blocks.unflatten(5, (2, 2)).permute(0, 4, 5, 1, 3, 6, 2))
    return out


def untile_mx_scales(tiled: Tensor, rows: int, k: int, gated: bool) -> Tensor:
    """Inverse of tile_mx_scales for a weight of `rows` rows (not padded) and K = k."""
    out = tiled.new_empty((tiled.shape[0], rows, k // MX_BLOCK))
    for e in range(tiled.shape[0]):
        blocks = tiled[e].view(*_mx_sizes(tiled[e])).permute(0, 3, 6, 4, 1, 2, 5).flatten(5)
        _from_tiles(blocks, gated, out[e])
    return out


def _mx_sizes(out: Tensor) -> tuple[int, ...]:
    """[row tile, K tile, half, warp, g, block of the half, h] of an expert's exponents."""
    return (*out.shape[:2], 2, 4, 8, 2, 2)


def pad_rows(x: Tensor, rows: int, gated: bool) -> Tensor:
    """[N, columns] -> [rows, columns], ones below each half."""
    halves = x.view(2 if gated else 1, -1, x.shape[1])
    extra = rows // halves.shape[0] - halves.shape[1]
    return F.pad(halves, (0, 0, 0, extra), value=1.0).flatten(0, 1)


def _tile_expert(codes: Tensor, gated: bool, out: Tensor) -> None:
    """Bytes [N, K] -> out [row tiles, K tiles, bytes]."""
    tiled = _to_tiles(codes, ROWS * out.shape[0], gated, TILE_K, 0)  # K: half 2, c 4, step 2, u 2, b 4
    pieces = tiled.unflatten(5, (2, 4, 2, 2, 4)).permute(0, 4, 1, 2, 3, 5, 7, 8, 6, 9).reshape(*_sizes(out))
    out.view(*_sizes(out)).copy_(_swizzled(pieces))


def _swizzled(pieces: Tensor) -> Tensor:
    """[..., g 8, piece 8, byte]: the 16-byte pieces of row g exchanged. Its own inverse."""
    eight = torch.arange(8, device=pieces.device)
    return pieces[:, :, :, :, eight[:, None], eight[:, None] ^ eight]


def unpack(packed: Tensor, strip: Tensor, rows: int, k: int, gated: bool, kind: PackedScales) -> tuple[Tensor, Tensor]:
    """Inverse of `pack` for a weight of `rows` rows (not padded) and K = k: codes and scales."""
    codes = packed.new_empty((packed.shape[0], rows, k // 2))
    scale = packed.new_empty((packed.shape[0], rows, k // kind.block))
    k_tiles = packed.shape[2]
    for e in range(packed.shape[0]):
        words = packed[e].view(torch.int32).view(-1, k_tiles, 2, 4, 8, 4, 2, 2).permute(0, 3, 7, 4, 1, 2, 5, 6)
        _from_tiles(_from_kernel(words.flatten(5)), gated, codes[e].view(torch.int32))
        tiled = _tile_of_scales(strip[e], k_tiles, kind).permute(0, 2, 6, 3, 1, 5, 4).flatten(5)
        _from_tiles(tiled, gated, scale[e])
        exponents = strip.new_empty((rows, 1))
        _from_tiles(strip[e, :, -ROWS:].view(-1, 4, 2, 8, 1, 1), gated, exponents)
        values = kind.from_bytes(scale[e], exponents.int() - kind.exponent_bias, _has_codes(codes[e], kind))
        scale[e] = values.view(torch.uint8)
    return codes, scale.view(kind.dtype)


def _has_codes(codes: Tensor, kind: PackedScales) -> Tensor:
    """Of each block of codes [N, K / 2], whether one of them is neither 0 nor -0: bool [N, blocks]."""
    return (codes & 0x77).unflatten(1, (-1, kind.block // 2)).amax(2) > 0


def _tile_of_scales(strip: Tensor, k_tiles: int, kind: PackedScales) -> Tensor:
    """Scale bytes of an expert: [row tile, K tile, warp, g, threads that have other blocks, half, h]."""
    return strip[:, :-ROWS].view(-1, k_tiles, 4, 8, TILE_K // 2 // kind.block, 2, 2)


def _sizes(out: Tensor) -> tuple[int, ...]:
    """[row tile, K tile, warp, h, g, piece, byte] of an expert's e4m3 tiles."""
    return (*out.shape[:2], 4, 2, 8, 8, TILE_K // 8)


def _words(codes: Tensor) -> Tensor:
    """[N, K / 2] bytes -> [N, K / 8] words of eight codes."""
    own = codes.contiguous()
    return (own.clone() if own.storage_offset() % 4 else own).view(torch.int32)


def _to_tiles(x: Tensor, rows: int, gated: bool, width: int, fill: int) -> Tensor:
    """[N, columns] -> [row tile, warp 4, h 2, g 8, K tile, width], padded with `fill` to `rows` rows.

    Where gated, h says which half of the rows; elsewhere h is the lowest bit of the row.
    """
    halves = x.view(2 if gated else 1, -1, x.shape[1])
    extra_rows, extra_columns = rows // halves.shape[0] - halves.shape[1], -x.shape[1] % width
    padded = F.pad(halves, (0, extra_columns, 0, extra_rows), value=fill) if extra_rows or extra_columns else halves
    if gated:
        return padded.view(2, rows // ROWS, 4, 8, -1, width).permute(1, 2, 0, 3, 4, 5)
    return padded.view(rows // ROWS, 4, 8, 2, -1, width).permute(0, 1, 3, 2, 4, 5)


def _from_tiles(tiled: Tensor, gated: bool, out: Tensor) -> None:
    """Inverse of _to_tiles, into out [N, columns]."""
    halves = out.view(2 if gated else 1, -1, out.shape[1])
    ordered = tiled.permute(2, 0, 1, 3, 4, 5) if gated else tiled.permute(0, 1, 3, 2, 4, 5)
    whole = ordered.reshape(halves.shape[0], -1, tiled.shape[4] * tiled.shape[5])
    halves.copy_(whole[:, : halves.shape[1], : halves.shape[2]])


def _to_kernel(words: Tensor) -> Tensor:
    """Words of codes with their signs where the kernel wants them."""
    out = words & _MAGNITUDES
    for natural, placed in _SIGNS:
        out |= _moved(words, natural, placed)
    return out


def _from_kernel(words: Tensor) -> Tensor:
    """Inverse of _to_kernel."""
    out = words & _MAGNITUDES
    for natural, placed in _SIGNS:
        out |= _moved(words, placed, natural)
    return out


def _moved(words: Tensor, source: int, target: int) -> Tensor:
    """Bit `source` of int32 words, at `target`."""
    shifted = words << (target - source) if target > source else words >> (source - target)
    return shifted & (1 << target if target < 31 else -(1 << 31))


def _check_codes(codes: Tensor, name: str, expert: int) -> None:
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        text = f"{name} must hold no NaN (e4m3 codes 0x7f and 0xff), got one in expert {expert}"
        raise ValueError(f"fp8 layouts of backend 'cuda_sm90': {text}")


def _exponent_bytes(exponent: Tensor, rows: int, gated: bool, kind: PackedScales) -> Tensor:
    """x int32 [N] -> uint8 [row tile, 64]."""
    biased = (exponent + kind.exponent_bias).to(torch.uint8)[:, None]
    return _to_tiles(biased, rows, gated, 1, kind.exponent_bias).flatten(1)
