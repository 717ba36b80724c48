"""Launches the kernels of one call."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from torch_moe_ops.backends.triton_engine.combine import combine_kernel
from torch_moe_ops.backends.triton_engine.configs import Config, Tile
from torch_moe_ops.backends.triton_engine.formats import OperandFormat, WeightFormat, row_scales
from torch_moe_ops.backends.triton_engine.gemm import gemm1_kernel, gemm2_kernel
from torch_moe_ops.backends.triton_engine.plan import Buffers, Plan, make_buffers, make_plan
from torch_moe_ops.backends.triton_engine.prologue import prologue_kernel, requantize_kernel
from torch_moe_ops.backends.triton_engine.schedule import FIELDS, MANY_SLOTS, many_slots
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.call import ExpertsCall

_PIECES = (256, 1024)  # activation values that one program handles, of few rows and of many
_MANY_ROWS = 128
_FEW_SLOTS = 128
_SHORT_ROW = 1024


def _launch(kernel: Any, grid: tuple[int, ...], plan: Plan, *args: Any, **constants: Any) -> None:
    if plan.target["PDL"]:
        constants["launch_pdl"] = True
    kernel[grid](*args, **plan.target, **constants)


def _piece(rows: int, stride: int) -> int:
    # 256 at least: with fewer values than threads Triton 3.6 gave wrong blocks (SM90, 64 values, 4 warps).
    return min(_PIECES[rows >= _MANY_ROWS], max(_PIECES[0], triton.next_power_of_2(stride)))


def _prefetch(plan: Plan) -> int:
    """Bytes of a row of GEMM2's weights to ask the L2 for while GEMM1 still runs; 0: none.

    It pays where GEMM1 leaves memory idle. With long rows it only takes bandwidth from GEMM1.
    """
    k, per_word = plan.intermediate_size, plan.weight2.per_word
    useful = plan.num_slots <= _FEW_SLOTS and k <= _SHORT_ROW and plan.config.gemm2.split_k == 1
    return 4 * k // per_word if useful and per_word > 1 and plan.target["PDL"] and k % 32 == 0 else 0


def _early_tiles(plan: Plan, gemm: int) -> bool:
    """Whether a GEMM reads what its tiles are (table or ids) before it waits for the launch in front.

    Only where that launch is one of this call's, which did not write them and waited for whoever did: GEMM1 behind a
    prologue that made no schedule, GEMM2 always. With many tokens other tiles hide what waiting first costs.
    """
    settled = plan.direct and plan.copies if gemm == 1 else plan.num_slots < MANY_SLOTS
    return settled and plan.target["PDL"]


def _codes(weight: Tensor, form: WeightFormat) -> Tensor:
    if form.tiled:
        return weight.view(torch.float8_e4m3fn)
    return weight.view(torch.int32) if form.per_word > 1 else weight


def _bytes(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """The tensor without a type that older targets lack; `instead` where there is none."""
    if tensor is None:
        return instead
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _factor(operand: OperandFormat, made: Tensor, gscale: Tensor | None, given: Tensor | None) -> Tensor:
    """What multiplies the accumulator besides alphas: made by us, over a gscale, or given with packed hidden states."""
    if operand.how == "packed" and operand.factor != "none":
        assert given is not None  # the op's checks have seen to it
        return given
    return gscale if operand.factor in ("tensor", "expert") and gscale is not None else made


def _scales(tile: Tile, form: WeightFormat, rows: int, k: int, scale: Tensor | None) -> str:
    """How block scales reach a GEMM's loop (words.multiply_words), for weights [E, rows, k].

    The pipeline copies aligned pieces of 4 bytes at least; with others a step would begin with a wait for its scales.
    """
    if scale is None or not form.group or form.scale == "tile":
        return "copied"
    groups, size = max(1, tile.block_k // form.group), scale.element_size()
    aligned = k // form.group * size % 4 == 0
    if aligned and tile.block_n * groups * size >= 4 * 32 * tile.num_warps:
        return "copied"
    in_words = size == 1 and groups % 4 == 0 and rows * (k // form.group) % 4 == 0 and scale.data_ptr() % 4 == 0
    return "shifted" if in_words and not aligned else "ahead"


def _tile_constants(tile: Tile, plan: Plan) -> dict[str, Any]:
    limit = {"maxnreg": tile.max_registers} if tile.max_registers else {}
    return limit | {
        "BLOCK_N": tile.block_n,
        "BLOCK_T": plan.config.block_t,
        "TAIL_T": plan.config.tail_t,
        "DIRECT": plan.direct,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }


def _run_prologue(call: ExpertsCall, plan: Plan, b: Buffers) -> None:
    if plan.direct and not plan.copies:
        return
    experts = call.w13.shape[0]
    piece = _piece(b.operand.shape[0], plan.x_stride)
    scheduled = 0 if plan.direct else experts
    many = many_slots(plan.num_slots, experts, plan.config.block_t)
    rows = b.operand.shape[0] * triton.cdiv(plan.x_stride, piece) if plan.copies else 0
    x = _bytes(call.hidden_states, call.hidden_states)
    _launch(
        prologue_kernel,
        (scheduled + rows,),
        plan,
        call.topk_ids,
        call.topk_weights,
        b.row_slot,
        b.table,
        x,
        _bytes(call.hidden_states_scale, x),
        b.factor if call.a1_gscale is None else call.a1_gscale,
        b.operand if plan.copies else b.factor,
        b.factor,
        plan.num_slots,
        experts,
        scheduled,
        call.local_expert_offset,
        plan.num_tiles,
        call.topk_ids.shape[1],
        K=plan.hidden_size,
        K_PADDED=plan.x_stride,
        PIECE=piece,
        ACT=plan.operand1.act,
        HOW=plan.operand1.how,
        WEIGHTED=call.router_weight_on_input,
        PER_WORD=plan.weight1.order,
        BLOCK_TOKENS=plan.config.block_t,
        CHUNK=min(4096 if many else 2048, max(64, triton.next_power_of_2(plan.num_slots))),
        BINS=max(32, triton.next_power_of_2(experts)),
        MANY=many,
        # One warp reduces without waiting for others, which is most of what a small schedule does.
        num_warps=8 if plan.num_slots >= 4096 else 4 if plan.num_slots > 256 else 1,
    )


def _run_gemm1(call: ExpertsCall, plan: Plan, b: Buffers, h: Tensor) -> None:
    tile, inter = plan.config.gemm1, plan.intermediate_size
    gated = ACTIVATIONS[call.activation].is_gated
    alphas = row_scales(call, 1, plan.weight1)
    width = tile.block_n // 2 if gated else tile.block_n
    stored = h.shape[1]
    _launch(
        gemm1_kernel,
        (plan.num_tiles * triton.cdiv(stored, width),),
        plan,
        b.operand,
        _factor(plan.operand1, b.factor, call.a1_gscale, call.hidden_states_scale),
        b.row_slot,
        call.topk_ids if plan.direct else b.table,
        _codes(call.w13, plan.weight1),
        _bytes(call.w13_scale, b.factor),
        b.factor if call.w13_zero_point is None else call.w13_zero_point,
        b.factor if alphas is None else alphas,
        b.factor if call.w13_bias is None else call.w13_bias,
        b.factor if call.a2_gscale is None else call.a2_gscale,
        h,
        b.h_factor,
        plan.num_slots,
        plan.num_tiles,
        call.w13.shape[0],
        call.local_expert_offset,
        call.topk_ids.shape[1],
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        FORMAT=plan.weight1,
        ACT=plan.operand1.act,
        H_HOW=plan.operand2.how if plan.fused else "none",
        FACTOR=plan.operand1.factor,
        H=plan.hidden_size,
        INTER=inter,
        I_PADDED=stored,
        OPERAND_STRIDE=plan.x_stride,
        ACTIVATION=call.activation,
        IS_GATED=gated,
        HAS_LIMIT=not math.isinf(call.swiglu_limit),
        ALPHAS=0 if alphas is None else alphas.numel() // alphas.shape[0],
        HAS_BIAS=call.w13_bias is not None,
        SLOT_ROWS=plan.operand1.how == "expert",
        SCALES=_scales(tile, plan.weight1, call.w13.shape[1], plan.hidden_size, call.w13_scale),
        PER_WORD=plan.weight2.order if plan.fused else 1,
        EARLY_TILES=_early_tiles(plan, 1),
        **_tile_constants(tile, plan),
    )


def _run_gemm2(call: ExpertsCall, plan: Plan, b: Buffers) -> None:
    tile = plan.config.gemm2
    alphas = row_scales(call, 2, plan.weight2)
    _launch(
        gemm2_kernel,
        (plan.num_tiles * triton.cdiv(plan.hidden_size, tile.block_n), tile.split_k),
        plan,
        b.h,
        _factor(plan.operand2, b.h_factor, call.a2_gscale, None),
        b.row_slot,
        call.topk_ids if plan.direct else b.table,
        _codes(call.w2, plan.weight2),
        _bytes(call.w2_scale, b.factor),
        b.factor if call.w2_zero_point is None else call.w2_zero_point,
        b.factor if alphas is None else alphas,
        b.factor if call.w2_bias is None else call.w2_bias,
        b.y,
        plan.num_slots,
        plan.num_tiles,
        call.w13.shape[0],
        call.local_expert_offset,
        FORMAT=plan.weight2,
        FACTOR=plan.operand2.factor,
        H=plan.hidden_size,
        INTER=plan.intermediate_size,
        OPERAND_STRIDE=plan.h_stride,
        ALPHAS=0 if alphas is None else alphas.numel() // alphas.shape[0],
        HAS_BIAS=call.w2_bias is not None,
        EARLY_TILES=_early_tiles(plan, 2),
        PREFETCH=_prefetch(plan),
        SPLIT_K=tile.split_k,
        SCALES=_scales(tile, plan.weight2, plan.hidden_size, plan.intermediate_size, call.w2_scale),
        **_tile_constants(tile, plan),
    )


def _run_requantize(plan: Plan, b: Buffers, h: Tensor) -> None:
    piece = _piece(plan.num_slots, plan.h_stride)
    _launch(
        requantize_kernel,
        (plan.num_slots, triton.cdiv(plan.h_stride, piece)),
        plan,
        h,
        b.h,
        b.h_factor,
        b.table[FIELDS * plan.num_tiles :],
        K=plan.intermediate_size,
        K_PADDED=plan.h_stride,
        PIECE=piece,
        ACT=plan.operand2.act,
        HOW=plan.operand2.how,
        PER_WORD=plan.weight2.order,
        DIRECT=plan.direct,
    )


def _run_combine(call: ExpertsCall, plan: Plan, b: Buffers, out: Tensor) -> None:
    # A few tokens: short pieces, to have more of them.
    block = min(1024 if out.shape[0] >= 128 else 256, triton.next_power_of_2(plan.hidden_size))
    _launch(
        combine_kernel,
        (out.shape[0], triton.cdiv(plan.hidden_size, block)),
        plan,
        b.y,
        call.topk_ids,
        call.topk_weights,
        out,
        plan.num_slots,
        call.w13.shape[0],
        call.local_expert_offset,
        TOP_K=call.topk_ids.shape[1],
        SPLIT_K=plan.config.gemm2.split_k,
        H=plan.hidden_size,
        BLOCK=block,
        WEIGHTED=not call.router_weight_on_input,
        # With experts elsewhere most slots may be foreign, and their bytes would be read for nothing.
        SPECULATE=out.shape[0] < _MANY_ROWS and call.num_experts in (0, call.w13.shape[0]),
        num_warps=4 if block > 256 else 2,
    )


def run_experts(call: ExpertsCall, out: Tensor, config: Config | None = None) -> None:
    """Fill `out` [num_tokens, hidden_size] with the routed experts of a checked call in the linear layout.

    config: tile sizes, None for those of the table. Four launches on the current stream, five where a scale of the
    intermediate needs more of a row than a tile of GEMM1 sees; nothing here depends on the values of a tensor.
    """
    if out.numel() == 0:
        return
    plan = make_plan(call, config)
    b = make_buffers(call, plan)
    _run_prologue(call, plan, b)
    if plan.fused:
        _run_gemm1(call, plan, b, b.h)
    else:
        h = torch.empty((plan.num_slots, plan.intermediate_size), dtype=torch.float32, device=out.device)
        _run_gemm1(call, plan, b, h)
        _run_requantize(plan, b, h)
    _run_gemm2(call, plan, b)
    _run_combine(call, plan, b, out)
