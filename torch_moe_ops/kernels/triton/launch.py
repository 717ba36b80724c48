"""Launches the kernels of one call."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from torch_moe_ops.activations import ACTIVATIONS
from torch_moe_ops.kernels.triton.combine import combine_kernel
from torch_moe_ops.kernels.triton.configs import Config, Tile
from torch_moe_ops.kernels.triton.gemm import gemm1_kernel, gemm2_kernel
from torch_moe_ops.kernels.triton.plan import Buffers, Plan, make_buffers, make_plan
from torch_moe_ops.kernels.triton.prologue import prologue_kernel, requantize_kernel
from torch_moe_ops.kernels.triton.schedule import FIELDS
from torch_moe_ops.ops.call import ExpertsCall

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


def _prefetch(plan: Plan) -> bool:
    """Whether GEMM2 asks the L2 for its weights while GEMM1 still runs.

    It pays where GEMM1 leaves memory idle. With long rows it only takes bandwidth from GEMM1.
    """
    k = plan.intermediate_size
    useful = plan.num_slots <= _FEW_SLOTS and k <= _SHORT_ROW and plan.config.gemm2.split_k == 1
    return useful and plan.packed and plan.target["PDL"] and k % 32 == 0


def _words(weight: Tensor, plan: Plan) -> Tensor:
    return weight.view(torch.int32) if plan.packed else weight


def _bytes(scale: Tensor | None, instead: Tensor) -> Tensor:
    return instead if scale is None else scale.view(torch.uint8)


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
    if plan.direct and plan.mode == "none":
        return
    experts = call.w13.shape[0]
    piece = _piece(b.operand.shape[0], plan.x_stride)
    scheduled = 0 if plan.direct else experts
    rows = 0 if plan.mode == "none" else b.operand.shape[0] * triton.cdiv(plan.x_stride, piece)
    x = call.hidden_states
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
        b.operand,
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
        MODE=plan.mode,
        WEIGHTED=call.router_weight_on_input,
        REORDER=plan.packed,
        BLOCK_TOKENS=plan.config.block_t,
        CHUNK=min(2048, max(64, triton.next_power_of_2(plan.num_slots))),
        BINS=max(32, triton.next_power_of_2(experts)),
        # One warp reduces without waiting for others, which is most of what a small schedule does.
        num_warps=4 if plan.num_slots > 256 else 1,
    )


def _run_gemm1(call: ExpertsCall, plan: Plan, b: Buffers, h: Tensor, dynamic: bool) -> None:
    tile, inter = plan.config.gemm1, plan.intermediate_size
    gated = ACTIVATIONS[call.activation].is_gated
    alphas = call.g1_alphas
    quantized = call.act_format == "nvfp4" and not dynamic
    gscale = call.a2_gscale if quantized else None
    width = tile.block_n // 2 if gated else tile.block_n
    stored = h.shape[1]
    _launch(
        gemm1_kernel,
        (plan.num_tiles * triton.cdiv(stored, width),),
        plan,
        b.operand,
        b.factor,
        b.row_slot,
        call.topk_ids if plan.direct else b.table,
        _words(call.w13, plan),
        _bytes(call.w13_scale, call.w13),
        b.factor if alphas is None else alphas,
        b.factor if call.w13_bias is None else call.w13_bias,
        b.factor if gscale is None else gscale,
        h,
        plan.num_tiles,
        call.w13.shape[0],
        call.local_expert_offset,
        call.topk_ids.shape[1],
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        SCHEME=call.scheme,
        H=plan.hidden_size,
        INTER=inter,
        I_PADDED=stored,
        OPERAND_STRIDE=plan.x_stride,
        ACTIVATION=call.activation,
        IS_GATED=gated,
        HAS_LIMIT=not math.isinf(call.swiglu_limit),
        ALPHAS=1 if alphas is None or alphas.ndim == 1 else alphas.shape[1],
        HAS_BIAS=call.w13_bias is not None,
        HAS_FACTOR=plan.mode == "token",
        SLOT_ROWS=plan.mode == "expert",
        GSCALE="none" if gscale is None else "expert" if gscale.ndim else "tensor",
        REORDER=plan.packed and not dynamic,
        **_tile_constants(tile, plan),
    )


def _run_gemm2(call: ExpertsCall, plan: Plan, b: Buffers, dynamic: bool) -> None:
    tile = plan.config.gemm2
    _launch(
        gemm2_kernel,
        (plan.num_tiles * triton.cdiv(plan.hidden_size, tile.block_n), tile.split_k),
        plan,
        b.h,
        b.h_factor,
        b.row_slot,
        call.topk_ids if plan.direct else b.table,
        _words(call.w2, plan),
        _bytes(call.w2_scale, call.w2),
        b.factor if call.g2_alphas is None else call.g2_alphas,
        b.factor if call.w2_bias is None else call.w2_bias,
        b.y,
        plan.num_slots,
        plan.num_tiles,
        call.w13.shape[0],
        call.local_expert_offset,
        SCHEME=call.scheme,
        H=plan.hidden_size,
        INTER=plan.intermediate_size,
        OPERAND_STRIDE=plan.h_stride,
        HAS_BIAS=call.w2_bias is not None,
        HAS_FACTOR=dynamic,
        PREFETCH=_prefetch(plan),
        SPLIT_K=tile.split_k,
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

    config: tile sizes, None for those of the table. Four launches on the current stream, five where the
    intermediate has a scale of its own per row; nothing here depends on the values of a tensor.
    """
    if out.numel() == 0:
        return
    plan = make_plan(call, config)
    b = make_buffers(call, plan)
    dynamic = call.act_format == "nvfp4" and call.a2_gscale is None
    _run_prologue(call, plan, b)
    if dynamic:
        h = torch.empty((plan.num_slots, plan.intermediate_size), dtype=torch.float32, device=out.device)
        _run_gemm1(call, plan, b, h, dynamic)
        _run_requantize(plan, b, h)
    else:
        _run_gemm1(call, plan, b, b.h, dynamic)
    _run_gemm2(call, plan, b, dynamic)
    _run_combine(call, plan, b, out)
