"""Hidden states as FlashInfer's kernels take them: weighted, padded, quantized."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemes import ACT_FORMATS, SCHEMES

BF16 = (torch.bfloat16,)
ALIGNMENT = 16  # bytes: kernels read hidden states and write outputs 128 bits at a time


class Hidden(NamedTuple):
    """values: unquantized [tokens, padded K], or codes; scale: linear [tokens, scales], or None.

    token_scale: float32 [tokens], multiplies what comes of nvfp4 codes; None where one scale was calibrated.
    """

    values: Tensor
    scale: Tensor | None
    token_scale: Tensor | None = None


def op_name(call: ExpertsCall) -> str:
    """The op of a call's scheme, for messages."""
    return f"{SCHEMES[call.scheme].op_prefix}moe_routed"


def weigh_input(call: ExpertsCall) -> ExpertsCall:
    """The call with the routing weights multiplied into the hidden states, where it asks for that."""
    if not call.router_weight_on_input:
        return call
    if call.hidden_states_scale is not None:
        fail(op_name(call), "hidden_states", "be unquantized where router_weight_on_input is set", "packed codes")
    x = call.hidden_states
    weighted = (x.float() * call.topk_weights).to(x.dtype)
    return call._replace(
        hidden_states=weighted, topk_weights=torch.ones_like(call.topk_weights), router_weight_on_input=False
    )


def hidden_states_of(call: ExpertsCall, hidden_size: int, dtypes: tuple[torch.dtype, ...] = BF16) -> Hidden:
    """Quantized as call.act_format says, with zeros up to hidden_size values.

    dtypes: those that the kernel takes unquantized.
    """
    x, scale, act = call.hidden_states, call.hidden_states_scale, ACT_FORMATS[call.act_format]
    if scale is not None:
        missing = hidden_size - x.shape[1] * act.pack
        columns = SCHEMES[call.scheme].act_scale_columns(act, hidden_size)
        return Hidden(_pad(x, missing // act.pack), _pad(scale, columns - scale.shape[1]))
    if act.dtype is None:
        if x.dtype not in dtypes:
            fail(op_name(call), "hidden_states", f"have one of the dtypes {[str(d) for d in dtypes]}", x.dtype)
        return Hidden(_pad(x, hidden_size - x.shape[1]), None)
    return _quantize(call, _pad(x, hidden_size - x.shape[1]))


def _quantize(call: ExpertsCall, x: Tensor) -> Hidden:
    if call.act_format == "mxfp8":
        return Hidden(*torch.ops.moeq.quantize_mxfp8(x))
    group = SCHEMES[call.scheme].fp8_group
    if call.act_format == "fp8":
        gscale = None if group or is_dynamic(call) else single_scale(call, "a1_gscale")
        return Hidden(*torch.ops.moeq.quantize_fp8(x, gscale, group))
    if not is_dynamic(call):
        return Hidden(*torch.ops.moeq.quantize_nvfp4(x, single_scale(call, "a1_gscale")))
    gscale = torch.ops.moeq.dynamic_gscale_nvfp4(x)
    codes, scale = torch.ops.moeq.quantize_nvfp4(x, gscale)
    return Hidden(codes, scale, gscale.reciprocal())


def is_dynamic(call: ExpertsCall) -> bool:
    """Nothing was calibrated: tokens and rows of the intermediate are quantized with scales of their own."""
    return call.a1_gscale is None and call.a2_gscale is None


def single_scale(call: ExpertsCall, name: str) -> Tensor:
    """A calibrated scale that serves all experts: float32 []."""
    scale = getattr(call, name)
    if scale is None or scale.ndim:
        got = None if scale is None else tuple(scale.shape)
        fail(op_name(call), name, f"have shape (): one calibrated scale for all experts (backend {call.backend})", got)
    return scale


def calibrated(call: ExpertsCall, name: str) -> Tensor:
    """A scale that must have been calibrated: float32 [] or [experts]."""
    scale: Tensor | None = getattr(call, name)
    if scale is None:
        fail(op_name(call), name, f"be given: backend {call.backend} takes calibrated scales only", None)
    return scale


def refuse_packed(call: ExpertsCall, why: str) -> None:
    """For kernels that do not take hidden states which the caller quantized."""
    if call.hidden_states_scale is not None:
        fail(op_name(call), "hidden_states", f"be unquantized for {call.backend}, {why}", "packed codes")


def is_aligned(x: Tensor) -> bool:
    """Whether kernels may read or write x where it lies."""
    return x.data_ptr() % ALIGNMENT == 0


def _pad(x: Tensor, columns: int) -> Tensor:
    """x with so many columns of zeros behind it, aligned. Any dtype: bytes are padded as bytes."""
    if not columns:
        return x if is_aligned(x) else x.clone()
    if x.element_size() == 1:
        return pad(x.view(torch.uint8), (0, columns)).view(x.dtype)
    return pad(x, (0, columns))
