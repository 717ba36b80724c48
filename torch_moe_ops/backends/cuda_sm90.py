"""The backends `cuda_sm90` and `cuda_sm90_int4`: CUDA kernels for Hopper GPUs, in csrc/cuda/sm90 (docs/hopper.md).

The second one rounds its weights, so that `accuracy="strict"` leaves it out. Both lay them out in the same way, and
several kernels read that: `decode`, one persistent launch for few tokens, and prefill's grouped GEMMs for many, with
`slim`, `narrow` or `wide` tiles. sm90/choice.py chooses by shapes and number of tokens. Many tokens of INT4 beside fp8
activations are for fp8 tensor cores, where those kernels take the scales (sm90/fp8_products.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend, RemoteExperts, Requirement, formats, one_of, register
from torch_moe_ops.backends.sm90 import byte_formats, fp8_products
from torch_moe_ops.backends.sm90.choice import Choice, choice_of, may_gather
from torch_moe_ops.backends.sm90.common import (
    NO_ROUTER,
    check_device,
    needs,
    router_of,
    runs_on,
)
from torch_moe_ops.backends.sm90.formats import (
    prepare,
    restore,
    scales_reason,
    size_multiple,
    specs,
    tile_k,
)
from torch_moe_ops.backends.sm90.notes import notes_of, notes_of_rounded
from torch_moe_ops.backends.triton_engine.backward_pass import BySlot, Decoder, Pass, RanksBySlot
from torch_moe_ops.core.call import ExpertsCall, for_kernels
from torch_moe_ops.core.kernel_facts import Router, Sm90, own_of
from torch_moe_ops.core.layout import Layout
from torch_moe_ops.core.problem import STANDARD, STRICT, Problem
from torch_moe_ops.core.saving import is_for_backward
from torch_moe_ops.core.schemes import ceil_div
from torch_moe_ops.numerics import mx, nvfp4
from torch_moe_ops.tuning.tuned_kernels import KERNELS

_own = own_of["experts_sm90"]
_own_remote = own_of["experts_sm90_remote"]
DECODE = 0  # of KERNELS
_LEAST_OF_PREFILL, _NARROW = KERNELS.index("slim"), KERNELS.index("narrow")
_LEAST_TOKENS = 2048  # that are worth two calls where memory matters
FORMATS: dict[str, tuple[str, ...]] = {
    "nvfp4": ("nvfp4", "none", "fp8"),
    "mxfp4": ("none", "fp8", "mxfp8"),
    "fp8": ("none", "fp8"),
    "fp8_block": ("none", "fp8"),
    "mxfp8": ("none", "mxfp8"),
    "int8": ("none",),
}
# Their weights are rounded to bfloat16, which is more than docs/numerics.md allows a strict backend.
ROUNDED_FORMATS: dict[str, tuple[str, ...]] = {"mxint4": ("none",), "int4": ("none", "fp8")}


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    if fp8_products.are_faster(call):
        return fp8_products.run(call, out)
    kernel = _kernel(call, out, call.topk_ids.shape[1])
    if not (is_for_backward() and _holds_much(call, out)):
        return run_kernel(call, out, kernel)
    half = ceil_div(out.shape[0], 512) * 256  # aligned
    for rows in (slice(0, half), slice(half, None)):  # the same bits: a row's sums do not depend on the others
        of_tokens = {name: t[rows] for name in _OF_TOKENS if (t := getattr(call, name)) is not None}
        run_kernel(call._replace(**of_tokens), out[rows], kernel)
    return None


_OF_TOKENS = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")


def _holds_much(call: ExpertsCall, out: Tensor) -> bool:
    """Whether buffers of all tokens, gathered rows, intermediates and results, are over half of the packed weights.

    What a backward pass holds is less: one of them or two. Not of float16, whose operands depend on how many tokens the
    kernels get (HALF_SLOTS), and with them the order of sums.
    """
    if call.hidden_states.dtype == torch.float16:
        return False
    of_pair = 2 * (2 * out.shape[1] + call.w2.shape[2] * tile_k(call.scheme))
    return 2 * call.topk_ids.numel() * of_pair > call.w13.nbytes + call.w2.nbytes and out.shape[0] >= _LEAST_TOKENS


def run_monolithic(call: ExpertsCall, routing: tuple[Any, ...], out: Tensor) -> bool:
    """`run` from router logits; False where their groups are more than the kernels route, or another op runs."""
    router = router_of(routing)
    if router is None or fp8_products.are_faster(call, out.shape[0] * router.top_k):
        return False
    without_ids = call._replace(topk_ids=None, topk_weights=None)  # type: ignore[arg-type]
    run_kernel(without_ids, out, _kernel(call, out, router.top_k), router)
    return True


def _kernel(call: ExpertsCall, out: Tensor, top_k: int, of_prefill: bool = False) -> int:
    """By its number, for as many tokens as `out` has. of_prefill: the nearest that gathers and combines in launches."""
    tokens, hidden = out.shape
    sizes = (call.w13.shape[0], top_k, hidden, call.w2.shape[2] * tile_k(call.scheme), call.all_experts())
    has_bias = call.w13_bias is not None or call.w2_bias is not None
    half = call.hidden_states.dtype == torch.float16
    gathers = not of_prefill and not half
    gathers = gathers and may_gather(
        call.scheme, call.act_format, call.activation, has_bias, call.router_weight_on_input
    )
    if gathers and call.act_format != "none":  # tokens that are codes, or have a scale for each expert, are for others
        by_expert = call.a1_gscale is not None and call.a1_gscale.ndim > 0
        gathers = call.hidden_states_scale is None and not by_expert
    choice = choice_of(out.get_device(), call.scheme, call.act_format, *sizes, gathers)
    kernel = choice.kernel(tokens)
    if half and call.act_format == "none" and kernel != DECODE:
        kernel = _of_halves(call, choice, tokens, top_k)
    return max(kernel, _LEAST_OF_PREFILL) if of_prefill else kernel


def _of_halves(call: ExpertsCall, choice: Choice, tokens: int, top_k: int) -> int:
    """Of prefill's, for float16 hidden states: each is two rows of an operand, or one of float16 (HALF_SLOTS)."""
    if call.scheme in ("fp8", "fp8_block"):  # always one of float16
        return choice.kernel(tokens)
    many = call.scheme == "nvfp4" and tokens * top_k > Sm90.HALF_SLOTS * call.all_experts()
    return max(choice.kernel(tokens), _NARROW) if many else choice.kernel(2 * tokens)


