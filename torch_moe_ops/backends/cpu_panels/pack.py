"""Raw weights in the layout of the C++ kernels, and back: every scheme's tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_moe_ops.backends.cpu_panels import layout as cpu_layout
from torch_moe_ops.core.layout import Sizes, Spec
from torch_moe_ops.core.mapped_memory import mapped_empty
from torch_moe_ops.core.schemes import SCHEMES, ZERO_POINT_DTYPES, Scheme
from torch_moe_ops.weights.raw_weights import RawWeights

# Scheme -> the kernels' name of it. fp6 codes of either element are kept as the e4m3 codes of
# the same values.
KERNEL_SCHEMES = {
    name: name for name in ("none", "nvfp4", "mxfp4", "mxfp8", "mxint4", "int4", "fp8", "fp8_block", "int8")
}
KERNEL_SCHEMES |= dict.fromkeys(("mxfp6_e3m2", "mxfp6_e2m3"), "mxfp6")
KERNEL_ACT_FORMATS = ("none", "nvfp4", "mxfp4", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "fp8", "int8")


def kernel_scheme(scheme: Scheme) -> str:
    """The kernels' name of a scheme that they have."""
    return KERNEL_SCHEMES[scheme.name]


def specs(scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    """Shapes and dtypes of w13, w2 and their scales."""
    common = (
        sizes.num_experts,
        sizes.hidden_size,
        sizes.intermediate_size,
        sizes.is_gated,
        _stored_dtype(scheme, sizes),
    )
    name, scales = kernel_scheme(scheme), scheme.scales
    if scales is None or scales.kind in ("block", "tile"):
        shapes = cpu_layout.packed_shapes(name, *common)
        return {argument: ((shape,), (dtype,)) for argument, (shape, dtype) in shapes.items()}
    table: dict[str, Spec] = {}
    for group in (0, *scales.sizes):
        shapes = cpu_layout.packed_shapes(name, *common, scales.dtypes[0], group)
        for argument, (shape, dtype) in shapes.items():
            known, dtypes = table.get(argument, ((), (dtype,) if not argument.endswith("_scale") else scales.dtypes))
            table[argument] = ((*known, shape), dtypes)
    if scales.kind == "channel":  # one scale per tensor stays as it is
        halves = 2 if sizes.is_gated else 1
        for argument, columns in (("w13_scale", (halves, 1)), ("w2_scale", (1,))):
            known, dtypes = table[argument]
            extra = tuple((sizes.num_experts, n) for n in columns)
            table[argument] = ((*known, *extra), dtypes)
    return table


# Two codes a byte, whatever the words of the checkpoint.
STORED = {"int4": torch.uint8, "mxint4": torch.uint8}


def _stored_dtype(scheme: Scheme, sizes: Sizes) -> torch.dtype:
    return STORED.get(scheme.name, sizes.weight_dtype)


def intermediate_size(scheme: Scheme, w2_shape: tuple[int, ...]) -> int:
    return cpu_layout.intermediate_size_of(kernel_scheme(scheme), w2_shape)


def prepare(raw: RawWeights) -> dict[str, Tensor]:
    """Panels of 16 output rows, expert by expert."""
    scheme = SCHEMES[raw.scheme]
    name = kernel_scheme(scheme)
    tensors = {}
    for which, gated in (("w13", raw.is_gated), ("w2", False)):
        codes = _to_kernel_codes(scheme, getattr(raw, which))
        tensors[which] = cpu_layout.pack_weight(name, codes, gated, _code_of_zero(raw, which))
        for part in ("_scale", "_zero_point"):
            tensor = getattr(raw, which + part)
            if tensor is not None:
                tensors[which + part] = _pack_scale(scheme, tensor, gated)
    return tensors


def _code_of_zero(raw: RawWeights, which: str) -> Tensor | None:
    """Of each row, [E, N, 1] in storage elements, where it is another code than 0 and K may be padded.

    What is padded meets zeros in a layer, but in its gradient, what derivatives of activations at zero give. Groups
    along K have whole units.
    """
    weight, zero = getattr(raw, which), getattr(raw, f"{which}_zero_point")
    scale = getattr(raw, f"{which}_scale")
    if raw.scheme not in ZERO_POINT_DTYPES or scale.shape[2] != 1:
        return None
    if raw.scheme == "int8":
        return None if zero is None else zero
    if zero is None:
        return weight.new_full((*weight.shape[:2], 1), 0x88, dtype=torch.uint8)
    nibble = zero.clamp(max=15)  # a zero point of 16 has no code
    return nibble | nibble << 4


def restore(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Inverse of prepare, bit for bit."""
    hidden, inter = sizes.hidden_size, sizes.intermediate_size
    rows = 2 * inter if sizes.is_gated else inter
    name, restored = kernel_scheme(scheme), {}
    for which, gated, size_n, size_k in (("w13", sizes.is_gated, rows, hidden), ("w2", False, hidden, inter)):
        if which not in tensors:
            continue
        codes = cpu_layout.unpack_weight(name, tensors[which], size_n, size_k, gated)
        restored[which] = _from_kernel_codes(scheme, codes)
        for part in ("_scale", "_zero_point"):
            if which + part in tensors:
                restored[which + part] = _unpack_scale(scheme, tensors[which + part], size_n, gated)
    return restored


def _pack_scale(scheme: Scheme, scale: Tensor, gated: bool) -> Tensor:
    if is_per_tensor(scale):
        return scale
    return cpu_layout.pack_scale(kernel_scheme(scheme), scale, gated)


def _unpack_scale(scheme: Scheme, scale: Tensor, size_n: int, gated: bool) -> Tensor:
    if is_per_tensor(scale):
        return scale
    return cpu_layout.unpack_scale(kernel_scheme(scheme), scale, size_n, scale.shape[2], gated)


def is_per_tensor(scale: Tensor) -> bool:
    """[E, halves]: one scale per matrix, or per half of w13."""
    return scale.ndim == 2


def _to_kernel_codes(scheme: Scheme, weight: Tensor) -> Tensor:
    if scheme.name == "int4":
        return weight.contiguous().view(torch.uint8)
    if scheme.name == "mxint4":
        codes = weight.contiguous().view(torch.uint8)
        copy = mapped_empty(tuple(codes.shape), torch.uint8, codes.device)  # for as long as the matrix is packed
        return torch.bitwise_xor(codes, 0x88, out=copy)  # value + 8 -> two's complement
    return cpu_layout.fp6_to_e4m3(weight, scheme.element) if kernel_scheme(scheme) == "mxfp6" else weight


def _from_kernel_codes(scheme: Scheme, codes: Tensor) -> Tensor:
    if scheme.name == "int4":
        return codes.view(torch.int32)
    if scheme.name == "mxint4":
        return (codes ^ 0x88).view(torch.int32)
    return cpu_layout.e4m3_to_fp6(codes, scheme.element) if kernel_scheme(scheme) == "mxfp6" else codes
