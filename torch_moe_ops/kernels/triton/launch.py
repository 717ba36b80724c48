"""Launches the kernels of one call. Buffers come from torch's allocator at every call, so a CUDA graph owns its own."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torch_moe_ops.activations import ACTIVATIONS
from torch_moe_ops.kernels.triton.combine import combine_kernel
from torch_moe_ops.kernels.triton.configs import Config, Tile, select
from torch_moe_ops.kernels.triton.gemm import gemm1_kernel, gemm2_kernel
from torch_moe_ops.kernels.triton.prologue import prologue_kernel, requantize_kernel
from torch_moe_ops.kernels.triton.schedule import FIELDS, TAIL, max_tiles
from torch_moe_ops.ops.call import ExpertsCall

_PIECES = (256, 1024)  # activation values that one program handles, of few rows and of many
_MANY_ROWS = 128
_FEW_SLOTS = 128  # up to which launches are short enough for a prefetch to matter
_PREFETCH_BYTES = 1024


class _Plan(NamedTuple):
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


class _Buffers(NamedTuple):
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


def _target(device: torch.device) -> dict[str, bool]:
    """Which instructions the kernels may use: none of them in Triton's interpreter."""
    on_gpu = device.type == "cuda" and not triton.knobs.runtime.interpret
    return {"USE_PTX": on_gpu, "PDL": on_gpu and torch.cuda.get_device_capability(device)[0] >= 9}


def _plan(call: ExpertsCall, config: Config | None) -> _Plan:
    tokens, top_k = call.topk_ids.shape
    num_slots, experts = tokens * top_k, call.w13.shape[0]
    packed = call.scheme != "none"
    direct = tokens == 1  # one token's experts differ, so nothing is read twice
    hidden_size = call.w2.shape[1]
    inter = call.w2.shape[2] * (2 if packed else 1)
    chosen = select(call.scheme, tokens, top_k, experts, hidden_size, inter) if config is None else config
    return _Plan(
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
        target=_target(call.w13.device),
    )


def _buffers(call: ExpertsCall, plan: _Plan) -> _Buffers:
    device, tokens = call.w13.device, call.topk_ids.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows = plan.num_slots if plan.mode == "expert" else tokens
    own = plan.mode == "none"
    return _Buffers(
        row_slot=empty(plan.num_slots, dtype=torch.int32),
        table=empty(FIELDS * plan.num_tiles + TAIL, dtype=torch.int32),
        operand=call.hidden_states if own else empty(rows, plan.x_stride, dtype=plan.operand_dtype),
        factor=empty(tokens),
        h=empty(plan.num_slots, plan.h_stride, dtype=plan.operand_dtype),
        h_factor=empty(plan.num_slots),
        y=empty(plan.config.gemm2.split_k * plan.num_slots, plan.hidden_size),
    )


def _launch(kernel: Any, grid: tuple[int, ...], plan: _Plan, *args: Any, **constants: Any) -> None:
    if plan.target["PDL"]:
        constants["launch_pdl"] = True
    kernel[grid](*args, **plan.target, **constants)


def _piece(rows: int, stride: int) -> int:
    # 256 at least: with fewer values than threads Triton 3.6 gave wrong blocks (SM90, 64 values, 4 warps).
    return min(_PIECES[rows >= _MANY_ROWS], max(_PIECES[0], triton.next_power_of_2(stride)))


def _prefetch(plan: _Plan, k: int) -> int:
    """Bytes of each weight row to ask for before the kernel ahead has ended; 0: none."""
    few = plan.num_slots <= _FEW_SLOTS and plan.config.gemm2.split_k == 1
    return _PREFETCH_BYTES if few and plan.packed and plan.target["PDL"] and k % 32 == 0 else 0


def _words(weight: Tensor, plan: _Plan) -> Tensor:
    return weight.view(torch.int32) if plan.packed else weight


def _bytes(scale: Tensor | None, instead: Tensor) -> Tensor:
    return instead if scale is None else scale.view(torch.uint8)


def _tile_constants(tile: Tile, plan: _Plan) -> dict[str, Any]:
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


def _run_prologue(call: ExpertsCall, plan: _Plan, b: _Buffers) -> None:
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


def _run_gemm1(call: ExpertsCall, plan: _Plan, b: _Buffers, h: Tensor, dynamic: bool) -> None:
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


def _run_gemm2(call: ExpertsCall, plan: _Plan, b: _Buffers, dynamic: bool) -> None:
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
        PREFETCH=_prefetch(plan, plan.intermediate_size),
        SPLIT_K=tile.split_k,
        **_tile_constants(tile, plan),
    )


def _run_requantize(plan: _Plan, b: _Buffers, h: Tensor) -> None:
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


def _run_combine(call: ExpertsCall, plan: _Plan, b: _Buffers, out: Tensor) -> None:
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
    plan = _plan(call, config)
    b = _buffers(call, plan)
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