def run_kernel(call: ExpertsCall, out: Tensor, kernel: int, router: Router = NO_ROUTER) -> None:
    """`run` on a kernel by its number in KERNELS; with a router, call.topk_ids and topk_weights are None."""
    rounds = call.act_format != "none"
    own: dict[str, Any] = {"act_format": call.act_format if rounds else "nvfp4", "quantize_hidden": rounds}
    if call.hidden_states_scale is not None:
        call, own["quantize_hidden"] = _of_values(call, call.hidden_states_scale), False
    check_device(call)
    arguments = _own(own | {"quantize_intermediate": rounds, "kernel": kernel})
    torch.ops.moeq_C.experts_sm90(out, *for_kernels(call), *router, *arguments)


def _run_remote(call: ExpertsCall, where: dict[str, Any], parts: Tensor) -> None:
    """RemoteExperts: prefill's kernels, which gather tokens and add up experts in launches of their own."""
    rounds, top_k = call.act_format != "none", call.topk_ids.shape[1]
    own: dict[str, Any] = {"act_format": call.act_format if rounds else "nvfp4"}
    kernel = _kernel(call, parts, top_k, of_prefill=True)
    own |= {"quantize_hidden": rounds, "quantize_intermediate": rounds, "kernel": kernel}
    check_device(call)
    torch.ops.moeq_C.experts_sm90_remote(parts, *for_kernels(call), *_own_remote(own | where))


def _of_values(call: ExpertsCall, scale: Tensor) -> ExpertsCall:
    """A call on packed hidden states as one on the values of their codes, which bfloat16 holds.

    Scales of blocks of 16 or 32 are within (code times scale has six significant bits, or four), those of rows, and of
    groups of 128 beside fp8_block weights, beside them; the alphas have the rest.
    """
    codes = call.hidden_states
    if call.act_format == "fp8":
        return call._replace(hidden_states=codes.to(torch.bfloat16), hidden_states_scale=scale.contiguous())
    x = nvfp4.dequantize(codes, scale) if call.act_format == "nvfp4" else mx.dequantize_mx(codes, scale, "e4m3")
    return call._replace(hidden_states=x.to(torch.bfloat16), hidden_states_scale=None)


def dequantize(stored: Any, scheme: str, halves: int, space: Tensor) -> Decoder | None:
    """What decodes a projection in tiles (Backend), by one Triton kernel; None where there is none."""
    # Not at import: that would register it first, and the order is that of preference.
    from torch_moe_ops.backends import triton

    if not triton.runs_on(space.device):
        return None
    if scheme in byte_formats.SCHEMES:
        from torch_moe_ops.backends.triton_engine.dequantize import serves
        from torch_moe_ops.backends.triton_engine.dequantize_bytes import bytes_decoder

        if not serves(scheme, space.dtype):
            return None
        return bytes_decoder(stored.weight, stored.scale, scheme, halves == 2, space)
    from torch_moe_ops.backends.triton_engine.dequantize_tiles import tiles_decoder

    return tiles_decoder(stored.weight, stored.scale, stored.scale_2, scheme, halves == 2, space)


