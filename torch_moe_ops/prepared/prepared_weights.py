"""PreparedWeights: the experts of one layer as a backend wants them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_moe_ops.core.problem import Problem
from torch_moe_ops.files import serialization
from torch_moe_ops.prepared import kept_problem, prepared_file, updating
from torch_moe_ops.prepared.fields import PreparedFields
from torch_moe_ops.weights.raw_weights import RawWeights

FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedWeights(PreparedFields):
    """One layer, prepared once for one backend. Made by `prepare`; run by `fused_moe`.

    The tensors carry the names of the ops' arguments and lie in the backend's `layout`.
    `g1_alphas`, `g2_alphas` multiply accumulators back to real values; `a1_gscale`, `a2_gscale`
    multiply activations before they are quantized (None: dynamic, or not quantized).
    `w13_scale_2` ... `a2_input_scale` are the checkpoint's own factors, kept so that `restore` and
    `update_` are exact; no op reads them.

    num_experts: the global count; num_local_experts of them, from local_expert_offset on, are here.
    num_shared_experts: how many of those that are here, the last ones, every token goes to (see `with_shared_experts`).
    hidden_size, intermediate_size: logical, before any padding by the layout.
    raw: what else RawWeights said (activation, constants, source, dtypes of the biases).
    posed: what else the problem said, and the backend that was asked for; see `problem`, `requested`, `accuracy`.
    """

    @property
    def problem(self) -> Problem:
        """The problem that `prepare` had, on the device where the tensors are now."""
        return kept_problem.problem_of_prepared(self)

    @property
    def requested(self) -> str:
        """The backend that `prepare` was asked for: a name, or "auto"."""
        return kept_problem.requested_of(self)

    @property
    def accuracy(self) -> str:
        """The accuracy that `prepare` was asked for: "standard" or "strict"."""
        return kept_problem.accuracy_of(self)

    def options(self) -> dict[str, Any]:
        """What makes `prepare` do the same again, beside the weights, the backend and the device."""
        return {**self.plain_options(), "accuracy": self.accuracy, "dtype": self.problem.dtype}

    def update_(self, raw: RawWeights) -> PreparedWeights:
        """Take over new raw weights of the same sizes in place: no tensor changes its address.

        A compiled function or a CUDA graph that holds these tensors sees the new values.
        Raises ValueError where the new weights would need another problem, shape or dtype.
        """
        updating.update(self, raw)
        return self

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file; `PreparedWeights.load` reads it back."""
        serialization.write(path, self.tensors(), self.metadata(), FORMAT_VERSION)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> PreparedWeights:
        """Read what `save` wrote.

        Raises CheckpointError, a ValueError, where the file is of another kind, version or layout, or holds what
        `prepare` does not write.
        """
        fields = serialization.read(path, device, PreparedWeights, FORMAT_VERSION)
        return prepared_file.checked(PreparedWeights, str(path), fields)


# Exported programs name the type so, wherever it is defined.
torch.export.register_dataclass(PreparedWeights, serialized_type_name="torch_moe_ops.prepared_weights.PreparedWeights")
