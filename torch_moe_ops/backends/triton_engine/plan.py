"""What a call's kernels need to know besides tensors, and the buffers between them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from torch_moe_ops.backends.triton_engine.configs import FP8_PRODUCTS, Config, Tile, select
from torch_moe_ops.backends.triton_engine.formats import (
    NDIM,
    OperandFormat,
    WeightFormat,
    operand_dtype,
    operand_format,
    weight_format,
)
from torch_moe_ops.backends.triton_engine.permute import BLOCK
from torch_moe_ops.backends.triton_engine.schedule import FIELDS, TAIL, max_tiles
from torch_moe_ops.backends.triton_engine.tiled import ROWS, TILE_K
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.devices import capability_of
from torch_moe_ops.core.schemes import SCHEMES, ceil_div


class Plan(NamedTuple):
    """What the kernels need to know besides tensors."""

    config: Config
    hidden_size: int
    intermediate_size: int
    h_stride: int  # stored columns of the intermediate
    x_stride: int  # stored columns of GEMM1's operand
    num_slots: int
    num_tiles: int
    weight1: WeightFormat
    weight2: WeightFormat
    operand1: OperandFormat
    operand2: OperandFormat
    copies: bool  # the prologue makes GEMM1's operand; else it is the hidden states
    fused: bool  # GEMM1 makes GEMM2's operand; else another launch does, from float32
    dtype1: torch.dtype  # of GEMM1's operand
    dtype2: torch.dtype
    direct: bool  # no schedule: every slot is a tile of its own
    target: dict[str, bool]


class Buffers(NamedTuple):
    row_slot: Tensor  # int32 [slots]
    table: Tensor  # int32
    operand: Tensor  # [tokens or slots, x_stride]
    factor: Tensor  # float32 [tokens], or [tokens, groups], where the prologue makes scales
    h: Tensor  # [slots, h_stride]
    h_factor: Tensor  # float32 [slots], or [slots, groups], likewise; zeros where tiles of GEMM1 raise them
    y: Tensor  # float32 [split_k * slots, hidden_size]


def _padded(k: int, form: WeightFormat) -> int:
    return k if form.per_word == 1 else triton.cdiv(k, BLOCK) * BLOCK


@cache
def target_of(device: torch.device) -> dict[str, bool]:
    """Which instructions the kernels may use: none of them in Triton's interpreter. device: a tensor's."""
    on_gpu = device.type == "cuda" and not triton.knobs.runtime.interpret  # as it was when kernels were made
    return {"USE_PTX": on_gpu, "PDL": on_gpu and capability_of(device)[0] >= 9}


def multiplies_int8(device: torch.device) -> bool:
    """Whether int8 codes are multiplied as they are: exact, as sums are int32.

    Products of fp8 codes would not be: Hopper keeps 14 bits of such a sum, which moves codes of the intermediate
    that lie next to a tie.
    """
    return target_of(device)["USE_PTX"]


def _fitting(tile: Tile, form: WeightFormat) -> Tile:
    """The tile with steps of K that the weight's scales and the registers of its decoded form allow."""
    block_n, block_k = max(tile.block_n, 64), max(tile.block_k, 64)
    if form.scale in ("tile", "partial"):
        block_k = min(block_k, form.group, 128)
    if form.wide:
        return tile._replace(block_n=min(block_n, 128), block_k=64, max_registers=0)
    if form.terms == 2:
        return tile._replace(block_n=min(block_n, 128), block_k=min(block_k, 128), max_registers=0)
    if form.native and form.code == "e4m3":
        block_k = TILE_K if form.tiled else min(block_k, 128)  # a sum on fp8 tensor cores is not longer
    return tile._replace(block_n=block_n, block_k=block_k)


def _is_copied(call: ExpertsCall, form: WeightFormat, operand: OperandFormat, dtype: torch.dtype) -> bool:
    """Whether GEMM1 cannot read the hidden states as they come."""
    if form.order > 1 or call.router_weight_on_input:
        return True
    return operand.how not in ("none", "packed") or call.hidden_states.dtype != dtype


