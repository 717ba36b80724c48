"""Scale bytes of policy `packed`: what is stored of a block scale beside the exponent x of its row, and the inverse.

csrc/cuda/sm90/layout/w4a8_layout.h says what a byte means. Where all codes of a block are zero, any byte will do for
the kernels: that of MXFP4 is then the checkpoint's own, so that all scales come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_moe_ops.backends.sm90.scales import LARGEST_EXPONENT
from torch_moe_ops.core.kernel_facts import Sm90W4a8
from torch_moe_ops.numerics import e4m3

_TILE = Sm90W4a8.TILE_ROWS * Sm90W4a8.TILE_K
_SLOW, _ZERO = Sm90W4a8.SLOW_SCALE, Sm90W4a8.ZERO_SCALE
_E8M0_BIAS = 127
_LOWEST = -133  # r - x of MXFP4 that has a byte
LARGEST_E4M3 = 126  # code of 448
_WHERE = "fp8 layouts of backend 'cuda_sm90'"


@dataclass(frozen=True)
class PackedScales:
    """Block scales of a format.

    Args:
        block: values of K that share one.
        dtype: as the checkpoint has them.
        exponent_bias: of the bytes of the rows' exponents.
        check: (scale, name, expert) raises ValueError where a scale is none that kernels take.
        to_bytes: (scale [N, blocks], x int32 [N, 1], whether a block has codes that are not zero, name, expert) ->
            uint8; raises ValueError where a scale has no byte.
        from_bytes: (bytes, x [N, 1], whether a block has such codes) -> the scales, exactly.
    """

    block: int
    dtype: torch.dtype
    exponent_bias: int
    check: Callable[[Tensor, str, int], None]
    to_bytes: Callable[[Tensor, Tensor, Tensor, str, int], Tensor]
    from_bytes: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def tile_bytes(self) -> int:
        """Of the scales of a tile."""
        return _TILE // self.block


def _check_e4m3(scale: Tensor, name: str, expert: int) -> None:
    codes = scale.view(torch.uint8)
    if int(codes.max()) > LARGEST_E4M3:
        wrong = int(codes[codes > LARGEST_E4M3][0])
        text = f"{name} must hold positive finite scales or zero (e4m3 codes up to {LARGEST_E4M3:#x})"
        raise ValueError(f"{_WHERE}: {text}, got code {wrong:#x} in expert {expert}")


def _bytes_of_e4m3(scale: Tensor, exponent: Tensor, used: Tensor, name: str, expert: int) -> Tensor:
    """No byte is left for a scale 2^19 times larger than its row's exponent: all codes of its block are zero."""
    mantissa, power = torch.frexp(e4m3.decode(scale))  # scale = mantissa * 2^power, mantissa in [0.5, 1)
    relative = power - 1 - exponent
    low = (mantissa * 16).int() - 8
    slow = torch.where(relative < 0, relative + 12, relative - 4)
    byte = torch.where((relative >= -5) & (relative <= 10), (relative + 5) << 3, _SLOW + (slow << 3)) | low
    zero = scale.view(torch.uint8) == 0
    if bool(((relative > 18) & ~zero).any()):
        text = f"{name} must not hold a scale 2^19 times its row's weights beside codes that are all zero"
        raise ValueError(f"{_WHERE}: {text}, got one in expert {expert}")
    return byte.masked_fill(zero, _ZERO).to(torch.uint8)


def _e4m3_of_bytes(byte: Tensor, exponent: Tensor, used: Tensor) -> Tensor:
    field = byte.int() >> 3
    relative = torch.where(field < 16, field - 5, torch.where(field - 16 < 7, field - 28, field - 12))
    values = torch.ldexp(8.0 + (byte & 7).float(), relative + exponent - 3)
    return values.masked_fill(byte == _ZERO, 0.0).clamp(max=e4m3.MAX).to(torch.float8_e4m3fn)


def _check_e8m0(scale: Tensor, name: str, expert: int) -> None:
    if int(scale.max()) > LARGEST_EXPONENT:
        wrong = int(scale[scale > LARGEST_EXPONENT][0])
        text = f"{name} must hold exponents of at most 2^33 (byte {LARGEST_EXPONENT:#x})"
        raise ValueError(f"{_WHERE}: {text}, got code {wrong:#x} in expert {expert}")


def _bytes_of_e8m0(scale: Tensor, exponent: Tensor, used: Tensor, name: str, expert: int) -> Tensor:
    relative = scale.int() - _E8M0_BIAS - exponent
    if bool(((relative < _LOWEST) & used).any()):
        text = f"{name} must not hold a scale below 2^{_LOWEST} times 2^x of its row beside codes that are not zero"
        raise ValueError(f"{_WHERE}: {text}, got one in expert {expert}")
    byte = torch.where(relative >= -5, (relative + 5) << 3, _SLOW - 6 - relative)
    return torch.where(used, byte, scale.int()).to(torch.uint8)


def _e8m0_of_bytes(byte: Tensor, exponent: Tensor, used: Tensor) -> Tensor:
    value = byte.int()
    relative = torch.where(value < _SLOW, (value >> 3) - 5, _SLOW - 6 - value)
    return torch.where(used, relative + exponent + _E8M0_BIAS, value).to(torch.uint8)


NVFP4 = PackedScales(16, torch.float8_e4m3fn, Sm90W4a8.EXPONENT_BIAS, _check_e4m3, _bytes_of_e4m3, _e4m3_of_bytes)
MXFP4 = PackedScales(32, torch.uint8, 136, _check_e8m0, _bytes_of_e8m0, _e8m0_of_bytes)
BY_SCHEME = {"nvfp4": NVFP4, "mxfp4": MXFP4}
_BY_DTYPE = {kind.dtype: kind for kind in BY_SCHEME.values()}


def kind_of(scale: Tensor) -> PackedScales:
    """The format of block scales, by their dtype."""
    return _BY_DTYPE[scale.dtype]
