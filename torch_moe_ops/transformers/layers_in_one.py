"""MoE layers of transformers in one call: a router that runs its experts too, which then have their results.

In transformers, a block calls its router, and its experts with what that chose. Where both are ours, the router's
forward runs `moeq::moe_hidden`, leaves the experts' results with their weights, and gives ids and weights as always;
the experts' forward takes the results if it is called with those very tensors, and the router's hidden states. Whether
a block gives its experts what its router saw is found by trying.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torch_moe_ops.prepared.fused_hidden import RouteOptions, fused_moe_hidden
from torch_moe_ops.transformers.experts import ExpertWeights, same_rows

_ATTRIBUTE = "moeq_layer"
_READING_HOOKS = "transformers.utils.output_capturing"  # the module of hooks that look at results, and change none


class ExpertsOf:
    """The experts module behind a router; a module's attribute that is not a submodule."""

    def __init__(self, experts: nn.Module) -> None:
        self.experts = experts
        self.kind = type(experts)  # peft.py gives one that runs adapters another

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertsOf:
        return ExpertsOf(copy.deepcopy(self.experts, memo))


def join(block: nn.Module, router: nn.Module, experts: nn.Module) -> None:
    """Let `router` run `experts` too, where the block's forward allows it."""
    fits = gives_experts_what_the_router_saw(block, router, experts)
    setattr(router, _ATTRIBUTE, ExpertsOf(experts) if fits else None)


def copied_alone(router: nn.Module) -> nn.Module:
    """A copy of a router without its experts."""
    return copy.deepcopy(router, {id(router.__dict__.get(_ATTRIBUTE)): None})


def run_layer(
    router: Any,
    rows: Tensor,
    given_dtype: torch.dtype,
    correction: Tensor | None,
    options: RouteOptions,
    logits_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """ids, weights and logits of a router, its experts' results left with them; None where it has no such experts.

    Args:
        rows: what the router multiplies, of hidden states of `given_dtype`.
    """
    behind = getattr(router, _ATTRIBUTE, None)
    # For "llama4" the op weighs what experts get. These weigh their results: with it one expert's sigmoid is chosen.
    if behind is None or options[0] == "llama4":
        return None
    weights = getattr(behind.experts, "moeq_weights", None)
    changed = _has_hooks(router, behind.experts) or type(behind.experts) is not behind.kind
    if changed or type(weights) is not ExpertWeights or not weights.takes_router() or rows.dtype is not given_dtype:
        return None
    if weights.prepared.device != rows.device:  # something moves what the experts are called with
        return None
    bias = router._parameters.get("bias")
    results = fused_moe_hidden(rows, router.weight, bias, correction, options, logits_dtype, weights.prepared)
    output, ids, factors, logits = results
    weights.done = (rows, ids, factors, output)
    return ids, factors, logits


def _has_hooks(router: nn.Module, experts: nn.Module) -> bool:
    """Whether there are hooks that may change what either of them sees, results of the router in place too."""
    if router._forward_pre_hooks or experts._forward_pre_hooks:
        return True
    return any(getattr(hook, "__module__", "") != _READING_HOOKS for hook in router._forward_hooks.values())


class _SeenError(Exception):
    """What a block gave its experts is known."""


@torch.inference_mode(False)  # its tensors count versions, also where a model is loaded in inference mode
@torch.no_grad()
def gives_experts_what_the_router_saw(block: nn.Module, router: nn.Module, experts: nn.Module) -> bool:
    """Whether the experts get the router's hidden states, ids and weights as they are."""
    seen: list[tuple[Tensor, ...]] = []
    weight: Any = router._parameters["weight"]
    rows, (num_experts, size) = 2, weight.shape
    ids = torch.zeros(rows, 1, dtype=torch.int32, device=weight.device)
    factors = torch.ones(rows, 1, device=weight.device)
    versions = [ids._version, factors._version]

    def choose(hidden_states: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append((hidden_states,))
        versions.append(hidden_states._version)
        return hidden_states.new_zeros(rows, num_experts), factors, ids

    def run(hidden_states: Tensor, *given: Tensor, **named: Tensor) -> Tensor:
        seen.append((hidden_states, *given, *named.values()))
        raise _SeenError

    with _instead_of(router, choose), _instead_of(experts, run):
        try:
            block(torch.zeros(1, rows, size, dtype=weight.dtype, device=weight.device))
        except _SeenError:
            pass
        except Exception:  # whatever a block does that takes other arguments, or other results
            return False
    if len(seen) != 2:
        return False
    (at_router,), (at_experts, *chosen) = seen
    unchanged = versions == [ids._version, factors._version, at_experts._version]
    given = len(chosen) == 2 and chosen[0] is ids and chosen[1] is factors
    return given and unchanged and same_rows(at_router, at_experts)


class _instead_of:
    """A module's forward, for a while."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self.module, self.forward = module, forward

    def __enter__(self) -> None:
        self.own = self.module.__dict__.get("forward")
        self.module.__dict__["forward"] = self.forward

    def __exit__(self, *error: object) -> None:
        del self.module.__dict__["forward"]
        if self.own is not None:
            self.module.__dict__["forward"] = self.own
