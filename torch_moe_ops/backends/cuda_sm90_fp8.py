"""The `cuda_sm90_fp8` backend: e4m3 weights on fp8 activations, on Hopper's tensor cores.

Schemes fp8 (a scale for each row, half of the rows, or matrix) and fp8_block (128 x 128, with activations in groups of
128): very few tokens by the decode kernel, which multiplies the codes as bfloat16, many by the kernels of the
`cuda_sm90_folded` backend. docs/hopper.md says how exact the tensor cores' sums are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_moe_ops.backends import cuda_sm90_w4a8, linear
from torch_moe_ops.backends.cuda_sm90_w4a8 import DECODE_TOKENS, NOTES, matrices, sizes_of, sizes_reason
from torch_moe_ops.backends.registry import Backend, Requirement, formats, register
from torch_moe_ops.backends.sm90 import w4a8_layout as tiled
from torch_moe_ops.backends.sm90.common import NEEDS
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Layout, Sizes, Spec
from torch_moe_ops.core.problem import STANDARD
from torch_moe_ops.core.schemes import Scheme
from torch_moe_ops.weights.raw_weights import RawWeights

WEIGHTS = {"fp8": "rows", "fp8_block": "blocks"}  # scheme -> what the op calls its weights


def specs(scheme: Scheme, sizes: Sizes) -> dict[str, Spec]:
    """Codes in tiles; scales as the linear layout has them for an intermediate size padded to whole tiles."""
    table = dict(linear.specs(scheme, sizes))
    for name, rows, k, _ in matrices(sizes):
        shape = tiled.codes_shape(sizes.num_experts, rows, k, tiled.FP8_BYTES)
        table[name] = ((shape,), (torch.uint8,))
    scales, dtypes = table["w13_scale"]
    rows13 = matrices(sizes)[0][1]
    table["w13_scale"] = tuple((s[0], rows13, 1) if _is_per_row(scheme, s) else s for s in scales), dtypes
    return table


def prepare(raw: RawWeights) -> dict[str, Tensor]:
    """Tiles in the order of the tensor cores' operands, expert by expert, on raw's device; scales are kept.

    Raises ValueError for weights that are NaN.
    """
    tensors = {}
    for name, rows, _, gated in matrices(sizes_of(raw)):
        tensors[name] = tiled.tile_fp8(getattr(raw, name), rows, gated, name)
        scale = getattr(raw, f"{name}_scale")
        if name == "w13" and scale.ndim == 3 and raw.scheme == "fp8":
            scale = torch.stack([tiled.pad_rows(of_expert, rows, gated) for of_expert in scale])
        tensors[f"{name}_scale"] = scale.contiguous()
    return tensors


def restore(scheme: Scheme, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Inverse of prepare, bit for bit."""
    halves = 2 if sizes.is_gated else 1
    restored = {}
    for name, _, k, gated in matrices(sizes):
        if name not in tensors:
            continue
        rows = sizes.hidden_size if name == "w2" else halves * sizes.intermediate_size
        restored[name] = tiled.untile_fp8(tensors[name], rows, k, gated)
        scale = tensors[f"{name}_scale"]
        if name == "w13" and _is_per_row(scheme, tuple(scale.shape)):
            scale = scale.unflatten(1, (halves, -1))[:, :, : sizes.intermediate_size].flatten(1, 2)
        restored[f"{name}_scale"] = scale.contiguous()
    return restored


def _is_per_row(scheme: Scheme, shape: tuple[int, ...]) -> bool:
    return scheme.name == "fp8" and len(shape) == 3


def run(call: ExpertsCall, out: Tensor, decode_tokens: int = DECODE_TOKENS) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call.

    decode_tokens: up to so many are for the decode kernel, where it takes the layer.
    """
    cuda_sm90_w4a8.run(WEIGHTS[call.scheme], call, out, decode_tokens)


register(
    Backend(
        name="cuda_sm90_fp8",
        layout=Layout(
            "cuda_sm90_fp8_tiles_v1",
            specs,
            lambda scheme, w2_shape: w2_shape[2] * tiled.TILE_K,
            stored={"fp8": torch.uint8, "fp8_block": torch.uint8},
        ),
        requires=(*NEEDS, formats({"fp8": ("fp8",), "fp8_block": ("fp8",)}), Requirement(sizes_reason)),
        prepare=prepare,
        restore=restore,
        run=run,
        hidden_dtypes=(torch.bfloat16,),
        notes=lambda problem: f"{NOTES}, whose sums have 14 bits",
        accuracy=STANDARD,
    )
)
