"""PreparedWeights: the experts of one layer as a backend wants them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.core.traced_floats import float_of, text_of

if TYPE_CHECKING:
    from torch_moe_ops.backends.registry import Problem

FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedWeights:
    """One layer, prepared once for one backend. Made by `prepare`; run by `fused_moe`.

    The tensors carry the names of the ops' arguments and lie in the backend's `layout`.
    `g1_alphas`, `g2_alphas` multiply accumulators back to real values; `a1_gscale`, `a2_gscale`
    multiply activations before they are quantized (None: dynamic, or not quantized).
    `w13_scale_2` ... `a2_input_scale` are the checkpoint's own factors, kept so that `restore` and
    `update_` are exact; no op reads them.

    num_experts: the global count; num_local_experts of them, from local_expert_offset on, are here.
    hidden_size, intermediate_size: logical, before any padding by the layout.
    raw: what else RawWeights said (activation, constants, source, dtypes of the biases).
    posed: what else the problem said, and the backend that was asked for; see `problem` and `requested`.
    """

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

    def __post_init__(self) -> None:
        texts = (text_of(self.swiglu_alpha), text_of(self.swiglu_beta), text_of(self.swiglu_limit))
        object.__setattr__(self, "_swiglu_texts", texts)

    def constants(self) -> tuple[float | None, ...]:
        """swiglu_alpha, swiglu_beta, swiglu_limit for a function that is traced (_traced_floats.py)."""
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

    def to(self, device: torch.device | str) -> PreparedWeights:
        """The same layer with every tensor on `device`.

        The backend and its layout stay: one that cannot run there refuses when it is called, so
        move between devices of one kind, or `restore` and `prepare` anew.
        """
        target = torch.device(device)  # not a dtype: codes must stay what they are
        moved: dict[str, Any] = {name: t.to(target) for name, t in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    @property
    def problem(self) -> Problem:
        """The problem that `prepare` had, on the device where the tensors are now."""
        from torch_moe_ops.prepared.kept_problem import problem_of_prepared

        return problem_of_prepared(self)

    @property
    def requested(self) -> str:
        """The backend that `prepare` was asked for: a name, or "auto"."""
        from torch_moe_ops.prepared.kept_problem import requested_of

        return requested_of(self)

    def options(self) -> dict[str, Any]:
        """What makes `prepare` do the same again, beside the weights, the backend and the device."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def op_weights(self) -> tuple[Tensor | None, ...]:
        """The weight arguments of the scheme's ops, in their order."""
        return tuple(getattr(self, name) for name in _WEIGHT_ARGUMENTS[self.scheme])

    def update_(self, raw: Any) -> PreparedWeights:
        """Take over new raw weights of the same sizes in place: no tensor changes its address.

        A compiled function or a CUDA graph that holds these tensors sees the new values.
        Raises ValueError where the new weights would need another problem, shape or dtype.
        """
        from torch_moe_ops.prepared.restoring import update

        update(self, raw)
        return self

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file; `PreparedWeights.load` reads it back."""
        from torch_moe_ops.files.serialization import write

        write(path, self.tensors(), self.metadata(), FORMAT_VERSION)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> PreparedWeights:
        """Read what `save` wrote.

        Raises CheckpointError, a ValueError, where the file is of another kind, version or layout, or holds what
        `prepare` does not write.
        """
        from torch_moe_ops.files.serialization import read
        from torch_moe_ops.prepared.prepared_file import checked

        return checked(str(path), read(path, device, PreparedWeights, FORMAT_VERSION))


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
TENSOR_FIELDS = frozenset(f.name for f in dataclasses.fields(PreparedWeights) if "Tensor" in str(f.type))


def _weight_arguments(scheme: str) -> tuple[str, ...]:
    names, _ = arguments(f"{SCHEMES[scheme].op_prefix}moe_routed")
    return names[names.index("w13") : names.index("backend")]


_WEIGHT_ARGUMENTS = {scheme: _weight_arguments(scheme) for scheme in SCHEMES}

torch.export.register_dataclass(PreparedWeights)