def tokens_alone(tokens: int, num_local_experts: int, num_experts: int) -> int:
    """Tokens that give a whole layer of a rank's experts as many slots as the rank has in the mean.

    One token stays one and more stay more: its slots are tiles without a schedule.
    """
    return tokens if tokens <= 1 else max(2, ceil_div(tokens * num_local_experts, num_experts))


def _sizes(call: ExpertsCall) -> tuple[int, int]:
    """hidden_size and intermediate_size, that of tiles as they are padded."""
    if call.w2.ndim == NDIM:
        return call.w2.shape[1] * ROWS, call.w2.shape[2] * TILE_K
    return call.w2.shape[1], call.w2.shape[2] * SCHEMES[call.scheme].pack


def make_plan(call: ExpertsCall, config: Config | None = None) -> Plan:
    """Shapes and plain values decide everything; config: tile sizes, None for those of the rules."""
    tokens, top_k = call.topk_ids.shape
    num_slots, experts = tokens * top_k, call.w13.shape[0]
    direct = tokens == 1  # one token's experts differ, so nothing is read twice
    hidden_size, inter = _sizes(call)
    native = multiplies_int8(call.w13.device)
    weights = weight_format(call, 1, native), weight_format(call, 2, native)
    operands = operand_format(call, 1, weights[0]), operand_format(call, 2, weights[1])
    dtypes = operand_dtype(call, weights[0]), operand_dtype(call, weights[1])
    chosen = config
    if chosen is None:
        scheme = FP8_PRODUCTS if weights[0].native and weights[0].code == "e4m3" else call.scheme
        alone = tokens_alone(tokens, experts, call.all_experts())
        chosen = select(scheme, alone, top_k, experts, hidden_size, inter, call.act_format)
    tile1, tile2 = _fitting(chosen.gemm1, weights[0]), _fitting(chosen.gemm2, weights[1])
    chosen = chosen._replace(gemm1=tile1, gemm2=tile2)
    width = tile1.block_n // (2 if ACTIVATIONS[call.activation].is_gated else 1)
    return Plan(
        config=chosen,
        hidden_size=hidden_size,
        intermediate_size=inter,
        h_stride=_padded(inter, weights[1]),
        x_stride=_padded(hidden_size, weights[0]),
        num_slots=num_slots,
        num_tiles=num_slots if direct else max_tiles(num_slots, experts, chosen.block_t),
        weight1=weights[0],
        weight2=weights[1],
        operand1=operands[0],
        operand2=operands[1],
        copies=_is_copied(call, weights[0], operands[0], dtypes[0]),
        fused=operands[1].how != "token" and width % operands[1].block == 0,
        dtype1=dtypes[0],
        dtype2=dtypes[1],
        direct=direct,
        target=target_of(call.w13.device),
    )


def make_buffers(call: ExpertsCall, plan: Plan) -> Buffers:
    """From torch's allocator at every call, so that a CUDA graph owns its own."""
    device, tokens = call.w13.device, call.topk_ids.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def factors(rows: int, operand: OperandFormat, k: int) -> Tensor:
        return empty(rows, ceil_div(k, 128)) if operand.factor == "group" else empty(rows)

    rows = plan.num_slots if plan.operand1.how == "expert" else tokens
    h_factor = factors(plan.num_slots, plan.operand2, plan.intermediate_size)
    if plan.operand2.factor == "row" and plan.fused:
        h_factor.zero_()
    return Buffers(
        row_slot=empty(plan.num_slots, dtype=torch.int32),
        table=empty(FIELDS * plan.num_tiles + TAIL, dtype=torch.int32),
        operand=empty(rows, plan.x_stride, dtype=plan.dtype1) if plan.copies else call.hidden_states,
        factor=factors(rows, plan.operand1, plan.hidden_size),
        h=empty(plan.num_slots, plan.h_stride, dtype=plan.dtype2),
        h_factor=h_factor,
        y=empty(plan.config.gemm2.split_k * plan.num_slots, plan.hidden_size),
    )
