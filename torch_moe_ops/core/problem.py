"""What decides who can run a layer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

# What `auto` may choose from: with "strict" backends within the bounds of docs/numerics.md alone, with "standard" also
# those that are measured to be as near to the oracle as the field's kernels are.
STANDARD, STRICT = ACCURACIES = ("standard", "strict")


@dataclass(frozen=True)
class Problem:
    """One MoE layer as a backend sees it: no tensors, only what decides who can run it.

    `capability` is the CUDA compute capability, None off CUDA. `top_k`, `routing_method` and
    `dtype` (of the hidden states) are None where the caller has not said: they then decide nothing.
    `input_scale` is "none" (weight-only or dynamic), "tensor" or "expert". `constants` are the activation's
    alpha, beta and limit where they are not (1, 0, infinity). `weight_scales` says of fp8 weights what shares
    a scale: "tensor" (a matrix), "half" (of w13) or "channel"; of int8: "channel" or "group", "with zero points"
    where there are some; of int4: what `int4_scales_of` says. `accuracy`: one of ACCURACIES. `num_shared_experts`: how
    many of the experts, the last ones, every token goes to; kernels see no difference.

    Raises ValueError for another accuracy.
    """

    scheme: str
    act_format: str = "none"
    activation: str = "silu"
    device: str = "cpu"
    capability: tuple[int, int] | None = None
    num_experts: int = 1
    num_local_experts: int = 0
    local_expert_offset: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    top_k: int | None = None
    dtype: torch.dtype | None = None
    routing_method: str | None = None
    has_bias: bool = False
    per_half_alphas: bool = False
    input_scale: str = "none"
    router_weight_on_input: bool = False
    weight_policy: str = "exact"
    constants: tuple[float, float, float] | None = None
    weight_scales: str | None = None
    accuracy: str = STANDARD
    num_shared_experts: int = 0

    def __post_init__(self) -> None:
        if self.accuracy not in ACCURACIES:
            raise ValueError(f"accuracy must be one of {list(ACCURACIES)}, got {self.accuracy!r}")
        if not self.num_local_experts:
            object.__setattr__(self, "num_local_experts", self.num_experts - self.local_expert_offset)

    def __str__(self) -> str:
        shown = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _ALWAYS_SHOWN or value != f.default:
                shown.append(f"{f.name}={value!r}")
        return f"Problem({', '.join(shown)})"


_ALWAYS_SHOWN = ("scheme", "act_format", "activation", "device", "num_experts", "hidden_size", "intermediate_size")
