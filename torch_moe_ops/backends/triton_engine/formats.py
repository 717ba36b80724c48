"""How the kernels read weights and activations, decided from a call: plain values that are constants to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_moe_ops.backends.triton_engine.configs import FP8_PRODUCTS
from torch_moe_ops.core import schemes
from torch_moe_ops.core.call import ExpertsCall

# Of weights in tiles (tiled.py): [experts, row tiles, K tiles, bytes]. Not there: this module is read without Triton.
NDIM = 4
TILED = 16  # beside the codes of a word: the order of K in tiles (permute.py)


# No named tuples: Triton 3.9 takes a tuple that is a constant apart, and loses its properties.
@dataclass(frozen=True)
class WeightFormat:
    """One weight matrix [N, K] as a GEMM reads it.

    code: "e2m1" or "int4" (words of eight), "e4m3", "e3m2", "e2m3" or "int8" (words of four), or "plain".
    scale: what is shared along K: "" nothing, "e4m3", "e8m0" or "float" (by a group, part of the decoded weight),
        "partial" or "tile" (by a group, or 128 x 128: float32, multiplies sums over a step of K).
    group: values of K that share it; 0 where nothing is.
    zero: zero points: "" none, "group" as the scales, "row".
    terms: 2 where a weight is not exact in bfloat16 and has to be: it is multiplied as high and low part.
    native: codes are multiplied as they are: int8, summed in int32, or e4m3, summed as the tensor core sums those.
    wide: decoded to float32 and multiplied as tf32, where float16 has no range for the exponents of MX blocks.
    tiled: in the tiles of the `cuda_sm90_fp8` backend (tiled.py), not row after row.
    """

    code: str
    scale: str = ""
    group: int = 0
    zero: str = ""
    terms: int = 1
    native: bool = False
    wide: bool = False
    tiled: bool = False

    @property
    def per_word(self) -> int:
        """Codes that are read as one word, and multiplied in the reordered K; 1: K in its own order."""
        return 8 if self.code in ("e2m1", "int4") else 1 if self.native or self.code == "plain" else 4

    @property
    def order(self) -> int:
        """The order of K in which activations are stored for it (permute.py)."""
        return TILED if self.tiled else self.per_word

    @property
    def scaled(self) -> bool:
        """Scales are part of the decoded weight."""
        return self.scale in ("e4m3", "e8m0", "float")

    @property
    def unit(self) -> float:
        """The power of two that decoded weights lack: with it block scales from 2^-80 to 2^49 stay in bfloat16's range.

        Larger ones become infinite.
        """
        return {"e4m3": 2.0**8, "e8m0": 2.0**48}.get(self.scale, 1.0)


@dataclass(frozen=True)
class OperandFormat:
    """The activations of one GEMM.

    act: the activation format.
    how: where their scales come from: "none" (not quantized), "tensor" or "expert" (given), "token" (one per row),
        "block" (along K), "packed" (they came quantized).
    factor: what the accumulator is multiplied by: "none", "row" (a pointer to one per row), "tensor" or "expert"
        (one over a given gscale), "group" (one per row and 128 of K, inside the loop). A given gscale has "row" too
        where codes are int8 operands: these have no NaN, so the factor is NaN for a row that needs one.
    """

    act: str
    how: str
    factor: str

    @property
    def block(self) -> int:
        """Values of K that are quantized together; 1 where each is for itself or the whole row is needed."""
        if self.how == "block":
            return 128 if self.act == "fp8" else schemes.ACT_FORMATS[self.act].block
        return 16 if self.act == "nvfp4" else 1


_FIXED: dict[str, WeightFormat] = {
    "nvfp4": WeightFormat("e2m1", "e4m3", 16),
    "mxfp4": WeightFormat("e2m1", "e8m0", 32),
    "mxfp8": WeightFormat("e4m3", "e8m0", 32),
    "mxfp6_e3m2": WeightFormat("e3m2", "e8m0", 32),
    "mxfp6_e2m3": WeightFormat("e2m3", "e8m0", 32),
    "fp8": WeightFormat("e4m3"),
    "fp8_block": WeightFormat("e4m3", "tile", 128),
    "none": WeightFormat("plain"),
}


# Codes of the schemes whose scales and zero points decide the rest.
_GROUPED = {"int4": "int4", "mxint4": "int4", "int8": "int8"}
SCHEMES = (*_FIXED, *_GROUPED)
ACT_FORMATS = ("none", "nvfp4", "fp8", "int8", "mxfp8", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3")


def _check_known(what: str, value: str, known: tuple[str, ...]) -> None:
    """RuntimeError for what the kernels have no code for: they would read it as something else."""
    if value not in known:
        raise RuntimeError(f"backend 'triton': {what} must be one of {list(known)}, got {value!r}")


def weight_format(call: ExpertsCall, which: int, native: bool) -> WeightFormat:
    """Of w13 (which = 1) or w2 (2). native: the device's tensor cores multiply int8."""
    if which == 1:
        form = stored_format(call.scheme, call.w13, call.w13_scale, call.w13_zero_point)
    else:
        form = stored_format(call.scheme, call.w2, call.w2_scale, call.w2_zero_point)
    wide = form.scale == "e8m0" and call.act_format == "none" and call.hidden_states.dtype == torch.float16
    as_they_are = native and call.act_format == "int8" and form == WeightFormat("int8")
    tiled = call.w13.ndim == NDIM
    as_they_are |= (tiled or call.backend == FP8_PRODUCTS) and call.act_format == "fp8" and form.code == "e4m3"
    return replace(form, native=as_they_are, wide=wide, tiled=tiled)


