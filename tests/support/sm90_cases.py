"""Random calls in the layout of the `cuda_sm90` backend, beside the same call in the linear layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import empty_output, error_over_bound, make_call, relative_error

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90, cuda_sm90_fp8
from torch_moe_ops.backends.sm90 import choice as sm90_choice
from torch_moe_ops.backends.sm90 import formats, layout, w4a8_layout
from torch_moe_ops.backends.sm90.common import CAPABILITY
from torch_moe_ops.backends.sm90.formats import exact_kernels
from torch_moe_ops.core import extension
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.kernel_facts import SM90_KERNELS, Sm90Few
from torch_moe_ops.tuning import tuned_kernels
from torch_moe_ops.weights.raw_weights import RawWeights

KERNELS = ("decode", "prefill")
ACTIVATIONS = (
    "silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "swiglustep", "situ",
    "silu_no_mul", "gelu_no_mul", "relu2_no_mul", "identity_no_mul",
)  # fmt: skip
# experts, top_k, hidden, inter, tokens
SHAPES_OF_ALL = (
    (8, 1, 128, 64, 3),
    (8, 2, 192, 176, 20),
    (8, 2, 96, 176, 7),
    (16, 4, 2880, 704, 9),
    (16, 4, 2720, 704, 130),
    (16, 4, 2688, 1856, 40),
    (60, 6, 2048, 1408, 33),
    (128, 8, 2048, 768, 64),
    (512, 22, 1024, 128, 17),
)
# Where weights have 8 bits.
SHAPES_OF_BYTES = (
    (8, 1, 128, 64, 3),
    (8, 2, 224, 160, 20),
    (16, 4, 2880, 704, 9),
    (16, 4, 2688, 1856, 40),
    (128, 8, 2048, 768, 64),
    (4, 2, 4096, 1024, 300),
    (2, 1, 512, 256, 1100),
    (8, 4, 256, 384, 1500),
    (2, 1, 128, 17408, 20),
)
# Of a rank, some of whose tokens have experts elsewhere; rows are gathered.
# local experts, all experts, top_k, hidden, inter, tokens
SHARES = (
    (32, 128, 8, 2048, 768, 32),
    (32, 128, 8, 2048, 768, 19),
    (16, 128, 8, 2048, 768, 32),
    (64, 128, 8, 2048, 768, 16),
    (128, 128, 8, 2048, 768, 9),
    (128, 128, 8, 2048, 768, 16),
    (8, 32, 4, 2880, 704, 32),
    (8, 32, 3, 1088, 1856, 10),  # slots that one warp sorts
    (5, 7, 6, 192, 160, 32),
    (60, 240, 6, 2048, 1408, 31),
    (2, 512, 10, 2048, 512, 25),
    (8, 32, 8, 4096, 1536, 20),
    (1, 1, 1, 128, 64, 32),
    # Blocks that multiply rows of three experts and more.
    (256, 256, 8, 128, 64, 32),
    (300, 512, 8, 512, 160, 32),
    (64, 64, 8, 7168, 64, 32),
    (16, 16, 16, 7168, 96, 16),
    # Hidden sizes that end in the middle of a tile.
    (8, 32, 4, 2720, 704, 30),
    (8, 8, 2, 96, 160, 32),
)
# Long rows: of the second there is room for four, where the next expert's wait until those of the one before are multiplied.
LONG_ROWS = ((8, 8, 8, 7168, 2048, 32), (6, 24, 7, 8192, 512, 32))


def why_not_here() -> str:
    """Why the kernels cannot run on this machine; empty where they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() != CAPABILITY:
        return f"needs compute capability {CAPABILITY}, got {torch.cuda.get_device_capability()}"
    return extension.cuda_extension_reason()


WEIGHTS = ("w13", "w2", "w13_scale", "w2_scale", "w13_zero_point", "w2_zero_point")


def of_a_checkpoint(call: ExpertsCall) -> ExpertsCall:
    """The same call with zero points that four bits hold, as a checkpoint's do."""
    points: dict[str, Any] = {name: t.clamp(max=15) for name in WEIGHTS[4:] if (t := getattr(call, name)) is not None}
    return call._replace(**points)


def in_tiles(call: ExpertsCall) -> ExpertsCall:
    """The same call as `prepare` lays its weights out: tiles, and a bias with each half of its rows padded."""
    bias = _padded_bias(call, formats.tile_k(call.scheme))
    tensors: dict[str, Any] = {name: getattr(call, name) for name in WEIGHTS}
    if call.scheme == "nvfp4":  # the call has them in its alphas
        tensors |= {f"{name}_scale_2": torch.ones_like(alphas) for name, alphas in alphas_of(call)}
    prepared = cuda_sm90.prepare(RawWeights(call.scheme, **tensors))
    changes: dict[str, Any] = dict.fromkeys(WEIGHTS[4:]) | prepared
    return call._replace(w13_bias=bias, backend="cuda_sm90", **changes)


