"""Hidden states that come quantized -> the values that their codes stand for."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_moe_ops.backends.triton_engine.elements import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_minifloat,
    without_subnormals,
)


@triton.jit
def load_packed(x_ptr, scale_ptr, token, k, K: tl.constexpr, ACT: tl.constexpr):
    """float32 values at natural indices k of a row, 0 beyond K; block scales applied, scales of rows and groups not.

    x: [T, K] codes, two to a byte in the 4-bit formats; scale: bytes [T, K / 16] or [T, K / 32] of block formats. NaN
    of either is NaN.
    """
    if ACT == "int8":
        return tl.load(x_ptr + token * K + k, mask=k < K, other=0).to(tl.float32)
    elif ACT == "nvfp4" or ACT == "mxfp4":
        byte = tl.load(x_ptr + token * (K // 2) + k // 2, mask=k < K, other=0).to(tl.int32)
        value = decode_e2m1((byte >> ((k & 1) * 4)) & 15)
        if ACT == "nvfp4":
            byte = tl.load(scale_ptr + token * (K // 16) + k // 16, mask=k < K, other=0).to(tl.int32)
            scale = tl.where(byte == 127, float("nan"), decode_e4m3(byte))
        else:
            scale = decode_e8m0(tl.load(scale_ptr + token * (K // 32) + k // 32, mask=k < K, other=0).to(tl.int32))
        return without_subnormals(value * scale)
    else:
        element: tl.constexpr = "e3m2" if ACT == "mxfp6_e3m2" else "e2m3" if ACT == "mxfp6_e2m3" else "e4m3"
        code = tl.load(x_ptr + token * K + k, mask=k < K, other=0).to(tl.int32)
        value = decode_minifloat(code, element)
        if element == "e4m3":
            value = tl.where((code & 127) == 127, float("nan"), value)
        if ACT != "fp8":
            scale = tl.load(scale_ptr + token * (K // 32) + k // 32, mask=k < K, other=0).to(tl.int32)
            value = without_subnormals(value * decode_e8m0(scale))
        return value
