"""num_parameters of models with packed experts: transformers counts parameters, and packed weights are none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.transformers.experts import ExpertWeights


def intercept_counting() -> None:
    """Make num_parameters count the weights and biases of packed experts, not their codes. May be called again."""
    theirs = PreTrainedModel.num_parameters
    if not hasattr(theirs, "moeq_original"):
        PreTrainedModel.num_parameters = _intercepting(theirs)  # type: ignore[method-assign]


def _intercepting(theirs: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(theirs)
    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        count = theirs(self, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        if only_trainable:  # packed weights never are
            return count
        return count + sum(weights_of(m.prepared) for m in self.modules() if isinstance(m, ExpertWeights))

    num_parameters.moeq_original = theirs  # type: ignore[attr-defined]
    return num_parameters


def weights_of(w: PreparedWeights) -> int:
    """How many weights and biases a prepared layer stands for, whatever its padding."""
    rows = w.intermediate_size * (2 if ACTIVATIONS[w.activation].is_gated else 1)
    per_expert = w.hidden_size * (rows + w.intermediate_size)
    biases = (w.w13_bias is not None) * rows + (w.w2_bias is not None) * w.hidden_size
    return w.num_local_experts * (per_expert + biases)
