"""ExpertsCall: what a backend is asked to run, in one shape for all schemes."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ExpertsCall(NamedTuple):
    """The arguments of a routed op, checked and complete. Absent tensors are None.

    `scheme` and the tensors carry the op's own names and meaning. `swiglu_*` are resolved to
    numbers (the activation's own constants where the caller gave none), `out_dtype` to a dtype.
    """

    scheme: str
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    w13: Tensor
    w13_scale: Tensor | None
    w13_zero_point: Tensor | None
    g1_alphas: Tensor | None
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor | None
    w2_zero_point: Tensor | None
    g2_alphas: Tensor | None
    w2_bias: Tensor | None
    a1_gscale: Tensor | None
    a2_gscale: Tensor | None
    backend: str
    act_format: str
    activation: str
    swiglu_alpha: float
    swiglu_beta: float
    swiglu_limit: float
    num_experts: int
    local_expert_offset: int
    router_weight_on_input: bool
    weight_policy: str
    out_dtype: torch.dtype

    def all_experts(self) -> int:
        """The experts of all ranks; where num_experts is 0, as many as are needed (docs/design.md, D11)."""
        return self.num_experts or self.local_expert_offset + self.w13.shape[0]


FIELDS: tuple[str, ...] = ExpertsCall._fields
INDEX: dict[str, int] = {name: i for i, name in enumerate(FIELDS)}

# What compiled ops get of a call, behind `out` and in this order: scripts/kernel_headers.py writes their arguments from
# it, so that the two sides cannot differ. The rest is about the choice of a kernel.
_OF_THE_CHOICE = ("scheme", "backend", "act_format", "num_experts", "weight_policy", "out_dtype")
KERNEL_FIELDS: tuple[str, ...] = tuple(name for name in FIELDS if name not in _OF_THE_CHOICE)
# The tensors of a layer among them.
WEIGHT_FIELDS: tuple[str, ...] = KERNEL_FIELDS[KERNEL_FIELDS.index("w13") : KERNEL_FIELDS.index("a2_gscale") + 1]
for_kernels = itemgetter(*(INDEX[name] for name in KERNEL_FIELDS))


def for_kernels_with(*names: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """`for_kernels` of (*call, *values), the values instead of what the call has under these names (KeyError: none)."""
    other = dict(zip(names, range(len(FIELDS), len(FIELDS) + len(names)), strict=True))
    if not other.keys() <= set(KERNEL_FIELDS):
        raise KeyError(*(other.keys() - set(KERNEL_FIELDS)))
    return itemgetter(*(other.get(name, INDEX[name]) for name in KERNEL_FIELDS))
