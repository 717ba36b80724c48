"""What a call's kernels need to know besides tensors, and the buffers between them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from torch_moe_ops.kernels.triton.configs import Config, select
from torch_moe_ops.kernels.triton.schedule import FIELDS, TAIL, max_tiles
from torch_moe_ops.ops.call import ExpertsCall


class Plan(NamedTuple):
    """What the kernels need to know besides tensors."""

    config: Config
    hidden_size: int
    intermediate_size: int
    h_stride: int  # stored columns of the intermediate
    x_stride: int  # stored columns of GEMM1's operand
    num_slots: int
    num_tiles: int
    mode: str  # how the prologue makes GEMM1's operand ("none": it does not)
    operand_dtype: torch.dtype
    packed: bool  # 4-bit weights: operands in the reordered K
    direct: bool  # no schedule: every slot is a tile of its own
    target: dict[str, bool]


class Buffers(NamedTuple):
    row_slot: Tensor  # int32 [slots]
    table: Tensor  # int32
    operand: Tensor  # [tokens or slots, x_stride]
    factor: Tensor  # float32 [tokens], used where the scale is the token's own
    h: Tensor  # [slots, h_stride]
    h_factor: Tensor  # float32 [slots], likewise
    y: Tensor  # float32 [split_k * slots, hidden_size]


def _padded(k: int, packed: bool) -> int:
    return triton.cdiv(k, 64) * 64 if packed else k


def _mode(call: ExpertsCall) -> str:
    if call.hidden_states_scale is not None:
        return "packed"
    if call.act_format == "nvfp4":
        if call.a1_gscale is None:
            return "token"
        return "expert" if call.a1_gscale.ndim else "tensor"
    if call.scheme == "none" and not call.router_weight_on_input:
        return "none"
    return "copy"


def target_of(device: torch.device) -> dict[str, bool]:
    """Which instructions the kernels may use: none of them in Triton's interpreter."""
    on_gpu = device.type == "cuda" and not triton.knobs.runtime.interpret
    return {"USE_PTX": on_gpu, "PDL": on_gpu and torch.cuda.get_device_capability(device)[0] >= 9}


def make_plan(call: ExpertsCall, config: Config | None = None) -> Plan:
    """Shapes and plain values decide everything; config: tile sizes, None for those of the rules."""
    tokens, top_k = call.topk_ids.shape
    num_slots, experts = tokens * top_k, call.w13.shape[0]
    packed = call.scheme != "none"
    direct = tokens == 1  # one token's experts differ, so nothing is read twice
    hidden_size = call.w2.shape[1]
    inter = call.w2.shape[2] * (2 if packed else 1)
    chosen = select(call.scheme, tokens, top_k, experts, hidden_size, inter) if config is None else config
    return Plan(
        config=chosen,
        hidden_size=hidden_size,
        intermediate_size=inter,
        h_stride=_padded(inter, packed),
        x_stride=_padded(hidden_size, packed),
        num_slots=num_slots,
        num_tiles=num_slots if direct else max_tiles(num_slots, experts, chosen.block_t),
        mode=_mode(call),
        # NVFP4 values (code times block scale) are exact in bfloat16, whatever the hidden states are.
        operand_dtype=torch.bfloat16 if call.act_format == "nvfp4" else call.hidden_states.dtype,
        packed=packed,
        direct=direct,
        target=target_of(call.w13.device),
    )


def make_buffers(call: ExpertsCall, plan: Plan) -> Buffers:
    """From torch's allocator at every call, so that a CUDA graph owns its own."""
    device, tokens = call.w13.device, call.topk_ids.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows = plan.num_slots if plan.mode == "expert" else tokens
    own = plan.mode == "none"
    return Buffers(
        row_slot=empty(plan.num_slots, dtype=torch.int32),
        table=empty(FIELDS * plan.num_tiles + TAIL, dtype=torch.int32),
        operand=call.hidden_states if own else empty(rows, plan.x_stride, dtype=plan.operand_dtype),
        factor=empty(tokens),
        h=empty(plan.num_slots, plan.h_stride, dtype=plan.operand_dtype),
        h_factor=empty(plan.num_slots),
        y=empty(plan.config.gemm2.split_k * plan.num_slots, plan.hidden_size),
    )
