"""OCP microscaling formats: blocks of 32 along K with an e8m0 exponent.

| element    | scheme | stored as                                    |
| e2m1       | mxfp4  | uint8, two codes a byte, low nibble = even k |
| e4m3       | mxfp8  | float8_e4m3fn                                |
| e3m2, e2m3 | mxfp6  | uint8, one code a byte                       |
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.numerics import e2m1, e4m3, e8m0, fp6
from torch_moe_ops.numerics._arithmetic import require_dtype, require_floats
from torch_moe_ops.numerics._blocks import require_shape, split_blocks

BLOCK = 32


@torch.no_grad()
def quantize_mx(x: Tensor, element: str, rule: str = "rceil") -> tuple[Tensor, Tensor]:
    """Quantize activations or weights: one power of two per block, then the nearest element, ties to even.

    The division by the power of two is exact, so there is one rounding. Saturates where the rule clips.

    Args:
        x: [..., K] bfloat16, float16 or float32, K % 32 == 0.
        element: "e2m1", "e4m3", "e3m2" or "e2m3".
        rule: of the block exponent, see `e8m0.encode_block_exponent`.
    Returns: codes [..., K storage] as in the table above, and scale uint8 e8m0 [..., K / 32], multiplies.
        A block with NaN or an infinity has scale 255, NaN, and all of its codes are those of NaN (`e2m1.encode`,
        `e4m3.encode`, `fp6.encode`): every value is NaN, also in elements that have none.
    """
    require_floats("mx.quantize_mx", "x", x)
    blocks = split_blocks("mx.quantize_mx", "x", x, BLOCK)
    scale = e8m0.encode_block_exponent(blocks.abs().amax(-1), element, rule)
    # Times 2^(127 - b), not divided by 2^(b - 127): byte 0, as every zero block has it, is then a normal number.
    inverse = e8m0.decode(254 - scale).masked_fill_(scale == e8m0.NAN, torch.nan)
    return _encode((blocks.float() * inverse[..., None]).flatten(-2), element), scale


def dequantize_mx(codes: Tensor, scale: Tensor, element: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """element * 2^(scale - 127), exact unless it leaves the range of dtype.

    Args:
        codes: [..., K storage] as `quantize_mx` returns them.
        scale: uint8 e8m0 [..., K / 32].
        dtype: float32 or float64.
    Returns: [..., K] of dtype. A scale byte of 255 gives NaN.
    """
    values = _decode(codes, element)
    blocks = split_blocks("mx.dequantize_mx", "codes", values, BLOCK)
    require_dtype("mx.dequantize_mx", "scale", scale, torch.uint8)
    require_shape("mx.dequantize_mx", "scale", scale, blocks.shape[:-1])
    return (blocks.to(dtype) * e8m0.decode(scale).to(dtype)[..., None]).flatten(-2)


def _encode(y: Tensor, element: str) -> Tensor:
    if element == "e2m1":
        return e2m1.pack(e2m1.encode(y))
    return e4m3.encode(y) if element == "e4m3" else fp6.encode(y, element)


def _decode(codes: Tensor, element: str) -> Tensor:
    stored = torch.float8_e4m3fn if element == "e4m3" else torch.uint8
    require_dtype("mx.dequantize_mx", f"codes of {element}", codes, stored)
    if element == "e2m1":
        return e2m1.decode_packed(codes)
    return e4m3.decode(codes) if element == "e4m3" else fp6.decode(codes, element)
