"""Routers of transformers that are `moeq::route_hidden`: one kernel, or two, in place of five to fifteen.

What a router computes is found by trying: a copy of it, on random weights, is compared with each routing method that
its settings allow. A router that none of them reproduces is left alone.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_moe_ops.backends.triton import package_reason
from torch_moe_ops.core.routing_methods import METHODS
from torch_moe_ops.transformers.modules import ExpertsModule

# Kinds of devices on which the routing kernel runs; on others torch's own operations are no slower.
KERNEL_DEVICES = ("cuda",)
_ATTRIBUTE = "moeq_routing"
_PROBED_TOKENS = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterOptions:
    """What `moeq::route` is asked instead of a router's own operations.

    Args:
        options: routing_method, top_k, n_group, topk_group, routed_scaling_factor, renormalize.
        in_float32: logits are a product of float32 copies, whatever the model's dtype.
        has_correction: a correction bias of the scores belongs to the router, or is given to its forward.
        given: how many arguments of its forward there are besides hidden states: 1 where that is the correction.
    """

    options: tuple[str, int, int, int, float, bool | None]
    in_float32: bool
    has_correction: bool
    given: int = 0


def replace_routers(model: nn.Module, modules: list[ExpertsModule]) -> None:
    """Let the routers beside experts modules choose by `moeq::route` in inference on a GPU, those that can.

    Their results stay what they were, but for ids of int32 and weights of float32, which other routers round to the
    model's dtype. Where gradients are recorded, a router runs its own operations.
    """
    if package_reason() is not None:
        return
    done: Counter[str] = Counter()
    known: dict[tuple[Any, ...], RouterOptions | None] = {}
    for found in modules:
        block = model.get_submodule(found.name.rpartition(".")[0])
        for router in block.children():
            if _may_route(router, found):
                key = (type(router), *sorted(_settings(router).items()))
                if key not in known:  # the layers of a model are alike
                    known[key] = find_options(router)
                options = known[key]
                done[options.options[0] if options else "its own operations"] += 1
                if options is not None:
                    setattr(router, _ATTRIBUTE, options)
                    _intercept(type(router))
    if done:
        text = "; ".join(f"{count} choose by {name!r}" for name, count in done.items())
        _log.info("routers of %s on a GPU: %s", type(model).__name__, text)


def _may_route(router: nn.Module, found: ExpertsModule) -> bool:
    """A module whose own weight gives a logit for each expert."""
    weight = router._parameters.get("weight")
    experts = getattr(found.module, "num_experts", None)
    # A linear gives logits alone, and is no class to change.
    own_class = type(router).__module__.startswith("transformers.models.")
    return own_class and weight is not None and weight.ndim == 2 and weight.shape[0] == experts and not weight.is_meta


def _settings(router: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str)
    return {name: value for name, value in vars(router).items() if isinstance(value, plain) and name != "training"}


@torch.no_grad()
def find_options(router: nn.Module) -> RouterOptions | None:
    """The options with which `moeq::route` does what the router does; None where no method does."""
    probe = copy.deepcopy(router).cpu().float().eval()
    weight, generator = probe._parameters["weight"], torch.Generator().manual_seed(0)
    assert weight is not None
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float32)  # whatever torch's default is
    for tensor in (t for t in (*probe.parameters(), *probe.buffers()) if t.is_floating_point()):
        tensor.data = draw(tensor.shape) * (0.2 if tensor.ndim == 1 else 1.0)
    hidden = draw((_PROBED_TOKENS, weight.shape[1])) * weight.shape[1] ** -0.5
    # Some are given the correction by the block that they are in.
    correction = draw(weight.shape[:1]) * 0.2
    for given in ((), (correction,)):
        # Choices below 0 show what becomes of groups that are left out.
        first, second = (_tried(probe, hidden, given, less) for less in (0.0, 2.0))
        if first is None or second is None:
            continue
        for options in _candidates(router, first.ids.shape[-1], first.bias is not None):
            if _same(first, options) and _same(second, options):
                in_float32 = _multiplies_in_float32(probe, hidden, given)
                return RouterOptions(options, in_float32, first.bias is not None, len(given))
    return None


class _Trial(NamedTuple):
    logits: Tensor
    bias: Tensor | None
    ids: Tensor
    weights: Tensor


def _tried(router: nn.Module, hidden: Tensor, given: tuple[Tensor, ...], less: float) -> _Trial | None:
    """What a router gives with its correction bias lowered by `less`; None where its logits are no plain product."""
    probe, given = copy.deepcopy(router), tuple(tensor - less for tensor in given)
    own = _correction(probe)
    if own is not None:
        own.data = own.data - less
    try:
        logits, weights, ids = _original(type(probe))(probe, hidden, *given)
    except (TypeError, ValueError, IndexError, RuntimeError):  # takes other arguments, or gives other results
        return None
    # A cap, a norm or a temperature would be lost. Older releases give other results, or in another order.
    weight: Any = probe._parameters["weight"]
    product = nn.functional.linear(hidden, weight, probe._parameters.get("bias"))
    alike = isinstance(logits, Tensor) and logits.shape == product.shape
    if not alike or not torch.allclose(logits.float(), product, rtol=1e-5, atol=1e-6):
        return None
    return _Trial(logits, given[0] if given else own, ids, weights)


def _multiplies_in_float32(probe: nn.Module, hidden: Tensor, given: tuple[Tensor, ...]) -> bool:
    """Whether a model in bfloat16 gets logits of float32 products, and not bfloat16 ones that are made float32."""
    low = probe.bfloat16()
    weight = low._parameters["weight"]
    assert weight is not None  # or it gave no logits
    logits = _original(type(low))(low, hidden.bfloat16(), *given)[0]
    rounded = nn.functional.linear(hidden.bfloat16(), weight, low._parameters.get("bias"))
    return not torch.equal(logits.float(), rounded.float())


def _correction(router: nn.Module) -> Tensor | None:
    return getattr(router, "e_score_correction_bias", None)


def _candidates(router: Any, top_k: int, has_bias: bool) -> Iterator[tuple[str, int, int, int, float, bool | None]]:
    said = getattr(router, "routed_scaling_factor", None)
    factors = {1.0, float(said)} if isinstance(said, (int, float)) else {1.0}
    groups = next((getattr(router, name) for name in ("num_group", "n_group") if hasattr(router, name)), 0) or 0
    kept = getattr(router, "topk_group", 0) or 0
    splits = [(0, 0), (groups, kept)] if isinstance(groups, int) and groups > 1 else [(0, 0)]
    for method in METHODS.values():
        if has_bias != method.takes_bias or top_k > method.max_top_k:
            continue
        for n_group, topk_group in splits if method.takes_groups else [(0, 0)]:
            for factor in sorted(factors) if method.takes_scaling_factor else [1.0]:
                for renormalize in (False, True) if method.can_choose_renormalize else (None,):
                    yield method.name, top_k, n_group, topk_group, factor, renormalize


def _same(trial: _Trial, options: tuple[Any, ...]) -> bool:
    """Whether `moeq::route` chooses the same experts with the same weights, in whatever order."""
    logits, bias, ids, weights = trial
    try:
        our_ids, our_weights = torch.ops.moeq.route(logits.float(), bias, *options)
    except RuntimeError:  # options that do not go together, such as groups of one expert
        return False
    if our_ids.shape != ids.shape or weights.shape != ids.shape:
        return False
    order, our_order = ids.argsort(-1), our_ids.argsort(-1)
    same_ids = torch.equal(ids.gather(-1, order), our_ids.gather(-1, our_order).to(ids.dtype))
    sorted_weights, ours = weights.float().gather(-1, order), our_weights.gather(-1, our_order)
    return same_ids and torch.allclose(sorted_weights, ours, rtol=1e-4, atol=1e-6)


def _original(kind: Any) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(kind.forward, "moeq_original", kind.forward)
    return original


def _intercept(kind: Any) -> None:
    """Give a class of routers a forward that asks `moeq::route` where an instance has options for it."""
    theirs = kind.forward
    if hasattr(theirs, "moeq_original"):
        return

    @functools.wraps(theirs)
    def forward(self: Any, hidden_states: Tensor, *given: Tensor | None, **named: Tensor | None) -> Any:
        routing = getattr(self, _ATTRIBUTE, None)
        if (
            routing is None
            or self.training
            or hidden_states.device.type not in KERNEL_DEVICES
            or len(given) + len(named) != routing.given  # it has not been tried with such arguments
            or any(tensor is None for tensor in (*given, *named.values()))  # no correction
            or (torch.is_grad_enabled() and (hidden_states.requires_grad or self.weight.requires_grad))
        ):
            return theirs(self, hidden_states, *given, **named)
        return _route(self, routing, hidden_states, *given, *named.values())

    forward.moeq_original = theirs  # type: ignore[attr-defined]
    kind.forward = forward


def _route(router: Any, routing: RouterOptions, hidden_states: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights, ids), as routers of transformers give them."""
    weight, bias = router.weight, router._parameters.get("bias")
    rows = hidden_states.reshape(-1, weight.shape[1])
    correction = None
    if routing.has_correction:
        correction = given[0] if given else router.e_score_correction_bias
        correction = correction.float()
    dtype = torch.float32 if routing.in_float32 else weight.dtype
    rows = rows if routing.in_float32 else rows.to(weight.dtype)
    ids, weights, logits = torch.ops.moeq.route_hidden(rows, weight, bias, correction, *routing.options, dtype)
    return logits, weights, ids
