"""Lora: adapters beside the packed experts of a layer, and the call of the op that runs both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_moe_ops.core.activations import is_gated
from torch_moe_ops.core.call import FIELDS
from torch_moe_ops.prepared.prepared_weights import PreparedWeights


@dataclass(frozen=True, eq=False)
class Lora:
    """Low-rank adapters of one layer's experts: beside W, scaling * B @ A. Given to `fused_moe` and `fused_moe_routed`.

    One adapter, or several whose ranks lie side by side (`Lora.stack` makes that), of which each token has one or none.
    Factors are bfloat16, float16 or float32 on the layer's device, and finite: one product serves all adapters.

    Args:
        a13, b13: [local experts, adapters * r, hidden_size] and [local experts, rows of w13, adapters * r], rows gate
            then up: both, or neither to leave w13 alone.
        a2, b2: [local experts, adapters * r2, intermediate_size] and [local experts, hidden_size, adapters * r2].
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) with rank-stabilized LoRA; a float32 tensor [adapters] of
            several.
    """

    a13: Tensor | None = None
    b13: Tensor | None = None
    a2: Tensor | None = None
    b2: Tensor | None = None
    scaling: float | Tensor = 1.0

    @staticmethod
    def stack(adapters: Sequence[Lora]) -> Lora:
        """Several adapters of one layer as one, numbered as they come; zeros stand for what one of them lacks.

        Raises ValueError where there is none, where none has a factor, or where one of them is a stack already.
        """
        if not adapters or any(isinstance(x.scaling, Tensor) and x.scaling.numel() != 1 for x in adapters):
            raise ValueError(f"Lora.stack: adapters must be single ones, at least one, got {list(adapters)}")
        named = {}
        for name, rank_at in (("a13", 1), ("b13", 2), ("a2", 1), ("b2", 2)):
            given = [getattr(adapter, name) for adapter in adapters]
            present = [t for t in given if t is not None]
            if not present:
                continue
            ranks = max(t.shape[rank_at] for t in present)
            none = present[0].narrow(rank_at, 0, 0)
            padded = []
            for factor in given:
                t = none if factor is None else factor
                missing = ranks - t.shape[rank_at]
                padded.append(F.pad(t, (0, missing) if rank_at == 2 else (0, 0, 0, missing)))
            named[name] = torch.cat(padded, rank_at)
        if not named:
            raise ValueError(f"Lora.stack: adapters must have factors, of one at least, got {list(adapters)}")
        device = next(iter(named.values())).device
        scaling = torch.tensor([float(adapter.scaling) for adapter in adapters], dtype=torch.float32, device=device)
        return Lora(**named, scaling=scaling)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Lora:
        """The same adapters elsewhere, or with factors of another dtype."""
        moved = {name: t.to(device=device, dtype=dtype) for name in _FACTORS if (t := getattr(self, name)) is not None}
        scaling = self.scaling.to(device) if isinstance(self.scaling, Tensor) else self.scaling
        return dataclasses.replace(self, scaling=scaling, **moved)  # type: ignore[arg-type]


_FACTORS = ("a13", "b13", "a2", "b2")
torch.export.register_dataclass(Lora, serialized_type_name="torch_moe_ops.prepared.lora.Lora")


def run_with_lora(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w: PreparedWeights,
    lora: Lora,
    lora_ids: Tensor | None,
    out_dtype: torch.dtype | None,
    merged: bool,
) -> Tensor:
    """`torch.ops.moeq.moe_routed_lora` on prepared weights. Arguments as `fused_moe_routed` passes them to its op."""
    _check_width(lora, w)
    scaling = lora.scaling
    if not isinstance(scaling, Tensor):
        scaling = torch.full((1,), scaling, dtype=torch.float32, device=hidden_states.device)
    return torch.ops.moeq.moe_routed_lora(
        hidden_states,
        topk_ids,
        topk_weights,
        *(getattr(w, name) for name in _WEIGHTS),
        *(getattr(lora, name) for name in _FACTORS),
        scaling,
        lora_ids,
        *w.settings_of_any_scheme(),
        out_dtype,
        merged,
    )


def _check_width(lora: Lora, w: PreparedWeights) -> None:
    """The op sees a layout's padded sizes, into which adapters of narrower layers may fit too."""
    width, halves = w.intermediate_size, 2 if is_gated(w.activation) else 1
    for name, dim, wanted in (("a2", 2, width), ("b13", 1, halves * width)):
        factor = getattr(lora, name)
        if isinstance(factor, Tensor) and factor.ndim == 3 and factor.shape[dim] != wanted:
            got = tuple(factor.shape)
            raise RuntimeError(
                f"fused_moe_routed: lora.{name} must have size {wanted} in dimension {dim}, as the layer's "
                f"intermediate_size is {width}, got shape {got}"
            )


_WEIGHTS = FIELDS[FIELDS.index("w13") : FIELDS.index("backend")]
