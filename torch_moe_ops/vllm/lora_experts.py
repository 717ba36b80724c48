"""Our experts inside vLLM's modular kernel with LoRA enabled. This module needs vLLM."""

from __future__ import annotations

from typing import Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.prepare_finalize import make_moe_prepare_and_finalize_no_dp_ep

from torch_moe_ops.prepared.fused import fused_moe_routed
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.vllm.adapters import Adapters
from torch_moe_ops.vllm.modular import MoeqExperts


class MoeqLoraExperts(LoRAExpertsMixin, MoeqExperts):
    """Experts of a layer beside the adapters that vLLM has for it: once it has set its context, in one op."""

    _adapters: Adapters | None = None

    def set_lora_context(self, ctx: Any) -> None:
        """What vLLM calls when it has made the layer's stacks of adapters, before it captures graphs."""
        super().set_lora_context(ctx)
        self._adapters = Adapters(ctx)

    def _run_into(self, output: Tensor, x: Tensor, ids: Tensor, factors: Tensor) -> None:
        if self._adapters is None:
            return super()._run_into(output, x, ids, factors)
        of_tokens = self._adapters.ids(x.shape[0])
        output.copy_(fused_moe_routed(x, ids, factors, self.weights, lora=self._adapters.lora, lora_ids=of_tokens))


def lora_kernel_of(layer: Any, weights: PreparedWeights, maps_ids: bool) -> Any:
    """vLLM's modular kernel of a layer whose rank has all tokens, with experts that take adapters.

    Args:
        layer: vLLM's RoutedExperts, loaded.
    """
    step = make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
    return mk.FusedMoEKernel(step, MoeqLoraExperts(layer.moe_config, weights, maps_ids))
