"""Launches the kernels of a backward pass (gradients/on_gpu.py has the pass)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from torch_moe_ops.backends.triton_engine.backward import bias_kernel, gather_sum_kernel, weights_kernel
from torch_moe_ops.backends.triton_engine.backward_pass import Pass
from torch_moe_ops.backends.triton_engine.grouped import Addend, Product, tile_for
from torch_moe_ops.backends.triton_engine.hidden import hidden_kernel
from torch_moe_ops.backends.triton_engine.known import Launch, Repeated
from torch_moe_ops.backends.triton_engine.plan import target_of
from torch_moe_ops.core.devices import processors_of
from torch_moe_ops.core.schemes import ceil_div, next_power_of_2

__all__ = ["Hidden", "Product", "combine", "combine_in", "parts_of", "sums_of_experts", "weights_gradient"]

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ROWS_AT_ONCE = 16  # programs of a multiprocessor, a row each


class Hidden(Product):
    """The intermediate of some experts in u, bfloat16 [pairs, intermediate_size].

    Or where there is z: z becomes the gradient of what GEMM1 gives, and parts what makes those of routing weights
    (weights_gradient).

    Args:
        factor: float32 [experts, 1 or halves], multiplies weights. Of two columns it does so with z once more.
        u: the gradient of the intermediate where the routing weight is 1, if there is z; of its own, and the
            intermediate takes its place, if keeps_h, else it may be the last columns of z.
        z: bfloat16 [pairs, rows]. parts: of parts_of, or None.
    """

    def __init__(
        self, p: Pass, factor: Tensor, u: Tensor, addend: Addend | None, z: Tensor | None = None,
        parts: Tensor | None = None, keeps_h: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(p.x, p.slots.token, p.slots.ends, True, u, factor, addend)
        self.p, self.z, self.parts, self.keeps_h = p, z, parts, keeps_h

    def _launch_with(self, weights: Tensor) -> Repeated:
        """weights: of w13, bfloat16 [count or more, rows, hidden_size]."""
        p, u, z, parts, addend, factor, tile = (
            self.p, self.out, self.z, self.parts, self.addend, self.scale, self.tile,
        )  # fmt: skip
        call, (bias, _) = p.call, p.biases
        assert factor is not None
        return Repeated(
            hidden_kernel,
            (
                p.x,
                p.slots.token,
                weights,
                p.slots.ends,
                factor,
                u if bias is None else bias,
                u if addend is None else addend.low,
                u if addend is None else addend.factor,
                u,
                u if z is None else z,
                u if parts is None else parts,
                p.slots.order,
                call.topk_weights,
                call.swiglu_alpha,
                call.swiglu_beta,
                call.swiglu_limit,
            ),
            {"num_warps": tile.num_warps},
            K=p.sizes.hidden_size,
            INTER=p.sizes.intermediate_size,
            U_WIDTH=u.stride(0),
            FACTORS=factor.shape[1],
            RANKS=0 if addend is None else addend.ranks,
            STEP=0 if addend is None else addend.step,
            ACTIVATION=call.activation,
            IS_GATED=p.sizes.is_gated,
            HAS_LIMIT=not math.isinf(call.swiglu_limit),
            HAS_BIAS=bias is not None,
            BACKWARD=z is not None,
            WEIGHTED=p.weighted,
            WRITES_H=self.keeps_h,
            WANTS_PARTS=parts is not None,
            TIMES_FACTOR=factor.shape[1] == 2,
            ROUNDED=_TYPES[call.hidden_states.dtype],
            BINS=max(32, next_power_of_2(weights.shape[0])),
            BLOCK_M=tile.rows,
            TAIL_M=64,
            BLOCK_I=_columns(p, tile.columns),
            BLOCK_K=tile.k,
            STAGES=tile.num_stages,
            USE_PTX=target_of(u.device)["USE_PTX"],
        )


def _columns(p: Pass, columns: int) -> int:
    """Of the intermediate in a tile with so many columns of w13."""
    return columns // 2 if p.sizes.is_gated else columns


def parts_of(p: Pass, u: Tensor) -> Tensor:
    """What `Hidden` of u leaves of routing weights: float32 [pairs, tiles]."""
    tile = tile_for(u, p.sizes.hidden_size)
    tiles = ceil_div(p.sizes.intermediate_size, _columns(p, tile.columns))
    return torch.empty((p.slots.order.shape[0], tiles), dtype=torch.float32, device=p.grad.device)


def weights_gradient(p: Pass, parts: Tensor) -> Tensor:
    """The gradient of the routing weights, float32 [slots]; zeros where an expert is not here."""
    dw = torch.zeros(parts.shape[0], dtype=torch.float32, device=parts.device)
    bias, hidden_size = p.biases[1], p.sizes.hidden_size
    programs = _ROWS_AT_ONCE * processors_of(dw.device) if dw.is_cuda else 8
    launch, slots = _weights_launch(hidden_size, parts.shape[1], bias is not None), p.slots
    tensors = (parts, dw, slots.order, slots.expert, slots.ends, parts if bias is None else bias, p.grad)
    launch(weights_kernel, (programs,), tensors, p.sizes.num_experts, p.call.topk_ids.shape[1])
    return dw


@lru_cache
def _weights_launch(hidden_size: int, parts: int, has_bias: bool) -> Launch:
    return Launch(
        H=hidden_size,
        PARTS=parts,
        BINS=next_power_of_2(parts),
        HAS_BIAS=has_bias,
        BLOCK=min(1024, max(128, next_power_of_2(hidden_size))),
    )


def sums_of_experts(rows: Tensor, p: Pass, of_tokens: bool) -> Tensor:
    """float32 [experts, columns]: each expert's rows added up. of_tokens: rows of tokens, times the routing weight."""
    out = torch.empty((p.sizes.num_experts, rows.shape[1]), dtype=torch.float32, device=rows.device)
    grid = p.sizes.num_experts, ceil_div(rows.shape[1], 128)
    tensors = (rows, p.slots.order, p.slots.ends, p.call.topk_weights, out)
    launch = _bias_launch(rows.shape[1], of_tokens, of_tokens and p.weighted)
    launch(bias_kernel, grid, tensors, p.call.topk_ids.shape[1])
    return out