def stored_format(scheme: str, weight: Tensor, scale: Tensor | None, zero: Tensor | None) -> WeightFormat:
    """Of a projection in the linear layout, whatever it is multiplied with."""
    _check_known("scheme", scheme, SCHEMES)
    form = _FIXED.get(scheme)
    if form is not None:
        return form
    assert scale is not None  # the op's checks have seen to it
    code = _GROUPED[scheme]
    groups = scale.shape[2]
    if groups == 1:  # all of K: a factor of the row
        return WeightFormat(code, zero="" if zero is None else "row")
    group = weight.shape[2] * schemes.SCHEMES[scheme].pack // groups
    points = "" if zero is None else "group"
    # In one term a weight would be off by 1.6e-3, which the rounding of the intermediate doubles.
    return (
        WeightFormat(code, "partial", group, points) if group >= 64 else WeightFormat(code, "float", group, points, 2)
    )


def row_scales(call: ExpertsCall, which: int, form: WeightFormat) -> Tensor | None:
    """float [E, count]: factors of the accumulator, each for rows / count rows; None where there are none."""
    if call.scheme == "nvfp4":
        return call.g1_alphas if which == 1 else call.g2_alphas
    scale = call.w13_scale if which == 1 else call.w2_scale
    return None if form.group or scale is None else scale.flatten(1)


def operand_format(call: ExpertsCall, which: int, form: WeightFormat) -> OperandFormat:
    """Of GEMM 1 (the hidden states) or 2 (the intermediate), which multiplies weights of this form."""
    act = call.act_format
    _check_known("act_format", act, ACT_FORMATS)
    if act == "none":
        return OperandFormat(act, "none", "none")
    grouped = act == "fp8" and bool(schemes.SCHEMES[call.scheme].fp8_group)
    scaled = act in ("fp8", "int8")
    if which == 1 and call.hidden_states_scale is not None:
        return OperandFormat(act, "packed", "group" if grouped else "row" if scaled else "none")
    if grouped or act.startswith("mx"):
        return OperandFormat(act, "block", "group" if grouped else "none")
    gscale = call.a1_gscale if which == 1 else call.a2_gscale
    if gscale is None:
        return OperandFormat(act, "token", "row")
    given = "expert" if gscale.ndim else "tensor"
    if operand_dtype(call, form) == torch.int8:
        return OperandFormat(act, given, "row")
    # The alphas of nvfp4 hold 1 / gscale.
    return OperandFormat(act, given, given if scaled else "none")


def operand_dtype(call: ExpertsCall, form: WeightFormat) -> torch.dtype:
    """What activations are stored as for a GEMM. The values of every activation format are exact in bfloat16."""
    if form.native:
        return torch.int8 if form.code == "int8" else torch.float8_e4m3fn
    return call.hidden_states.dtype if call.act_format == "none" else torch.bfloat16
