"""The fields of prepared weights, and what follows from them alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.core.traced_floats import float_of, text_of

Fields = TypeVar("Fields", bound="PreparedFields")


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedFields:
    """What PreparedWeights holds; documented there."""

    scheme: str
    backend: str
    layout: str
    activation: str
    act_format: str
    weight_policy: str
    num_experts: int
    num_local_experts: int
    local_expert_offset: int
    hidden_size: int
    intermediate_size: int
    router_weight_on_input: bool
    swiglu_alpha: float | None
    swiglu_beta: float | None
    swiglu_limit: float | None
    # Longer names first: torch.export renames inputs by prefix, and `w13` begins `w13_scale`.
    w13_scale_2: Tensor | None = None
    w2_scale_2: Tensor | None = None
    a13_input_scale: Tensor | None = None
    a2_input_scale: Tensor | None = None
    w13_zero_point: Tensor | None = None
    w2_zero_point: Tensor | None = None
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    g1_alphas: Tensor | None = None
    g2_alphas: Tensor | None = None
    a1_gscale: Tensor | None = None
    a2_gscale: Tensor | None = None
    w13: Tensor
    w2: Tensor
    raw: str = "%7B%7D"  # URL-quoted JSON, as is `posed`
    posed: str = ""
    num_shared_experts: int = 0

    def __post_init__(self) -> None:
        texts = (text_of(self.swiglu_alpha), text_of(self.swiglu_beta), text_of(self.swiglu_limit))
        object.__setattr__(self, "_swiglu_texts", texts)

    def constants(self) -> tuple[float | None, ...]:
        """swiglu_alpha, swiglu_beta, swiglu_limit, also for a function that is traced (core/traced_floats.py)."""
        if not torch.compiler.is_compiling():
            return self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit
        alpha, beta, limit = self._swiglu_texts  # type: ignore[attr-defined]
        return float_of(alpha), float_of(beta), float_of(limit)

    @property
    def device(self) -> torch.device:
        return self.w13.device

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def metadata(self) -> dict[str, Any]:
        """Everything that is not a tensor."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in TENSOR_FIELDS}

    def to(self: Fields, device: torch.device | str) -> Fields:
        """The same layer with every tensor on `device`.

        The backend and its layout stay: one that cannot run there refuses when it is called, so
        move between devices of one kind, or `restore` and `prepare` anew.
        """
        target = torch.device(device)  # not a dtype: codes must stay what they are
        moved: dict[str, Any] = {name: t.to(target) for name, t in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def plain_options(self) -> dict[str, Any]:
        """Those arguments of `prepare` that are fields."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def op_weights(self) -> tuple[Tensor | None, ...]:
        """The weight arguments of the scheme's ops, in their order."""
        return tuple(getattr(self, name) for name in _WEIGHT_ARGUMENTS[self.scheme])

    def settings_of_any_scheme(self) -> tuple[Any, ...]:
        """What an op that takes weights of any scheme is told of them, in its order: backend to weight_policy."""
        formats = self.backend, self.scheme, self.act_format, self.activation
        share = self.num_experts, self.local_expert_offset, self.router_weight_on_input
        return *formats, *self.constants(), *share, self.weight_policy

    def named_op_weights(self) -> dict[str, Tensor | None]:
        """The same by their names."""
        return {name: getattr(self, name) for name in _WEIGHT_ARGUMENTS[self.scheme]}


_OPTIONS = (
    "activation",
    "act_format",
    "num_experts",
    "local_expert_offset",
    "swiglu_alpha",
    "swiglu_beta",
    "swiglu_limit",
    "router_weight_on_input",
    "weight_policy",
)
TENSOR_FIELDS = frozenset(f.name for f in dataclasses.fields(PreparedFields) if "Tensor" in str(f.type))


def _weight_arguments(scheme: str) -> tuple[str, ...]:
    names, _ = arguments(f"{SCHEMES[scheme].op_prefix}moe_routed")
    return names[names.index("w13") : names.index("backend")]


_WEIGHT_ARGUMENTS = {scheme: _weight_arguments(scheme) for scheme in SCHEMES}