def few_rows(p: Any, projection: Any, rows: Tensor, index: Tensor | None, addend: Any, out: Tensor) -> bool:
    """Products of few rows of an expert with tiles as they are packed (triton_engine/few.py), where Triton runs."""
    from torch_moe_ops.backends import triton  # not at import, as in dequantize

    if projection.scheme in byte_formats.SCHEMES or not triton.runs_on(out.device):
        return False
    from torch_moe_ops.backends.triton_engine import few

    stored = projection.stored
    few.few_rows(p, projection.name, stored.weight, stored.scale, stored.scale_2, rows, index, addend, out)
    return True


class _BySlot:
    """The kernels of prefill, one GEMM at a time (BySlot; csrc/cuda/sm90/gemm/gemm_rows.cu)."""

    def __init__(self, p: Pass) -> None:
        call, x, sizes = p.call, p.x, p.sizes
        top_k = call.topk_ids.shape[1]
        self.kernel = _kernel(call._replace(hidden_states=x), x, top_k, of_prefill=True)
        self.sized = torch.empty_like(x)
        self.arguments = for_kernels(call._replace(hidden_states=x, router_weight_on_input=False))
        count = (x.shape[0], top_k, sizes.num_experts, sizes.hidden_size, sizes.intermediate_size)
        self.kept = x.new_empty(_kept_bytes(*count), dtype=torch.uint8)

    def hidden(self, addend: RanksBySlot | None, out: Tensor | None) -> None:
        self._run(addend, out, second=False)

    def output(self, addend: RanksBySlot | None, out: Tensor) -> None:
        self._run(addend, out, second=True)

    def _run(self, addend: RanksBySlot | None, out: Tensor | None, second: bool) -> None:
        low, factor = addend or (None, None)
        own = (low, factor, out, self.kept, second, self.kernel)
        torch.ops.moeq_C.experts_sm90_rows(self.sized, *self.arguments, *own)


@lru_cache
def _kept_bytes(*sizes: int) -> int:
    """Of what the second GEMM reads of the first, and both launches of slots."""
    return int(torch.ops.moeq_C.experts_sm90_rows_kept(*sizes))


def rows_by_slot(p: Pass) -> BySlot | None:
    """Prefill's kernels for who combines a layer's rows (Backend), where they are."""
    call = p.call
    if call.scheme not in ("nvfp4", "mxfp4") or call.activation not in ("silu", "swigluoai") or not runs_on(p.x.device):
        return None
    return _BySlot(p)


def _hidden_size_reason(problem: Problem) -> str | None:
    multiple = size_multiple(problem.scheme)
    if problem.hidden_size % multiple == 0:
        return None
    return f"hidden_size must be a multiple of {multiple}, got {problem.hidden_size}"


# Float16 is the sum of two bfloat16, exactly, so that strict kernels stay strict. Weights that are rounded to bfloat16
# would be eight times as far from the oracle as those of kernels that round them to float16.
_HIDDEN_DTYPES = {STRICT: (torch.bfloat16, torch.float16), STANDARD: (torch.bfloat16,)}


def _register(name: str, schemes: dict[str, tuple[str, ...]], accuracy: str) -> Backend:
    return register(
        Backend(
            name=name,
            layout=Layout(
                "cuda_sm90_tiles_v1",
                specs,
                lambda scheme, w2_shape: w2_shape[2] * tile_k(scheme.name),
                stored=dict.fromkeys(ROUNDED_FORMATS, torch.uint8) | byte_formats.CODES,
                pads_hidden=True,
            ),
            requires=(
                *needs(*_HIDDEN_DTYPES[accuracy]),
                formats(schemes),
                one_of("weight_policy", "exact"),
                Requirement(_hidden_size_reason),
                Requirement(scales_reason),
            ),
            prepare=prepare,
            restore=restore,
            run=run,
            run_monolithic=run_monolithic,
            hidden_dtypes=_HIDDEN_DTYPES[accuracy],
            notes=notes_of if accuracy == STRICT else notes_of_rounded,
            dequantize=dequantize,
            few_rows=few_rows,
            rows_by_slot=rows_by_slot,
            remote=RemoteExperts(_run_remote),
            accuracy=accuracy,
        )
    )


_register("cuda_sm90", FORMATS, STRICT)
_register("cuda_sm90_int4", ROUNDED_FORMATS, STANDARD)
