"""prepare: from raw weights to a backend's layout."""

from __future__ import annotations

from typing import Any

import torch

from torch_moe_ops.backends.explain import requested_backend, select
from torch_moe_ops.backends.slow import warn_of_reference
from torch_moe_ops.core.problem import STANDARD
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.prepared.posed import to_text
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.problem import problem_of, settings_of, share_of
from torch_moe_ops.prepared.tensors import plain_values, tensors_of
from torch_moe_ops.weights.raw_weights import RawWeights


@torch.no_grad()
def prepare(
    raw: RawWeights,
    activation: str | None = None,
    act_format: str | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
    num_experts: int | None = None,
    local_expert_offset: int = 0,
    parallel: Any = None,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
    swiglu_limit: float | None = None,
    router_weight_on_input: bool = False,
    weight_policy: str = "exact",
    accuracy: str = STANDARD,
    dtype: torch.dtype | None = None,
) -> PreparedWeights:
    """Choose a backend for a layer and bring its weights into that backend's layout. Once per layer.

    Args:
        raw: the layer's experts. Not modified, and no memory is shared with them.
        activation: a name of `core.activations.ACTIVATIONS`; None: what the checkpoint says, else "silu".
        act_format: how GEMM operands are made from activations; None: the scheme's default
            ("nvfp4" for nvfp4, "none" for unquantized weights). Never chosen by device.
        backend: "auto" takes MOEQ_BACKEND, else the first backend that fits; a name forces it.
        device: where the prepared weights live; None: raw's own device.
        num_experts, local_expert_offset: for expert parallelism, when `raw` holds only the experts
            [local_expert_offset, + raw.num_experts) of num_experts. None: just as many as are needed.
        parallel: a FusedMoEParallelConfig, when `raw` holds all experts: this rank's share is taken.
        swiglu_alpha, swiglu_beta, swiglu_limit: None: what the checkpoint says, else the activation's own.
        router_weight_on_input: top-1 models whose routing weight multiplies the token (routed op only;
            the monolithic op does it for routing method "llama4").
        weight_policy: "exact"; "packed" or "folded" for nvfp4 and mxfp4 weights with act_format "fp8": each
            weight is rounded once to e4m3 under a power of two per row (docs/numerics.md).
        accuracy: what "auto" may choose. "strict": backends within the bounds of docs/numerics.md alone. "standard":
            also those whose measured distance from the oracle is at most 1.1 times that of the kernels that the field
            runs on such weights, where they are measured to be faster. Results then differ by that distance from
            those of "strict", never by another activation format or weight policy. `explain` says both of backends.
        dtype: of the hidden states, where that is known: "auto" then takes a backend that takes them. Unquantized
            experts take hidden states of their own dtype, whatever is said here.

    Warns, once for a device and a reason, where "auto" has nothing but `reference`, which is slow.

    Raises:
        TypeError: an argument of another type.
        ValueError: an argument does not fit, or no backend (or not the forced one) can run the
            problem; the message then holds the whole `explain` table. So with accuracy "strict" and a backend by
            name (or MOEQ_BACKEND) that is not strict. So where a scale of the weights is NaN.
    """
    if not isinstance(raw, RawWeights):
        raise TypeError(f"prepare: raw must be RawWeights, got {type(raw).__name__}")
    if dtype not in (None, *FLOATS):
        raise ValueError(f"prepare: dtype must be None or one of {[str(known) for known in FLOATS]}, got {dtype}")
    target = torch.device(device) if device is not None else raw.device
    if parallel is not None:
        raw, num_experts, local_expert_offset = share_of(raw, parallel, num_experts, local_expert_offset)
    settings = settings_of(
        raw,
        activation=activation,
        act_format=act_format,
        num_experts=num_experts,
        local_expert_offset=local_expert_offset,
        swiglu=(swiglu_alpha, swiglu_beta, swiglu_limit),
        router_weight_on_input=router_weight_on_input,
        weight_policy=weight_policy,
    )
    problem, requested = problem_of(raw, settings, target, accuracy, dtype), requested_backend(backend)
    chosen = select(problem, requested)
    if requested == "auto" and chosen.name == "reference":
        warn_of_reference(problem, stacklevel=3)  # of the caller, beyond no_grad's wrapper
    return PreparedWeights(
        backend=chosen.name,
        layout=chosen.layout.name,
        raw=plain_values(raw),
        posed=to_text(problem, requested),
        **settings,
        **tensors_of(raw, chosen, settings, target),
    )