@lru_cache
def _bias_launch(columns: int, of_tokens: bool, weighted: bool) -> Launch:
    return Launch(N=columns, OF_TOKENS=of_tokens, WEIGHTED=weighted, BLOCK_M=32, BLOCK_N=128)


def combine(rows: Tensor, p: Pass, dtype: torch.dtype, of_output: bool = False, by_slot: bool = False) -> Tensor:
    """[tokens, columns]: the rows of each token's local slots added up, ascending, in float32.

    of_output: with the biases of w2, and times the routing weights, where there are some.
    by_slot: rows are so, and have their biases; else by place.
    """
    out = rows.new_empty((p.call.topk_ids.shape[0], rows.shape[1]), dtype=dtype)
    combine_in(out, rows, p, of_output, by_slot)
    return out


def combine_in(out: Tensor, rows: Tensor, p: Pass, of_output: bool = False, by_slot: bool = False) -> None:
    """`combine` in columns of a matrix."""
    bias = p.biases[1] if of_output and not by_slot else None
    (tokens, top_k), width, slots = p.call.topk_ids.shape, rows.shape[1], p.slots
    weighted, uses_ptx = of_output and p.weighted, target_of(out.device)["USE_PTX"]
    launch = _sum_launch(top_k, width, out.stride(0), weighted, bias is not None, by_slot, uses_ptx)
    sources = slots.places(), slots.ends, slots.expert, p.call.topk_weights
    tensors = (rows, *sources, rows if bias is None else bias, out)
    launch(gather_sum_kernel, (tokens, ceil_div(width, launch.constants["BLOCK"])), tensors, p.sizes.num_experts)


@lru_cache
def _sum_launch(
    top_k: int, width: int, out_width: int, weighted: bool, has_bias: bool, by_slot: bool, uses_ptx: bool
) -> Launch:
    return Launch(
        TOP_K=top_k,
        H=width,
        OUT_WIDTH=out_width,
        WEIGHTED=weighted,
        HAS_BIAS=has_bias,
        BY_SLOT=by_slot,
        BLOCK=min(1024, next_power_of_2(width)),
        USE_PTX=uses_ptx,
    )
