"""The element formats that a quant config may name, as data.

A format is named by what `quant_dtype` reports: a torch dtype where the field uses one (float8_e4m3fn,
int8), else a string ("nvfp4", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8", "int4"). None is "not quantized".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from torch_moe_ops.config._require import require, require_type
from torch_moe_ops.core.schemes import SCHEMES

QuantDType: TypeAlias = torch.dtype | str | None

FP8 = torch.float8_e4m3fn
INT8 = torch.int8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
OCP_MX_DTYPES = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8")


@dataclass(frozen=True)
class QuantFormat:
    """What follows from the element format of a weight alone."""

    dtype: QuantDType
    scheme: str  # the weight scheme of the ops
    activations: tuple[QuantDType, ...]  # activation dtypes that the scheme's ops accept
    scale_dtypes: tuple[torch.dtype, ...] = ()  # of `w1_scale` and `w2_scale`
    block: tuple[int, int] | None = None  # block that the format itself fixes
    has_zero_points: bool = False


_DTYPES: dict[str, QuantDType] = {"none": None, "fp8": FP8, "int8": INT8}  # all others have their own names


def _format(name: str, *scale_dtypes: torch.dtype) -> QuantFormat:
    """The format of a scheme's weights; its scales come in these dtypes."""
    scheme = SCHEMES[name]
    scales = scheme.scales
    acts = [_DTYPES.get(act, act) for act in scheme.act_formats]
    return QuantFormat(
        dtype=_DTYPES.get(name, name),
        scheme=scheme.family or name,
        activations=tuple(sorted(acts, key=lambda act: act is None)),
        scale_dtypes=scale_dtypes,
        block=(1, scales.size) if scales is not None and scales.kind == "block" else None,
        has_zero_points=scheme.has_zero_point,
    )


FORMATS: dict[QuantDType, QuantFormat] = {
    f.dtype: f
    for f in (
        _format("none"),
        _format("nvfp4", torch.float8_e4m3fn),
        _format("mxfp4", *E8M0),
        _format("mxfp6_e3m2", *E8M0),
        _format("mxfp6_e2m3", *E8M0),
        _format("mxfp8", *E8M0),
        # e4m3 group scales: what w4a8 kernels keep beside float32 channel scales.
        _format("int4", *FLOATS, torch.float8_e4m3fn),
        # e8m0 scales of 128x128 blocks: DeepSeek's power-of-two variant.
        _format("fp8", *FLOATS, torch.float8_e8m0fnu),
        _format("int8", *FLOATS),
    )
}

_ALIASES: dict[str, QuantDType] = {"fp8": FP8, "int8": INT8}
_REFUSED = {
    "mxfp8_e4m3": "be 'mxfp8', whose elements are e4m3",
    "mxfp8_e5m2": "be 'mxfp8': elements in e5m2 are not supported",
    "mxfp6": "name its elements: 'mxfp6_e3m2' or 'mxfp6_e2m3'",
    "fp4": "be 'nvfp4' or 'mxfp4'",
}


def canonical_dtype(dtype: QuantDType, owner: str, field: str) -> QuantDType:
    """The one spelling of a format: "fp8" and "int8" become torch dtypes.

    Raises:
        TypeError: `dtype` is neither a torch dtype, a string nor None.
        ValueError: no such format; for near misses ("mxfp6", "mxfp8_e4m3") the text names the right one.
    """
    require_type(dtype is None or isinstance(dtype, (str, torch.dtype)), owner, field, "be a dtype, str or None", dtype)
    if isinstance(dtype, str):
        require(dtype not in _REFUSED, owner, field, _REFUSED.get(dtype, ""), dtype)
        dtype = _ALIASES.get(dtype, dtype)
    names = [d if isinstance(d, str) else str(d) for d in FORMATS]
    require(dtype in FORMATS, owner, field, f"be one of {', '.join(names)}", dtype)
    return dtype


def fixed_block(dtype: QuantDType) -> tuple[int, int] | None:
    """(1, 16) for nvfp4, (1, 32) for the MX formats, None where the format leaves the block open."""
    return FORMATS[dtype].block


def act_format_name(dtype: QuantDType) -> str:
    """The `act_format` of the ops: "none", "fp8", "int8", or the format's own name."""
    if isinstance(dtype, str):
        return dtype
    return FORMATS[dtype].scheme
