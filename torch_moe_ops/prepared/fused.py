"""The functions that users call: unpack prepared weights, call the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.core.check import fail
from torch_moe_ops.core.schemas import FAMILIES
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.prepared import accepted
from torch_moe_ops.prepared.lora import Lora, run_with_lora
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.same_tokens import check_owners, check_tokens
from torch_moe_ops.prepared.shared_experts import check_columns, check_router_columns
from torch_moe_ops.routing.options import Routing
from torch_moe_ops.weights.raw_weights import RawWeights

_ROUTED = {name: getattr(torch.ops.moeq, f"{s.op_prefix}moe_routed") for name, s in SCHEMES.items()}
_MONOLITHIC = {name: getattr(torch.ops.moeq, f"{s.op_prefix}moe") for name, s in SCHEMES.items()}
_ROUNDED = (torch.bfloat16, torch.float16, torch.float64)  # dtypes of weights that become float32
_is_compiling = torch.compiler.is_compiling
# A family of several schemes (mxfp6) is told by an argument which one is meant.
_ELEMENT = {n: (s.element,) if len(FAMILIES[s.family]) > 1 else () for n, s in SCHEMES.items()}


def fused_moe(
    hidden_states: Tensor,
    router_logits: Tensor,
    w: PreparedWeights,
    *,
    routing: Routing,
    hidden_states_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lora: Lora | None = None,
    lora_ids: Tensor | None = None,
    lora_merged: bool = False,
    shared_expert_weights: Tensor | None = None,
) -> Tensor:
    """Router and experts: `torch.ops.moeq.<scheme>_moe`; where `w` has shared experts, `route` and then
    `torch.ops.moeq.<scheme>_moe_routed`.

    Args:
        hidden_states: [num_tokens, hidden_size] bfloat16, float16 or float32; or packed as
            `w.act_format` stores them, with hidden_states_scale in the linear layout. [batch, sequence, hidden_size],
            or more dimensions, are taken as they come.
        router_logits: [num_tokens, num_experts] or [batch, sequence, num_experts], any float dtype. Shared experts
            have no column.
        w: made by `prepare`.
        routing: method, top_k and options.
        shared_expert_weights: as in `route`, [num_tokens or batch, sequence, w.num_shared_experts or 1]; None: 1.
        out_dtype: None: the dtype of unquantized hidden states, bfloat16 for packed ones.
        lora, lora_ids, lora_merged: as in `fused_moe_routed`; the layer then runs as `route` and that.

    Returns: [num_tokens, hidden_size], or [batch, sequence, hidden_size], a new tensor. Differentiable. Traces under
        torch.compile.
    Raises: RuntimeError naming op, argument, requirement and value; TypeError for `w` or `routing` of another type.
    """
    if not isinstance(w, PreparedWeights):
        _fail_weights("fused_moe", w)
    if not isinstance(routing, Routing):
        _fail_routing("fused_moe", routing)
    if w.router_weight_on_input and routing.method != "llama4":
        raise ValueError(
            "fused_moe: routing.method must be 'llama4' where router_weight_on_input was prepared "
            f"(use route and fused_moe_routed otherwise), got {routing.method!r}"
        )
    many = isinstance(hidden_states, Tensor) and hidden_states.ndim > 2
    if many:
        given: dict[str, Any] = {"router_logits": router_logits, "shared_expert_weights": shared_expert_weights}
        check_tokens("fused_moe", hidden_states, hidden_states_scale=hidden_states_scale, **given)
        check_owners("fused_moe", hidden_states, lora_ids)
    if w.num_shared_experts or shared_expert_weights is not None or lora is not None or lora_ids is not None:
        # No monolithic op has these: columns behind the router's, adapters.
        if w.num_shared_experts or shared_expert_weights is not None:
            check_columns(router_logits, w)
        else:
            check_router_columns(router_logits, w.num_experts)
        ids, weights = route_rows(router_logits, routing, w.num_shared_experts, shared_expert_weights)
        options: dict[str, Any] = {"hidden_states_scale": hidden_states_scale, "out_dtype": out_dtype}
        options |= {"lora": lora, "lora_ids": lora_ids, "lora_merged": lora_merged}
        return fused_moe_routed(hidden_states, ids, weights, w, **options)
    if many:
        rows, logits = _rows(hidden_states), _rows(router_logits)
        scale = None if hidden_states_scale is None else _rows(hidden_states_scale)
        out = fused_moe(rows, logits, w, routing=routing, hidden_states_scale=scale, out_dtype=out_dtype)
        return out.unflatten(0, hidden_states.shape[:-1])
    _check_hidden_size("fused_moe", hidden_states, hidden_states_scale, w)
    return _MONOLITHIC[w.scheme](
        hidden_states,
        hidden_states_scale,
        router_logits,
        routing.bias,
        *w.op_weights(),
        w.backend,
        routing.method,
        routing.top_k,
        w.act_format,
        w.activation,
        *w.constants(),
        w.num_experts,
        w.local_expert_offset,
        *_ELEMENT[w.scheme],
        routing.n_group,
        routing.topk_group,
        routing.constant_factor() if _is_compiling() else routing.routed_scaling_factor,
        routing.renormalize,
        w.weight_policy,
        out_dtype,
    )


def fused_moe_routed(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w: PreparedWeights,
    *,
    hidden_states_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lora: Lora | None = None,
    lora_ids: Tensor | None = None,
    lora_merged: bool = False,
) -> Tensor:
    """Experts only, with routing that the caller supplies: `torch.ops.moeq.<scheme>_moe_routed`.

    Args:
        hidden_states, hidden_states_scale, w, out_dtype: as in `fused_moe`.
        topk_ids: [num_tokens, top_k] or [batch, sequence, top_k] int32 (int64 is converted), global expert ids; an id
            outside [w.local_expert_offset, + w.num_local_experts) contributes nothing. Shared experts of `w` are
            experts as any other here: `route` and `append_shared_experts` make columns of them.
        topk_weights: like topk_ids, float32 (other float dtypes are converted), final multipliers.
        out: a contiguous buffer for the result that shares memory with no argument.
        lora: adapters beside the experts, which learn where they require a gradient; without `out`, on unquantized
            hidden states: `torch.ops.moeq.moe_routed_lora`, which decodes the experts as the backward pass does.
        lora_ids: [num_tokens] or [batch, sequence] int32 (int64 is converted): each token's adapter, a number that none
            has (-1) for the experts alone. None where there is one adapter, for all tokens.
        lora_merged: w holds the adapter already (`MergeAware`): the layer runs as without it, bit for bit, and its
            factors learn as if quantizing were the identity.

    Returns: [num_tokens, hidden_size], or [batch, sequence, hidden_size]; `out` where it was given.
    """
    if not isinstance(w, PreparedWeights):
        _fail_weights("fused_moe_routed", w)
    if lora is not None or lora_ids is not None:
        _check_lora(lora, hidden_states_scale, out)
        return _routed_with_lora(hidden_states, topk_ids, topk_weights, w, lora, lora_ids, out_dtype, lora_merged)
    if isinstance(hidden_states, Tensor) and hidden_states.ndim > 2:
        return _routed_of_rows(hidden_states, topk_ids, topk_weights, w, hidden_states_scale, out_dtype, out)
    topk_ids, topk_weights = _int32(topk_ids), _float32(topk_weights)
    has_options = out is not None or out_dtype is not None or hidden_states_scale is not None
    plain = type(w) is PreparedWeights and not has_options and not _is_compiling()
    key = accepted.key_of(w) if plain else None
    if key is not None and (result := accepted.run(w, key, hidden_states, topk_ids, topk_weights)) is not None:
        return result
    _check_hidden_size("fused_moe_routed", hidden_states, hidden_states_scale, w)
    args = (
        hidden_states,
        hidden_states_scale,
        topk_ids,
        topk_weights,
        *w.op_weights(),
        w.backend,
        w.act_format,
        w.activation,
        *w.constants(),
        w.num_experts,
        w.local_expert_offset,
        *_ELEMENT[w.scheme],
        w.router_weight_on_input,
        w.weight_policy,
        out_dtype,
    )
    if key is not None:
        return accepted.learned(w, key, args, _ROUTED[w.scheme](*args))
    if out is None:
        return _ROUTED[w.scheme](*args)
    _ROUTED[w.scheme].out(*args, out=out)
    return out


def _routed_of_rows(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w: PreparedWeights,
    hidden_states_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """fused_moe_routed of [batch, sequence, ...]: all dimensions but the last one as rows."""
    given: dict[str, Any] = {
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "hidden_states_scale": hidden_states_scale,
    }
    check_tokens("fused_moe_routed", hidden_states, **given)
    scale = None if hidden_states_scale is None else _rows(hidden_states_scale)
    into = None if out is None else out.view(-1, out.shape[-1])  # an error where that is no view
    rows, ids, weights = _rows(hidden_states), _rows(topk_ids), _rows(topk_weights)
    result = fused_moe_routed(rows, ids, weights, w, hidden_states_scale=scale, out_dtype=out_dtype, out=into)
    return result.unflatten(0, hidden_states.shape[:-1]) if out is None else out


def _routed_with_lora(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w: PreparedWeights,
    lora: Any,
    lora_ids: Tensor | None,
    out_dtype: torch.dtype | None,
    merged: bool,
) -> Tensor:
    """fused_moe_routed with adapters."""
    check_tokens("fused_moe_routed", hidden_states, topk_ids=topk_ids, topk_weights=topk_weights)
    check_owners("fused_moe_routed", hidden_states, lora_ids)
    ids, weights, owners = _int32(_rows(topk_ids)), _float32(_rows(topk_weights)), _int32(_flat(lora_ids))
    result = run_with_lora(_rows(hidden_states), ids, weights, w, lora, owners, out_dtype, merged)
    return result.unflatten(0, hidden_states.shape[:-1]) if hidden_states.ndim > 2 else result


def _check_hidden_size(function: str, hidden_states: Any, scale: Tensor | None, w: PreparedWeights) -> None:
    """Where a layout pads the hidden size, the op, which gets the weights alone, could take another one for it."""
    if not BACKENDS[w.backend].layout.pads_hidden or scale is not None or not isinstance(hidden_states, Tensor):
        return
    if hidden_states.ndim and hidden_states.shape[-1] != w.hidden_size:
        fail(function, "hidden_states", f"have hidden_size {w.hidden_size}", hidden_states.shape[-1])


def _check_lora(lora: Any, hidden_states_scale: Tensor | None, out: Tensor | None) -> None:
    if not isinstance(lora, Lora):
        raise TypeError(f"fused_moe_routed: lora must be a Lora, got {type(lora).__name__}")
    for name, value in (("hidden_states_scale", hidden_states_scale), ("out", out)):
        if value is not None:
            raise ValueError(f"fused_moe_routed: {name} must be None with lora, got a tensor of {tuple(value.shape)}")


def _flat(lora_ids: Tensor | None) -> Tensor | None:
    return lora_ids.flatten() if lora_ids is not None and lora_ids.ndim > 1 else lora_ids


def _rows(tensor: Any) -> Any:
    """All dimensions but the last one as one; what is no such tensor is the op's to refuse."""
    return tensor.flatten(0, -2) if isinstance(tensor, Tensor) and tensor.ndim > 2 else tensor


