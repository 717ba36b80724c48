"""Eager calls of prepared weights that are like an earlier one in everything that the op checks: run without checks.

What an earlier call was like is kept, not its tensors, and not by layer: names and constants here, dtypes and sizes of
all tensors where they are compared (Backend.accepted). Layers of a model share what is kept, copies and pickles have
nothing of it, and what happens to a tensor or its memory between two calls is seen by the second one. Whatever is
unusual is None here: the op does it, or refuses it by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import has_torch_function_unary

from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.core.call import WEIGHT_FIELDS
from torch_moe_ops.core.checked_calls import checked_call
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.prepared.fields import PreparedFields

# What the routed ops are given of prepared weights beside tensors.
NAMES = (
    *("scheme", "backend", "act_format", "activation", "swiglu_alpha", "swiglu_beta", "swiglu_limit"),
    *("num_experts", "local_expert_offset", "router_weight_on_input", "weight_policy"),
)
TAKEN_BY = frozenset(name for name, backend in BACKENDS.items() if backend.accepted is not None)
MAX_KEPT = 2048  # sets of names: far more than a process has that differ
MAX_TRIES = 8  # of one set of names: layers of other sizes, tokens of other dtypes

_names_of = attrgetter(*NAMES)
_weights_of = attrgetter(*WEIGHT_FIELDS)
_PLAIN = frozenset((Tensor, Parameter, type(None)))
_is_grad_enabled, _set_grad_enabled, _requires_grad = _C.is_grad_enabled, _C._set_grad_enabled, _C._any_requires_grad
_profiler_enabled = _C._autograd._profiler_enabled


Key = tuple[tuple[Any, ...], tuple[type, ...]]


def key_of(w: PreparedFields) -> Key | None:
    """The names of a layer as calls are looked up by, with their types: 1 and 1.0 are not the same to an op. To be
    taken before a call's arguments. None where calls are not compared."""
    names = _names_of(w)
    return (names, tuple(map(type, names))) if type(w.backend) is str and w.backend in TAKEN_BY else None


class _Kept:
    """Of one set of names: its number, never another's, and what runs calls, where one was accepted."""

    __slots__ = ("number", "run", "tries")

    def __init__(self, number: int):
        self.number = number
        self.tries = 0
        self.run: Callable[..., Tensor | None] | None = None


_KEPT: dict[Key, _Kept] = {}
_LEARNING = threading.Lock()


def run(w: PreparedFields, key: Key, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Tensor | None:
    """The result of the layer's routed op, without options; None where it has to be called."""
    try:
        kept = _KEPT.get(key)
    except TypeError:  # a name that has no hash: the op refuses it
        return None
    if kept is None or kept.run is None:
        return None
    weights = _weights_of(w)
    if not _is_plain(hidden_states, topk_ids, topk_weights, weights):
        return None
    if not _is_grad_enabled():
        return kept.run(hidden_states, topk_ids, topk_weights, *weights, kept.number)
    if _requires_grad(hidden_states, topk_weights, *weights):
        return None
    try:
        _set_grad_enabled(False)  # without which the kernels refuse; here, as a signal may raise as soon as it is done
        return kept.run(hidden_states, topk_ids, topk_weights, *weights, kept.number)
    finally:
        _set_grad_enabled(True)


def _is_plain(hidden_states: Any, topk_ids: Any, topk_weights: Any, weights: tuple[Any, ...]) -> bool:
    """Whether nobody wants a tangent or to see functions and ops called; modes of the dispatcher it tells itself."""
    return (
        type(hidden_states) is Tensor
        and type(topk_ids) is Tensor
        and type(topk_weights) is Tensor
        and forward_ad._current_level < 0
        and not has_torch_function_unary(hidden_states)  # a mode's
        and not _profiler_enabled()
        and _PLAIN.issuperset(map(type, weights))
    )


def learned(w: PreparedFields, key: Key, args: tuple[Any, ...], result: Tensor) -> Tensor:
    """`result`, which the layer's routed op has returned for these arguments; the call is kept where it may recur."""
    kept = _KEPT.get(key)
    has_room = len(_KEPT) < MAX_KEPT if kept is None else kept.tries < MAX_TRIES
    if not has_room or not _LEARNING.acquire(blocking=False):  # another thread learns, or did when there was a fork
        return result
    try:
        # The op has just done all of this: it can fail only where another thread changes the tensors meanwhile.
        with suppress(Exception):
            # The arguments are of this key, unless somebody has changed the layer while they were read.
            if _may_recur(w, *args[:4]) and key_of(w) == key:
                _learn(w, key, args, result)
    finally:
        _LEARNING.release()
    return result


def _may_recur(w: PreparedFields, hidden_states: Any, _: Any, topk_ids: Any, topk_weights: Any) -> bool:
    """Whether calls like this one are compared at all, and nobody records what is asked of tensors here."""
    tokens, weights = (hidden_states, topk_ids, topk_weights), _weights_of(w)
    if not _is_plain(*tokens, weights) or (_is_grad_enabled() and _requires_grad(*tokens, *weights)):
        return False
    if _C._get_tracing_state() is not None or _C._len_torch_dispatch_stack():
        return False
    if _C._functorch.maybe_current_level() is not None:
        return False
    return bool(len(hidden_states)) and all(t.is_contiguous() for t in tokens)


def _learn(w: PreparedFields, key: Key, args: tuple[Any, ...], result: Tensor) -> None:
    calls, kept = BACKENDS[w.backend].accepted, _KEPT.get(key)
    if calls is None:
        return
    if kept is None:
        kept = _KEPT[key] = _Kept(calls.new_names())
    kept.tries += 1
    given, ready = checked_call(f"{SCHEMES[w.scheme].op_prefix}moe_routed", args, result)
    if calls.accept(given, ready, result, kept.number):
        kept.run = calls.run
