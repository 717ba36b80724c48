"""explain: which backend runs a layer, and why not the others."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Protocol, overload, runtime_checkable

import torch

from torch_moe_ops.backends.explain import Explanation, check_requested, explain_problem, requested_backend
from torch_moe_ops.config import FusedMoEConfig, FusedMoEQuantConfig
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.prepared.prepare import prepare
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.problem import problem_of, settings_of, share_of
from torch_moe_ops.prepared.problem_of_config import problem_of_config
from torch_moe_ops.weights.raw_weights import RawWeights


@runtime_checkable
class ExplainsItself(Protocol):
    """What is more than weights and says itself what it does: ExpertParallel."""

    def explain(self) -> Any: ...


@overload
def explain(what: ExplainsItself) -> Any: ...


@overload
def explain(
    what: PreparedWeights | RawWeights | Problem | FusedMoEConfig | None = None,
    *,
    backend: str | None = None,
    config: FusedMoEConfig | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    **settings: Any,
) -> Explanation: ...


def explain(
    what: PreparedWeights | RawWeights | Problem | FusedMoEConfig | ExplainsItself | None = None,
    *,
    backend: str | None = None,
    config: FusedMoEConfig | None = None,
    quant_config: FusedMoEQuantConfig | None = None,
    **settings: Any,
) -> Any:
    """Every backend, chosen or not, with every reason. Print it.

    Args:
        what: prepared weights (why their backend was chosen), raw weights with prepare's other
            arguments (`activation=`, `act_format=`, `device=`, `parallel=`, `accuracy=`, ...), a Problem, or a
            FusedMoEConfig; or an ExpertParallel, alone (which transport exchanges its tokens, and why).
        backend: as in `prepare`; None: as it was prepared, else the config's `moe_backend`, MOEQ_BACKEND, "auto".
        config, quant_config: instead of `what`, a layer's configs (and `capability=(major, minor)`, where the
            device is not in this machine, and `accuracy=`). quant_config None: nothing is quantized.
    """
    if isinstance(what, FusedMoEConfig):
        what, config = None, what
    if config is not None or quant_config is not None:
        return _of_config(what, config, quant_config, backend, **settings)
    if isinstance(what, RawWeights):
        return _of_raw(what, backend, settings)
    if settings:
        raise TypeError(f"explain: {sorted(settings)} go with raw weights or a config, got {type(what).__name__}")
    if isinstance(what, PreparedWeights):
        explanation = explain_problem(what.problem, check_requested(backend or what.backend))
        return explanation if backend else dataclasses.replace(explanation, requested=what.requested)
    if isinstance(what, Problem):
        return explain_problem(what, check_requested(requested_backend(backend or "auto")))
    if isinstance(what, ExplainsItself) and backend is None:
        return what.explain()
    raise TypeError(f"explain: what must be PreparedWeights, RawWeights or Problem, got {type(what).__name__}")


def _of_config(what: Any, config: Any, quant_config: Any, backend: str | None, **settings: Any) -> Explanation:
    if what is not None:
        raise TypeError(f"explain: what must be left out where config is given, got {type(what).__name__}")
    if config is None:
        raise TypeError("explain: config must be given with quant_config, got None")
    problem = problem_of_config(config, quant_config, **settings)
    requested = requested_backend(backend or config.moe_backend)
    return explain_problem(problem, requested)


def _of_raw(raw: RawWeights, backend: str | None, settings: dict[str, Any]) -> Explanation:
    """As prepare would choose with these arguments."""
    bound = inspect.signature(prepare).bind(raw, **settings)  # names an unknown argument
    bound.apply_defaults()
    given = bound.arguments
    device = torch.device(given["device"]) if given["device"] is not None else raw.device
    if given["parallel"] is not None:
        shared = share_of(raw, given["parallel"], given["num_experts"], given["local_expert_offset"])
        raw, given["num_experts"], given["local_expert_offset"] = shared
    same = ("activation", "act_format", "num_experts", "local_expert_offset", "router_weight_on_input", "weight_policy")
    swiglu = (given["swiglu_alpha"], given["swiglu_beta"], given["swiglu_limit"])
    plain = settings_of(raw, swiglu=swiglu, **{name: given[name] for name in same})
    requested = check_requested(requested_backend(backend or given["backend"]))
    return explain_problem(problem_of(raw, plain, device, given["accuracy"], given["dtype"]), requested)
