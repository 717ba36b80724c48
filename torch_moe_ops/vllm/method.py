"""The MoE method that vLLM's RoutedExperts calls: loads what a format says, prepares it, runs the op.

This module needs vLLM; `torch_moe_ops.vllm` imports it when the plug-in is registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from torch_moe_ops.prepared.fused import fused_moe_routed
from torch_moe_ops.prepared.prepare import prepare
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.vllm import settings
from torch_moe_ops.vllm.log import logger, say_once
from torch_moe_ops.vllm.modular import kernel_of, no_weights
from torch_moe_ops.vllm.parameters import LayerSizes
from torch_moe_ops.vllm.placement import places_of
from torch_moe_ops.vllm.plan import Plan, check_with_shared
from torch_moe_ops.vllm.shared_experts import SharedColumns, SharedExperts, shared_of
from torch_moe_ops.weights.shared_experts import with_shared_experts


class MoeqMethod(FusedMoEMethodBase):
    """Runs the experts of one layer by `torch.ops.moeq`.

    vLLM routes and adds up the ranks' results around `apply`, which is why this has none of it; it also runs shared
    experts that cannot join the routed ones (shared_experts.py). Where ranks exchange tokens, vLLM's modular kernel
    does so around our experts (modular.py).

    Args:
        quant_config: vLLM's config of the checkpoint, for those who look it up here.
        layer: vLLM's RoutedExperts.
        plan: how it runs.
        name: of the layer, for messages.
        runners: vLLM's layers by their names, which grow while the model is made.
    """

    def __init__(self, quant_config: Any, layer: Any, plan: Plan, name: str, runners: Mapping[str, Any]) -> None:
        super().__init__(layer.moe_config)
        self.quant_config = quant_config
        self.plan = plan
        self.layer_name = name
        self._runners = runners
        self._columns: SharedColumns | None = None
        if plan.format.interleaved:
            self.weight_dtype = "gpt_oss_mxfp4"  # gpt-oss's own loader asks for it

    def uses_weight_scale_2_pattern(self) -> bool:
        return self.plan.format.scale_2

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the format's tensors under the names that vLLM's loader knows."""
        self._sizes = sizes = LayerSizes(
            experts=num_experts,
            hidden=hidden_size,
            intermediate=intermediate_size_per_partition,
            halves=2 if self.moe.is_act_and_mul else 1,
            has_bias=self.moe.has_bias,
            dtype=params_dtype,
        )
        for name, parameter in self.plan.format.parameters(sizes).items():
            tensor = torch.nn.Parameter(parameter.empty(), requires_grad=False)
            layer.register_parameter(name, tensor)
            attributes = {"weight_loader": extra_weight_attrs["weight_loader"]}
            if parameter.sharing:
                attributes["quant_method"] = parameter.sharing
            if parameter.dummy is not None:
                attributes["dummy_weight_value"] = parameter.dummy
            set_weight_attrs(tensor, attributes)
        self._names = list(self.plan.format.parameters(sizes))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare what was loaded, and free it."""
        raw = self.plan.format.raw(self._tensors(layer), self.plan.act_format, self.layer_name)
        shared = self.shared_experts
        if shared is None:
            layer.moeq_weights = prepare(raw, **self.plan.options)
        else:
            raw = with_shared_experts(raw, shared.raw(self.plan.format, self.plan.act_format))
            layer.moeq_weights = prepare(raw, **self.plan.options_of_all())
            self._columns = shared.columns(raw.w13.device, self.moe.num_experts, raw.num_shared_experts)
            shared.leave()
        for name in self._names:
            delattr(layer, name)
        if self.plan.exchanges or self.moe.is_lora_enabled:
            weights = layer.moeq_weights
            rows13 = weights.intermediate_size * (2 if self.moe.is_act_and_mul else 1)
            self._no_weights = no_weights(weights.num_local_experts, rows13, weights.hidden_size, raw.w13.device)
            self.moe_kernel = self._kernel_of(layer, weights)

    def _kernel_of(self, layer: Any, weights: PreparedWeights) -> Any:
        if not self.moe.is_lora_enabled:
            return kernel_of(layer, weights, self.plan.maps_ids)
        from torch_moe_ops.vllm.lora_experts import lora_kernel_of

        layer.w13_weight, layer.w2_weight = self._no_weights  # who wraps this method gives them to the kernel
        return lora_kernel_of(layer, weights, self.plan.maps_ids)

    def _tensors(self, layer: Any) -> dict[str, Tensor]:
        """What the layer has loaded."""
        return {name: getattr(layer, name).data for name in self._names}

    @cached_property
    def shared_experts(self) -> SharedExperts | None:
        """The shared experts that join the routed ones; None where there are none, or vLLM runs them, after saying why.

        Asked first when all weights are loaded.
        """
        runner = self._runners.get(self.layer_name)
        if runner is None or settings.shared_experts() == "beside" or self.moe.is_lora_enabled:
            return None  # adapters are those of the routed experts
        try:
            found = shared_of(runner, self.plan)
            if found is not None:
                check_with_shared(self.plan, self.moe.experts_per_token, self._sizes, found.sizes, found.device)
                if self.plan.act_format != "none":  # else they are dropped
                    found.check_input_scales(self.plan.format, self._tensors(runner.routed_experts))
        except ValueError as error:
            line = "torch_moe_ops: shared experts left to vLLM: %s (first in %s)"
            say_once(logger.info, line, str(error), self.layer_name)
            return None
        if found is not None:
            line = "torch_moe_ops: shared experts in the call of the routed ones (first in %s)"
            say_once(logger.info, line, self.layer_name)
        return found

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Of what ranks exchange, which is not quantized; else None: vLLM's kernels do not run these experts."""
        return FUSED_MOE_UNQUANTIZED_CONFIG if self.plan.exchanges else None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """This rank's experts for x [num_tokens, hidden_size]; capturable, and traced where vLLM traces it.

        With a modular kernel: all ranks' experts for this rank's tokens, or what it has to add to that.
        """
        if self.moe_kernel is not None:
            return self.moe_kernel.apply(
                hidden_states=x,
                w1=self._no_weights[0],
                w2=self._no_weights[1],
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer._expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )
        ids = places_of(topk_ids, layer._expert_map) if self.plan.maps_ids else topk_ids
        if self._columns is not None:
            ids, topk_weights = self._columns.behind(x, ids, topk_weights)
        return fused_moe_routed(x, ids, topk_weights, layer.moeq_weights)


class ModelOptMoeqMethod(MoeqMethod):
    """The same under a name with "ModelOpt" in it, by which vLLM's loader tells how ModelOpt's scales lie."""


def method_of(quant_config: Any, layer: Any, plan: Plan, name: str, runners: Mapping[str, Any]) -> MoeqMethod:
    """The method of a planned layer; arguments as MoeqMethod has them."""
    kind = ModelOptMoeqMethod if plan.format.loader == "modelopt" else MoeqMethod
    return kind(quant_config, layer, plan, name, runners)


def takes_shared(runner: Any) -> bool:
    """Whether the experts of a loaded layer of vLLM are ours, and take over its shared ones."""
    method = runner.routed_experts.quant_method
    return isinstance(method, MoeqMethod) and method.shared_experts is not None
