"""The second hop of a call: a checked one to `run` of the backend that it names, with an output to fill.

The first is the op's body (moe.py, moe_routed.py), the third is the backend's launch, the fourth the kernel.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.ops.alignment import ALIGNMENT, aligned, is_aligned
from torch_moe_ops.ops.bind import like_a_kernel
from torch_moe_ops.ops.plan import Plan, Table
from torch_moe_ops.ops.route import run_route
from torch_moe_ops.routing.reference import route_reference


def output(call: ExpertsCall, hidden_size: int) -> Tensor:
    x, dtype = call.hidden_states, call.out_dtype
    if call.hidden_states_scale is None and (dtype is None or dtype is x.dtype):
        # Twice as fast as new_empty, the more so without an argument.
        return torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty((x.shape[0], hidden_size), dtype=out_dtype(call))


def out_dtype(call: ExpertsCall) -> torch.dtype:
    """As asked; else the dtype of unquantized hidden states, bfloat16 for packed ones."""
    if call.out_dtype is not None:
        return call.out_dtype
    return call.hidden_states.dtype if call.hidden_states_scale is None else torch.bfloat16


_MADE_CONTIGUOUS = (
    "hidden_states",
    "hidden_states_scale",
    "topk_ids",
    "topk_weights",
    "g1_alphas",
    "w13_bias",
    "g2_alphas",
    "w2_bias",
    "a1_gscale",
    "a2_gscale",
)


_small_of = itemgetter(*(FIELDS.index(n) for n in _MADE_CONTIGUOUS))
_CONSTANTS = FIELDS.index("swiglu_alpha")
assert FIELDS[_CONSTANTS : _CONSTANTS + 3] == ("swiglu_alpha", "swiglu_beta", "swiglu_limit")
assert FIELDS[-1] == "out_dtype"


def run_experts(
    call: ExpertsCall, plan: Plan, table: Table, out: Tensor, routing: tuple[Any, ...] | None = None
) -> None:
    """Run a checked call on at least one token. routing: the arguments of moeq::route, for a monolithic call."""
    if out.is_cuda:
        call, routing = with_aligned(call, routing)
        if not is_aligned(out):
            copy = torch.empty_like(out)
            run_experts(call, plan, table, copy, routing)
            out.copy_(copy)
            return
    ready = completed(call, plan, table, out.dtype)
    with like_a_kernel(out.device.type):
        if routing is not None:
            whole = plan.backend.run_monolithic
            if whole is not None and whole(ready, routing, out):
                return
            # The oracle stays torch from end to end.
            choose = route_reference if plan.backend.name == "reference" else run_route
            ids, weights = choose(*routing)
            ready = ready._replace(topk_ids=ids, topk_weights=weights)
        plan.backend.run(ready, out)


def completed(call: ExpertsCall, plan: Plan, table: Table, dtype: torch.dtype) -> ExpertsCall:
    """A checked call as backends get it: contiguous, codes as e4m3, constants as numbers, `dtype` of the output."""
    made: dict[str, Any] = {}
    for name, tensor in zip(_MADE_CONTIGUOUS, _small_of(call)):  # noqa: B905 (hot)
        if tensor is not None and not tensor.is_contiguous():
            made[name] = tensor.contiguous()
    for name in table.e4m3:
        codes = made.get(name, getattr(call, name))
        if codes.dtype is torch.uint8:
            made[name] = codes.view(torch.float8_e4m3fn)
    # As call._replace does it, in a third of the time.
    constants = plan.alpha, plan.beta, plan.limit
    ready = tuple.__new__(ExpertsCall, (*call[:_CONSTANTS], *constants, *call[_CONSTANTS + 3 : -1], dtype))
    return ready._replace(**made) if made else ready


_TENSORS = (*(n for n in FIELDS if n.startswith(("hidden", "topk", "w13", "w2", "g1", "g2", "a1", "a2"))),)
_tensors_of = itemgetter(*(FIELDS.index(n) for n in _TENSORS))


def with_aligned(call: ExpertsCall, routing: tuple[Any, ...] | None) -> tuple[ExpertsCall, tuple[Any, ...] | None]:
    """The same values where kernels can load them. Copies of weights at every call are slow, and rare: no allocator of
    torch gives such addresses, only a view from the middle of a tensor has them."""
    if routing is not None:
        routing = (*(t if t is None else aligned(t) for t in routing[:2]), *routing[2:])  # logits and bias
    for tensor in _tensors_of(call):
        if tensor is not None and tensor.data_ptr() % ALIGNMENT:
            break
    else:
        return call, routing
    moved: dict[str, Any] = {
        name: aligned(t) for name, t in zip(_TENSORS, _tensors_of(call), strict=True) if t is not None
    }
    return call._replace(**moved), routing