def fp8_in_tiles(call: ExpertsCall) -> ExpertsCall:
    """`in_tiles` of e4m3 weights, in the layout of `cuda_sm90_fp8`."""
    raw = RawWeights(call.scheme, call.w13, call.w2, call.w13_scale, call.w2_scale)
    bias = _padded_bias(call, w4a8_layout.TILE_K)
    return call._replace(**cuda_sm90_fp8.prepare(raw), w13_bias=bias, backend="cuda_sm90_fp8")


def _padded_bias(call: ExpertsCall, tile: int) -> Tensor | None:
    if call.w13_bias is None:
        return None
    halves = call.w13_bias.unflatten(1, (1 if call.activation.endswith("_no_mul") else 2, -1))
    return F.pad(halves, (0, -halves.shape[2] % tile)).flatten(1)


def alphas_of(call: ExpertsCall) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """Alphas in the shapes of scale_2."""
    assert call.g1_alphas is not None and call.g2_alphas is not None
    return ("w13", call.g1_alphas.unflatten(0, (-1, 1)).flatten(1)), ("w2", call.g2_alphas)


def run_on(kernel: str, tiled: ExpertsCall) -> Tensor:
    """The output of one of the KERNELS, from a buffer full of NaN."""
    tokens, hidden = tiled.hidden_states.shape  # not packed, or a multiple of 64
    if tiled.hidden_states_scale is not None:
        hidden = tiled.w2.shape[1] * layout.TILE
    out = torch.full((tokens, hidden), float("nan"), dtype=tiled.out_dtype, device=tiled.w2.device)
    cuda_sm90.run_kernel(tiled, out, number_of(kernel, tiled))
    return out


def number_of(kernel: str, tiled: ExpertsCall) -> int:
    """A kernel by its name, "gathered" beside those of KERNELS; "prefill": the shape of it that the rules choose."""
    if kernel == "gathered":
        return Sm90Few.GATHERED_KERNEL
    if kernel in tuned_kernels.KERNELS:
        return tuned_kernels.KERNELS.index(kernel)
    experts, hidden = tiled.w13.shape[0], tiled.w2.shape[1] * layout.TILE
    tokens, top_k = tiled.topk_ids.shape
    return next(
        tuned_kernels.KERNELS.index(name)
        for name, most in sm90_choice.prefill_rules(experts, top_k, hidden)
        if most is None or tokens <= most
    )


def rounded(call: ExpertsCall) -> ExpertsCall:
    """The same call with weights that have been decoded and rounded to bfloat16."""
    raw = RawWeights(call.scheme, **{name: getattr(call, name) for name in WEIGHTS})
    w13, w2 = (w.to(torch.bfloat16) for w in moe.dequantize_experts(raw))
    absent: dict[str, Any] = dict.fromkeys(WEIGHTS[2:])
    return call._replace(scheme="none", w13=w13, w2=w2, **absent)


def rounds(kernel: str, tiled: ExpertsCall) -> bool:
    """Whether a kernel rounds the int4 weights of a call as `in_tiles` has it to bfloat16."""
    scales = tiled.w13_scale
    assert scales is not None
    kinds = {  # by dtype and size of a tile's
        (torch.int32, 64): "float16 per 64",
        (torch.int64, 32): "bfloat16 per 64 with zero points",
        (torch.int64, 64): "float32 per 64",
    }
    name = "decode" if kernel == "gathered" else SM90_KERNELS[number_of(kernel, tiled)]
    return name not in exact_kernels(kinds.get((scales.dtype, scales.shape[-1]), ""))


def error_of(kernel: str, scheme: str = "nvfp4", **fields: Any) -> float:
    """Relative L2 distance of a random call's result to the emulating oracle; infinite where it is not finite."""
    call = make_call(scheme, **{"hidden": 128, "inter": 64} | fields)
    out = run_on(kernel, in_tiles(call))
    if not torch.isfinite(out).all():
        return float("inf")
    return relative_error(out, call)


__all__ = [
    "ACTIVATIONS",
    "KERNELS",
    "LONG_ROWS",
    "SHAPES_OF_ALL",
    "SHAPES_OF_BYTES",
    "SHARES",
    "WEIGHTS",
    "empty_output",
    "error_of",
    "error_over_bound",
    "in_tiles",
    "make_call",
    "number_of",
    "of_a_checkpoint",
    "relative_error",
    "rounded",
    "rounds",
    "run_on",
    "why_not_here",
]
