"""Backend `cpu`: our C++ kernels (AMX, AVX-512, AVX2 or portable, chosen when the extension loads)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends import cpu_accepted
from torch_moe_ops.backends.cpu_panels import pack as cpu_pack
from torch_moe_ops.backends.cpu_panels.isa import cpu_integer_isa, cpu_isa
from torch_moe_ops.backends.registry import AcceptedCalls, Backend, available, formats, one_of, register, written_for
from torch_moe_ops.core import extension
from torch_moe_ops.core.call import ExpertsCall, for_kernels_with
from torch_moe_ops.core.kernel_facts import own_of
from torch_moe_ops.core.layout import Layout
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import SCHEMES, ZERO_POINT_DTYPES
from torch_moe_ops.numerics import mx

_own = own_of["experts"]
_arguments = for_kernels_with(
    *("w13_scale", "w13_zero_point", "g1_alphas"),
    *("w2_scale", "w2_zero_point", "g2_alphas"),
)
FORMATS = written_for(cpu_pack.KERNEL_SCHEMES, cpu_pack.KERNEL_ACT_FORMATS)


def run(call: ExpertsCall, out: Tensor) -> None:
    """Hand a checked call to the kernels, in their own terms."""
    torch.ops.moeq_C.experts(out, *_in_their_terms(call))


def accept(given: ExpertsCall, ready: ExpertsCall, out: Tensor, names: int) -> bool:
    """As AcceptedCalls has it."""
    return cpu_accepted.accept(given, _in_their_terms(ready), out, names)


def host_job(call: ExpertsCall, out: Tensor) -> int:
    """The number of a checked call that the kernels run later, with what its tensors then hold, as often as they are
    asked (`moeq_C::run_host_job`, `moeq_C::enqueue_host_job`), until `moeq_C::drop_host_job`.

    Args:
        out: float32 [num_tokens, hidden_size], of one token at least.
    """
    return torch.ops.moeq_C.host_job(out, *_in_their_terms(call))  # type: ignore[no-any-return]


def _in_their_terms(call: ExpertsCall) -> tuple[Any, ...]:
    scheme = SCHEMES[call.scheme]
    call = _unpack_fp6(call)
    w13_scale, w2_scale = _same_dtype(call.w13_scale, call.w2_scale)
    g1_alphas = _alphas(call, call.g1_alphas, w13_scale, call.a1_gscale)
    g2_alphas = _alphas(call, call.g2_alphas, w2_scale, call.a2_gscale)
    w13_zero_point, w2_zero_point = _both(call)
    w13 = (_of_rows(w13_scale), w13_zero_point, g1_alphas)
    w2 = (_of_rows(w2_scale), w2_zero_point, g2_alphas)
    arguments = _arguments((*call, *w13, *w2))
    own = _own({"scheme": cpu_pack.kernel_scheme(scheme), "act_format": call.act_format})
    return (*arguments, *own)


def _unpack_fp6(call: ExpertsCall) -> ExpertsCall:
    """Packed MXFP6 hidden states as float32: quantizing those again gives the same values, exactly.

    The rceil exponent of decoded values is at most the one that they came with, so all of them fit.
    """
    if call.hidden_states_scale is None or not call.act_format.startswith("mxfp6"):
        return call
    element = call.act_format.removeprefix("mxfp6_")
    values = mx.dequantize_mx(call.hidden_states, call.hidden_states_scale, element)
    return call._replace(hidden_states=values, hidden_states_scale=None)


def _same_dtype(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    # The kernels read one dtype of scales; a file that mixes them is converted at every call.
    if a is None or b is None or a.dtype == b.dtype:
        return a, b
    return a.float(), b.float()


def _of_rows(scale: Tensor | None) -> Tensor | None:
    return None if scale is None or cpu_pack.is_per_tensor(scale) else scale


def _alphas(call: ExpertsCall, alphas: Tensor | None, scale: Tensor | None, gscale: Tensor | None) -> Tensor | None:
    """What multiplies whole accumulators: the op's alphas; per-tensor scales and fl(1 / gscale) where it has none."""
    if alphas is not None:
        return alphas
    per_tensor = scale if scale is not None and cpu_pack.is_per_tensor(scale) else None
    if per_tensor is not None and per_tensor.shape[1] == 1:
        per_tensor = per_tensor[:, 0]
    packed_input = call.hidden_states_scale is not None and gscale is call.a1_gscale
    if gscale is None or packed_input:  # packed rows bring scales of their own
        return None if per_tensor is None else per_tensor.contiguous()
    inverse = gscale.reciprocal().expand(call.w13.shape[0])
    if per_tensor is None:
        return inverse.contiguous()
    return (per_tensor * (inverse[:, None] if per_tensor.ndim == 2 else inverse)).contiguous()


def _both(call: ExpertsCall) -> tuple[Tensor | None, Tensor | None]:
    """Zero points of both weights where one has them: the kernels take both or neither."""
    a, b = call.w13_zero_point, call.w2_zero_point
    if (a is None) == (b is None):
        return a, b
    middle = 8 if call.scheme == "int4" else 0
    assert call.w13_scale is not None and call.w2_scale is not None
    dtype = ZERO_POINT_DTYPES[call.scheme]
    if a is None:
        return torch.full_like(call.w13_scale, middle, dtype=dtype), b
    return a, torch.full_like(call.w2_scale, middle, dtype=dtype)


def _multiplies_integers(problem: Problem) -> bool:
    """int8 activations, or both in NVFP4 or MXFP4, whose doubled codes are integers."""
    act_format = problem.act_format
    return act_format == "int8" or (act_format in ("nvfp4", "mxfp4") and act_format == problem.scheme)


def _notes(problem: Problem) -> str:
    if not extension.has_cpu_extension():
        return ""
    integers = cpu_integer_isa() if _multiplies_integers(problem) else ""
    return f"kernels: {cpu_isa()}" + (f", products of integers: {integers}" if integers else "")


register(
    Backend(
        name="cpu",
        layout=Layout("cpu_panels_v1", cpu_pack.specs, cpu_pack.intermediate_size, cpu_pack.STORED),
        requires=(
            one_of("device", "cpu"),
            available(lambda: extension.cpu_extension_reason() or None, extension.BUILD_CPU),
            formats(FORMATS),
            one_of("weight_policy", "exact"),
        ),
        prepare=cpu_pack.prepare,
        restore=cpu_pack.restore,
        run=run,
        notes=_notes,
        accepted=AcceptedCalls(cpu_accepted.new_names, accept, cpu_accepted.run_accepted)
        if extension.has_cpu_extension()
        else None,
    )
)
