"""What may be asked of a router: its options as an object, and the same as arguments of `moeq::route`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torch_moe_ops.core.check import check, check_given, describe, fail, show
from torch_moe_ops.core.routing_methods import (
    Problem,
    bias_problem,
    logits_problem,
    option_problem,
    shared_problem,
    size_problem,
    weight_option_problem,
)
from torch_moe_ops.core.traced_floats import text_of


@dataclass(frozen=True, eq=False)  # eq: a tensor has no truth value to compare biases by
class Routing:
    """How a router's logits become expert ids and weights.

    Args:
        method: one of ROUTING_METHODS.
        top_k: experts per token, 1..32 (llama4: 1).
        n_group, topk_group: only experts of the best topk_group of n_group equal groups are chosen
            (default, renormalize, renormalize_naive, deepseek_v3); 0 or 1: no groups. A group's score is
            the sum of its two best choice scores where there is a bias, its best one otherwise.
        routed_scaling_factor: multiplies the weights (default, deepseek_v3, minimax2, deepseek_v4).
        bias: [num_experts] float32, added to the scores for the choice only (deepseek_v3, minimax2, deepseek_v4).
        renormalize: whether weights are divided by their sum; None: as the method says. Free for default,
            renormalize_naive, deepseek_v3, sigmoid, sigmoid_renorm, minimax2, deepseek_v4.

    Raises ValueError naming the field, also for an option that the method cannot use; TypeError for a
    value of the wrong Python type. Compared and hashed by identity.
    """

    method: str
    top_k: int
    n_group: int = 0
    topk_group: int = 0
    routed_scaling_factor: float = 1.0
    bias: Tensor | None = None
    renormalize: bool | None = None

    def __post_init__(self) -> None:
        for field in ("top_k", "n_group", "topk_group"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Routing: {field} must be an int, got {value!r}")
        if not isinstance(self.routed_scaling_factor, (int, float)):
            raise TypeError(f"Routing: routed_scaling_factor must be a float, got {self.routed_scaling_factor!r}")
        if self.renormalize is not None and not isinstance(self.renormalize, bool):
            raise TypeError(f"Routing: renormalize must be None or a bool, got {self.renormalize!r}")
        if self.bias is not None and not isinstance(self.bias, Tensor):
            raise TypeError(f"Routing: bias must be a tensor or None, got {self.bias!r}")
        if self.bias is not None:
            self._require(bias_problem(self.bias, None))
        self._require(option_problem(self.method, self.top_k, self.n_group, self.topk_group, self.bias))
        self._require(weight_option_problem(self.method, self.routed_scaling_factor, self.renormalize))
        if self.bias is not None:
            self._require(size_problem(self.bias.shape[0], self.top_k, self.n_group, self.topk_group, True))
        object.__setattr__(self, "_factor_text", text_of(self.routed_scaling_factor))

    def constant_factor(self) -> float:
        """routed_scaling_factor for a function that is traced (core/traced_floats.py)."""
        return float(self._factor_text)  # type: ignore[attr-defined]

    @staticmethod
    def _require(problem: Problem | None) -> None:
        if problem is not None:
            field, requirement, got = problem
            field = {"routing_bias": "bias", "routing_method": "method"}.get(field, field)
            raise ValueError(f"Routing: {field} must {requirement}, got {show(got)}")


def check_route(
    op: str,
    router_logits: Tensor,
    routing_bias: Tensor | None,
    routing_method: str,
    top_k: int,
    n_group: int = 0,
    topk_group: int = 0,
    routed_scaling_factor: float = 1.0,
    renormalize: bool | None = None,
) -> None:
    """Raise RuntimeError in the form of `op` unless these are legal arguments of `moeq::route`.

    Reads shapes and dtypes only, so that an op and its fake share it.
    """
    check_given(op, "router_logits", router_logits)
    problem = logits_problem(router_logits)
    if problem is None and routing_bias is not None:
        problem = bias_problem(routing_bias, router_logits)
    if problem is None:
        problem = option_problem(routing_method, top_k, n_group, topk_group, routing_bias)
    if problem is None:
        problem = weight_option_problem(routing_method, routed_scaling_factor, renormalize)
    if problem is None:
        problem = size_problem(router_logits.shape[1], top_k, n_group, topk_group, routing_bias is not None)
    if problem is not None:
        fail(op, *problem)


def check_shared(
    op: str,
    router_logits: Tensor,
    routing_method: str,
    top_k: int,
    num_shared_experts: int,
    shared_expert_weights: Tensor | None,
) -> None:
    """As check_route, of the experts that every token goes to; after it."""
    weights = shared_expert_weights
    problem = shared_problem(routing_method, top_k, num_shared_experts, weights)
    if problem is not None:
        fail(op, *problem)
    if weights is not None:
        rows = router_logits.shape[0]
        text = f"have num_tokens = {rows} rows like router_logits"
        check(weights.shape[0] == rows, lambda: describe(op, "shared_expert_weights", text, weights.shape))
