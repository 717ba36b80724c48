"""Random calls in the layout of the `cuda_sm90` backend, beside the same call in the linear layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import empty_output, make_call, relative_error

from torch_moe_ops import _ext
from torch_moe_ops.backends import _sm90_layout as layout
from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.ops.call import ExpertsCall

KERNELS = ("decode", "prefill")


def why_not_here() -> str:
    """Why the kernels cannot run on this machine; empty where they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() != cuda_sm90.CAPABILITY:
        return f"needs compute capability {cuda_sm90.CAPABILITY}, got {torch.cuda.get_device_capability()}"
    return _ext.cuda_extension_reason()


def in_tiles(call: ExpertsCall) -> ExpertsCall:
    """The same call as `prepare` lays its weights out: tiles, and a bias with each half of its rows padded."""
    assert call.w13_scale is not None and call.w2_scale is not None
    gated = not call.activation.endswith("_no_mul")
    bias: Tensor | None = call.w13_bias
    if bias is not None:
        halves = bias.unflatten(1, (2 if gated else 1, -1))
        bias = F.pad(halves, (0, -halves.shape[2] % layout.TILE)).flatten(1)
    return call._replace(
        w13=layout.pack_codes(call.w13, gated),
        w13_scale=layout.pack_scales(call.w13_scale, gated, "w13_scale"),
        w13_bias=bias,
        w2=layout.pack_codes(call.w2, False),
        w2_scale=layout.pack_scales(call.w2_scale, False, "w2_scale"),
        backend="cuda_sm90",
    )


def run_on(kernel: str, tiled: ExpertsCall) -> Tensor:
    """The output of one of the KERNELS, from a buffer full of NaN."""
    tokens, hidden = tiled.hidden_states.shape[0], tiled.w2.shape[1] * layout.TILE
    out = torch.full((tokens, hidden), float("nan"), dtype=tiled.out_dtype, device=tiled.w2.device)
    cuda_sm90.run_kernel(tiled, out, decode=kernel == "decode")
    return out


def error_of(kernel: str, **fields: Any) -> float:
    """Relative L2 distance of a random call's result to the emulating oracle; infinite where it is not finite."""
    call = make_call("nvfp4", **{"hidden": 128, "inter": 64} | fields)
    out = run_on(kernel, in_tiles(call))
    if not torch.isfinite(out).all():
        return float("inf")
    return relative_error(out, call)


__all__ = ["KERNELS", "empty_output", "error_of", "in_tiles", "make_call", "relative_error", "run_on", "why_not_here"]