def _int32(ids: Any) -> Any:
    """Ids of int64 as the ops take them; what is no tensor is theirs to refuse."""
    if not isinstance(ids, Tensor) or ids.dtype is not torch.int64:
        return ids
    # Clamp first: an id beyond 2^31 must stay foreign, not wrap around to some expert.
    return ids.clamp(-1, 2**31 - 1).to(torch.int32)


def _float32(weights: Any) -> Any:
    """Routing weights likewise."""
    return weights.float() if isinstance(weights, Tensor) and weights.dtype in _ROUNDED else weights


def _fail_weights(function: str, w: Any) -> NoReturn:
    hint = " (prepare makes them of RawWeights)" if isinstance(w, RawWeights) else ""
    raise TypeError(f"{function}: w must be PreparedWeights{hint}, got {type(w).__name__}")


def _fail_routing(function: str, routing: Any) -> NoReturn:
    raise TypeError(f"{function}: routing must be a Routing (a method, a top_k and options), got {routing!r}")


def route(
    router_logits: Tensor,
    routing: Routing,
    *,
    num_shared_experts: int = 0,
    shared_expert_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """topk_ids int32 and topk_weights float32, both [num_tokens, top_k]: `torch.ops.moeq.route`.

    Args:
        router_logits: [num_tokens, num_experts].
        routing: method, top_k and options.
        num_shared_experts: experts that every token goes to, with ids from num_experts on, as many as the weights of
            the layer have (`w.num_shared_experts`). Each gets a column behind the top_k, 32 columns at most in all.
        shared_expert_weights: [num_tokens, num_shared_experts], or [num_tokens, 1] for all of them, bfloat16, float16
            or float32: what their results are multiplied by, such as the sigmoid of a gate. Differentiable. None: 1.
    """
    if not isinstance(routing, Routing):
        _fail_routing("route", routing)
    given = shared_expert_weights
    if num_shared_experts > 1 and isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] == 1:
        shared_expert_weights = given.expand(-1, num_shared_experts)
    return torch.ops.moeq.route(
        router_logits,
        routing.bias,
        routing.method,
        routing.top_k,
        routing.n_group,
        routing.topk_group,
        routing.constant_factor() if _is_compiling() else routing.routed_scaling_factor,
        routing.renormalize,
        num_shared_experts,
        shared_expert_weights,
    )


def route_rows(router_logits: Tensor, routing: Routing, shared: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """`route` with any number of dimensions in front."""
    check_tokens("route", router_logits, "router_logits", shared_expert_weights=weights)
    ids, gates = route(_rows(router_logits), routing, num_shared_experts=shared, shared_expert_weights=_rows(weights))
    if isinstance(router_logits, Tensor) and router_logits.ndim > 2:
        return tuple(t.unflatten(0, router_logits.shape[:-1]) for t in (ids, gates))  # type: ignore[return-value]
    return ids, gates


def over_rows(
    who: str,
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
) -> Tensor:
    """`run` of a routed layer, which takes rows, on tensors with any number of dimensions in front."""
    check_tokens(who, hidden_states, topk_ids=topk_ids, topk_weights=topk_weights)
    shape = hidden_states.shape[:-1]
    return run(*(t.flatten(0, -2) for t in (hidden_states, topk_ids, topk_weights))).unflatten(0, shape)
