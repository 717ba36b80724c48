"""Our experts inside vLLM's modular kernel, whose other half sends tokens to the ranks that have their experts.

vLLM takes this way with data parallelism and with expert parallelism that exchanges tokens. This module needs vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from torch_moe_ops.prepared.fused import fused_moe_routed
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.vllm.placement import places_of

_Format = mk.FusedMoEActivationFormat


class MoeqExperts(mk.FusedMoEExpertsModular):
    """Experts of this rank for tokens in rows: weighted, and added up over the experts that are here.

    Args:
        moe_config: of the layer.
        weights: this rank's experts.
        maps_ids: they are no range of ids, so that each call maps ids to places.
        room: keywords of vLLM's base class for tokens that come in a batch for each expert.
    """

    def __init__(self, moe_config: Any, weights: PreparedWeights, maps_ids: bool, **room: int | None) -> None:
        # Tokens travel as they are, whatever the weights are quantized to: the op quantizes them.
        super().__init__(moe_config, FUSED_MOE_UNQUANTIZED_CONFIG, **room)
        self.weights = weights
        self.maps_ids = maps_ids

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return _Format.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    # vLLM asks these of classes that it chooses among; a planned layer has been asked before (plan.py).
    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """None of vLLM's workspace (the op has its own), and the result, of the shape of the tokens."""
        return (0,), (0,), self._shape_of_tokens(local_num_experts, M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write what this rank's experts make of hidden_states into output of the same shape: of rows, their sum.

        hidden_states: rows [M, K], or batches [experts here, M, K].
        topk_ids: [M, top_k] global ids. With apply_router_weight_on_input, hidden_states have their weight already.
        expert_tokens_meta: how many rows of each batch are tokens; the others become zero.
        """
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        ids, factors = self._routing(hidden_states, topk_ids, topk_weights, expert_map, expert_tokens_meta)
        size = output.shape[-1]
        self._run_into(output.view(-1, size), hidden_states.reshape(-1, size), ids, factors)

    def _run_into(self, output: Tensor, x: Tensor, ids: Tensor, factors: Tensor) -> None:
        if torch.compiler.is_compiling() or output.dtype != x.dtype or not output.is_contiguous():
            output.copy_(fused_moe_routed(x, ids, factors, self.weights))
        else:
            fused_moe_routed(x, ids, factors, self.weights, out=output)

    def _shape_of_tokens(self, experts: int, rows: int, size: int) -> tuple[int, ...]:
        return rows, size

    def _routing(
        self, tokens: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, meta: Any
    ) -> tuple[Tensor, Tensor]:
        """(ids, weights) as the op takes them, of all rows of the tokens; arguments as in `apply`."""
        ids = places_of(topk_ids, expert_map) if self.maps_ids and expert_map is not None else topk_ids
        return ids, topk_weights


class MoeqBatchedExperts(MoeqExperts):
    """Experts of this rank for a batch of tokens each: not weighted and not added up, which their senders do."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return _Format.BatchedExperts

    @property
    def expects_unquantized_inputs(self) -> bool:
        # Who sends such batches refuses to defer quantization; by the config there is none.
        return False

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceDelegate()

    def _shape_of_tokens(self, experts: int, rows: int, size: int) -> tuple[int, ...]:
        return experts, rows, size

    def _routing(
        self, tokens: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, meta: Any
    ) -> tuple[Tensor, Tensor]:
        experts, rows, _ = tokens.shape
        ids = ids_of_batches(meta.expert_num_tokens[:experts], rows, self.weights.local_expert_offset)
        return ids, torch.ones_like(ids, dtype=torch.float32)


def ids_of_batches(counts: Tensor, rows: int, first: int) -> Tensor:
    """[experts * rows, 1] int32: for batch e of `rows` rows the id first + e in the first counts[e] rows, else -1."""
    places = torch.arange(rows, device=counts.device)
    experts = torch.arange(first, first + counts.shape[0], device=counts.device, dtype=torch.int32)
    return torch.where(places < counts[:, None], experts[:, None], -1).to(torch.int32).reshape(-1, 1)


def kernel_of(layer: Any, weights: PreparedWeights, maps_ids: bool) -> Any:
    """vLLM's modular kernel of a layer: its own prepare and finalize around our experts.

    Args:
        layer: vLLM's RoutedExperts, loaded.
    Raises ValueError where vLLM has no such half for the layer's deployment.
    """
    config = layer.moe_config
    exchange = maybe_make_prepare_finalize(
        moe=config,
        quant_config=FUSED_MOE_UNQUANTIZED_CONFIG,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
        use_monolithic=False,
    )
    if exchange is None:
        raise ValueError(f"vLLM must have a prepare and finalize step for {config.moe_parallel_config}, got none")
    return mk.FusedMoEKernel(exchange, experts_for(exchange, config, weights, maps_ids))


def experts_for(exchange: Any, moe_config: Any, weights: PreparedWeights, maps_ids: bool) -> MoeqExperts:
    """Our experts in the form in which a prepare step hands out tokens."""
    if exchange.activation_format == _Format.Standard:
        return MoeqExperts(moe_config, weights, maps_ids)
    room = {"max_num_tokens": exchange.max_num_tokens_per_rank(), "num_dispatchers": exchange.num_dispatchers()}
    return MoeqBatchedExperts(moe_config, weights, maps_ids, **room)


def no_weights(experts: int, rows13: int, hidden: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tensors without elements where vLLM's kernel reads the sizes of w13 and w2 from."""
    return torch.empty(experts, rows13, 0, device=device), torch.empty(experts, hidden, 0, device=device)
