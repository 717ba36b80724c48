"""Calls of the CPU kernels that are like one that was checked: they are compared with it in C++ (csrc/cpu/accepted.h).

The op for them goes through the dispatcher as any other and runs where ordinary tensors on a CPU meet nothing that
wants to see ops or to run them in another way. For everything else (modes, transforms, traces, subclasses, other
devices and layouts) it has a kernel that returns None, so that nobody sees it, and the public op is called. The one
that lets the kernels know of a call is refused there likewise.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core import extension
from torch_moe_ops.core.call import INDEX, KERNEL_FIELDS, WEIGHT_FIELDS, ExpertsCall

# Every key with a kernel of its own, or a fallback, for ops that have none. Autograd's is passed by: the kernel refuses
# where gradients are recorded.
_ELSEWHERE = (
    *("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA", "Meta", "Python", "Functionalize"),
    *("Conjugate", "Negative", "ZeroTensor", "Tracer", "PreDispatch", "PythonDispatcher", "PythonTLSSnapshot"),
    *("FuncTorchBatched", "FuncTorchGradWrapper", "FuncTorchDynamicLayerBackMode", "FuncTorchDynamicLayerFrontMode"),
    *("Batched", "BatchedNestedTensor", "Named"),
)
_TOKENS = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")
_COMPARED = (*_TOKENS, *WEIGHT_FIELDS)
_in_call = itemgetter(*(INDEX[name] for name in _COMPARED))
_in_terms = itemgetter(*(KERNEL_FIELDS.index(name) for name in _COMPARED))


def new_names() -> int:
    """As AcceptedCalls has it: by the extension, which knows calls by these numbers as long as the process lives."""
    return torch.ops.moeq_C.new_accepted_names()  # type: ignore[no-any-return]


def accept(given: ExpertsCall, terms: tuple[Any, ...], out: Tensor, names: int) -> bool:
    """Let the kernels know what a call was like that has run.

    Args:
        given: the call as the op got it.
        terms: what the kernels got for it, behind `out`.
        names: the number of whatever the call has that is no tensor.
    Returns: False where there is no room to know it, or where the kernels got other tensors: what is made of them at
        each call is not theirs to make.
    """
    if given.router_weight_on_input or given.hidden_states_scale is not None:
        return False
    if out.dtype is not given.hidden_states.dtype:
        return False
    if any(a is not b for a, b in zip(_in_call(given), _in_terms(terms), strict=True)):
        return False
    return torch.ops.moeq_C.accept_experts(out, *terms, names)  # type: ignore[no-any-return]


def run_accepted(*tensors_and_names: Any) -> Tensor | None:
    """The result of a call that is like one that was accepted; None: it is not, and the op has to be called.

    Args: hidden_states, topk_ids, topk_weights, the tensors of WEIGHT_FIELDS, the number of the names.
    """
    return _op(*tensors_and_names)  # type: ignore[no-any-return]


if extension.has_cpu_extension():
    _LIB = torch.library.Library("moeq_C", "FRAGMENT")
    for _name, _result in (("experts_accepted", None), ("accept_experts", False)):
        for _key in _ELSEWHERE:
            if torch._C._parse_dispatch_key(_key) is None:  # as this torch has no tensors with names
                continue
            _LIB.impl(_name, lambda *args, result=_result: result, _key)
        _LIB.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    _op = torch.ops.moeq_C.experts_accepted.default
