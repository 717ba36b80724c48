"""The backends `cuda_sm90` and `cuda_sm90_int4`: CUDA kernels for Hopper GPUs, in csrc/cuda/sm90 (docs/hopper.md).

The second one rounds its weights, so that `accuracy="strict"` leaves it out. Both lay them out in the same way, and
several kernels read that: `decode`, one persistent launch for few tokens, and prefill's grouped GEMMs for many, with
`slim`, `narrow` or `wide` tiles. sm90/choice.py chooses by shapes and number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Backend, Requirement, formats, one_of, register
from torch_moe_ops.backends.sm90.choice import choice_of, decode_max_tokens, switches_of
from torch_moe_ops.backends.sm90.common import (
    NEEDS,
    NO_ROUTER,
    check_device,
    router_of,
)
from torch_moe_ops.backends.sm90.formats import prepare, restore, scales_reason, specs
from torch_moe_ops.backends.sm90.layout import TILE
from torch_moe_ops.core.call import ExpertsCall, for_kernels
from torch_moe_ops.core.kernel_facts import Router, Sm90Few, own_of
from torch_moe_ops.core.layout import Layout
from torch_moe_ops.core.problem import STANDARD, STRICT, Problem
from torch_moe_ops.numerics import mx, nvfp4
from torch_moe_ops.tuning import tuned
from torch_moe_ops.tuning.tuned_kernels import key_of

_own = own_of["experts_sm90"]
FORMATS: dict[str, tuple[str, ...]] = {"nvfp4": ("nvfp4", "none", "fp8"), "mxfp4": ("none", "fp8", "mxfp8")}
# Their weights are rounded to bfloat16, which is more than docs/numerics.md allows a strict backend.
ROUNDED_FORMATS: dict[str, tuple[str, ...]] = {"mxint4": ("none",), "int4": ("none",)}


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    run_kernel(call, out, _kernel(call, out, call.topk_ids.shape[1]))


def run_monolithic(call: ExpertsCall, routing: tuple[Any, ...], out: Tensor) -> bool:
    """`run` from router logits; False where their groups are more than the kernels route."""
    router = router_of(routing)
    if router is None:
        return False
    without_ids = call._replace(topk_ids=None, topk_weights=None)  # type: ignore[arg-type]
    run_kernel(without_ids, out, _kernel(call, out, router.top_k), router)
    return True


def _kernel(call: ExpertsCall, out: Tensor, top_k: int) -> int:
    tokens, hidden = out.shape
    sizes = (call.w13.shape[0], top_k, hidden, call.w2.shape[2] * TILE, call.all_experts())
    return choice_of(out.get_device(), call.scheme, call.act_format, *sizes).kernel(tokens)


def run_kernel(call: ExpertsCall, out: Tensor, kernel: int, router: Router = NO_ROUTER) -> None:
    """`run` on a kernel by its number in KERNELS; with a router, call.topk_ids and topk_weights are None."""
    rounds = call.act_format != "none"
    own: dict[str, Any] = {"act_format": call.act_format if rounds else "nvfp4", "quantize_hidden": rounds}
    if call.hidden_states_scale is not None:
        call, own["quantize_hidden"] = _of_values(call, call.hidden_states_scale), False
    check_device(call)
    arguments = _own(own | {"quantize_intermediate": rounds, "kernel": kernel})
    torch.ops.moeq_C.experts_sm90(out, *for_kernels(call), *router, *arguments)


def _of_values(call: ExpertsCall, scale: Tensor) -> ExpertsCall:
    """A call on packed hidden states as one on the values of their codes, which bfloat16 holds.

    Scales of blocks are within (code times scale has six significant bits, or four), those of rows beside them; the
    alphas have the rest.
    """
    codes = call.hidden_states
    if call.act_format == "fp8":
        return call._replace(hidden_states=codes.to(torch.bfloat16), hidden_states_scale=scale.contiguous())
    x = nvfp4.dequantize(codes, scale) if call.act_format == "nvfp4" else mx.dequantize_mx(codes, scale, "e4m3")
    return call._replace(hidden_states=x.to(torch.bfloat16), hidden_states_scale=None)


def dequantize(stored: Any, scheme: str, halves: int, out: Tensor) -> float | None:
    """Numbers of a projection in tiles (gradients/weights.py), by one Triton kernel; None where there is no Triton."""
    # Not at import: that would register it first, and the order is that of preference.
    from torch_moe_ops.backends import triton

    if not triton.runs_on(out.device):
        return None
    from torch_moe_ops.backends.triton_engine.dequantize_tiles import dequantize_tiles

    return dequantize_tiles(stored.weight, stored.scale, stored.scale_2, scheme, halves == 2, out)


def few_rows(p: Any, projection: Any, rows: Tensor, index: Tensor | None, addend: Any, out: Tensor) -> bool:
    """Products of few rows of an expert with tiles as they are packed (triton_engine/few.py), where Triton runs."""
    from torch_moe_ops.backends import triton  # not at import, as in dequantize

    if not triton.runs_on(out.device):
        return False
    from torch_moe_ops.backends.triton_engine import few

    stored = projection.stored
    few.few_rows(p, projection.name, stored.weight, stored.scale, stored.scale_2, rows, index, addend, out)
    return True


def _hidden_size_reason(problem: Problem) -> str | None:
    if problem.hidden_size % TILE == 0:
        return None
    return f"hidden_size must be a multiple of {TILE}, got {problem.hidden_size}"


def _notes(problem: Problem) -> str:
    """Which kernel a number of tokens would get, and what says so (docs/hopper.md)."""
    experts, local = problem.num_experts, problem.num_local_experts
    hidden, inter = problem.hidden_size, problem.intermediate_size
    share = "" if local == experts else f", for {local} of {experts} experts"
    if problem.top_k is None:
        least, most = (decode_max_tokens(local, k, hidden * inter) for k in (32, 1))
        switch = f"{least}" if least == most else f"{least} to {most} (by top_k)"
        return f"decode kernel up to {switch} tokens, prefill kernels beyond, where no table has the layer{share}"
    device = tuned.name_of_device(torch.cuda.current_device()) if torch.cuda.is_available() else ""
    key = key_of(problem.scheme, problem.act_format, local, problem.top_k, hidden, inter)
    switches, source = switches_of(device, key, experts)
    return f"{', '.join(_described(name, most, problem.top_k) for name, most in switches)} (by {source}{share})"


def _described(kernel: str, most: int | None, top_k: int) -> str:
    if kernel != "decode":
        return f"{kernel} tiles of the prefill kernel " + ("beyond" if most is None else f"up to {most}")
    few = min(Sm90Few.MAX_TOKENS, Sm90Few.MAX_SLOTS // top_k, most or 0)
    return f"decode kernel up to {most} tokens (without grid barriers up to {few}, while its buffers fit an SM)"


def _notes_of_rounded(problem: Problem) -> str:
    return f"weights are rounded to bfloat16; {_notes(problem)}"


def _register(name: str, schemes: dict[str, tuple[str, ...]], accuracy: str) -> Backend:
    return register(
        Backend(
            name=name,
            layout=Layout(
                "cuda_sm90_tiles_v1",
                specs,
                lambda scheme, w2_shape: w2_shape[2] * TILE,
                stored=dict.fromkeys(ROUNDED_FORMATS, torch.uint8),
            ),
            requires=(
                *NEEDS,
                formats(schemes),
                one_of("weight_policy", "exact"),
                Requirement(_hidden_size_reason),
                Requirement(scales_reason),
            ),
            prepare=prepare,
            restore=restore,
            run=run,
            run_monolithic=run_monolithic,
            hidden_dtypes=(torch.bfloat16,),
            notes=_notes if accuracy == STRICT else _notes_of_rounded,
            dequantize=dequantize,
            few_rows=few_rows,
            accuracy=accuracy,
        )
    )


_register("cuda_sm90", FORMATS, STRICT)
_register("cuda_sm90_int4", ROUNDED_FORMATS, STANDARD)
