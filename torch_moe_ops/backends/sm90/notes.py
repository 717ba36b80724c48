"""What `explain` says of the backends `cuda_sm90` and `cuda_sm90_int4`: which kernel a number of tokens would get."""

from __future__ import annotations

import torch

from torch_moe_ops.backends.sm90 import byte_formats, fp8_products
from torch_moe_ops.backends.sm90.choice import decode_max_tokens, gathered_of, may_gather, switches_of
from torch_moe_ops.backends.sm90.formats import exact_kernels
from torch_moe_ops.core.kernel_facts import Sm90Few
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.tuning import tuned
from torch_moe_ops.tuning.tuned import Key
from torch_moe_ops.tuning.tuned_kernels import key_of

_WHILE = ", while its buffers fit an SM"
_FEW = f"decode kernel up to {Sm90Few.MAX_TOKENS} tokens{_WHILE}, prefill kernels beyond"
_OF_BYTES = dict.fromkeys(byte_formats.SCHEMES, _FEW)
_TWO = "float16 hidden states as the sums of two bfloat16, two rows of an operand each"


def notes_of(problem: Problem) -> str:
    """The kernels by rising numbers of tokens, and what says so (docs/hopper.md)."""
    if problem.dtype == torch.float16:
        return f"{_FEW}; {_TWO}" if problem.act_format == "none" else _FEW
    experts, local = problem.num_experts, problem.num_local_experts
    share = "" if local == experts else f", for {local} of {experts} experts"
    if problem.top_k is None or not problem.hidden_size:  # not known
        return _OF_BYTES.get(problem.scheme) or f"{_of_any_top_k(problem)}, where no table has the layer{share}"
    device = tuned.name_of_device(torch.cuda.current_device()) if torch.cuda.is_available() else ""
    sizes = (local, problem.top_k, problem.hidden_size, problem.intermediate_size)
    key = key_of(problem.scheme, problem.act_format, *sizes)
    switches, source = switches_of(device, key, experts)
    gathered = _gathered(problem, key)
    kernels = [f"decode kernel that gathers rows up to {gathered} tokens"] if gathered else []
    for kernel, most in switches:
        if most is not None and most <= gathered:
            continue
        upto = "beyond" if most is None else f"up to {most}"
        if kernel == "decode":
            kernels.append(f"decode kernel {upto} tokens{_without_barriers(problem, most, gathered)}")
        else:
            kernels.append(f"{kernel} tiles of the prefill kernel {upto}")
    return f"{', '.join(kernels)} (by {source}{share})"


def notes_of_rounded(problem: Problem) -> str:
    """`notes_of` where weights are rounded to bfloat16, by some of the kernels or all."""
    exact = list(exact_kernels(problem.weight_scales or ""))
    least, more = fp8_products.least_tokens(problem), ""
    if least is not None:
        exact.append("products of codes")
        more = f"; products of codes on fp8 tensor cores from {least} tokens on, whose sums have 13 bits"
    unrounded = f", but not by {' and '.join(exact)}" if exact else ""
    return f"weights are rounded to bfloat16{unrounded}; {notes_of(problem)}{more}"


def _of_any_top_k(problem: Problem) -> str:
    matrix = problem.hidden_size * problem.intermediate_size
    least, most = (decode_max_tokens(problem.num_local_experts, k, matrix) for k in (32, 1))
    switch = f"{least}" if least == most else f"{least} to {most} (by top_k)"
    return f"decode kernel up to {switch} tokens, prefill kernels beyond"


def _gathered(problem: Problem, key: Key) -> int:
    """Up to so many tokens the decode kernel gathers rows."""
    has = (problem.scheme, problem.act_format, problem.activation, problem.has_bias, problem.router_weight_on_input)
    return gathered_of(key, problem.num_experts) if may_gather(*has) else 0


def _without_barriers(problem: Problem, most: int | None, gathered: int) -> str:
    """Of a decode kernel up to `most` tokens; nothing where very few tokens are another kernel's."""
    if problem.scheme in byte_formats.SCHEMES:
        return _WHILE
    few = min(Sm90Few.MAX_TOKENS, Sm90Few.MAX_SLOTS // (problem.top_k or 1), most or 0)
    return f" (without grid barriers up to {few}{_WHILE})" if few and not gathered else ""
