"""Adapters of experts inside vLLM's own LoRA layers, on a CPU: beside the same adapters given to the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints_support import FIXTURES
from torch import Tensor
from vllm_layers import FIXTURE_OF, LAYER, config_of, layer_of, load, routing_of
from vllm_runs import INSTALLED, NOT_INSTALLED

import torch_moe_ops as moe

pytestmark = pytest.mark.skipif(not INSTALLED, reason=NOT_INSTALLED)
SLOTS, RANK, TOKENS = 3, 8, 9


def _runner(layer: Any) -> Any:
    """What vLLM's LoRA layer reads of a MoERunner."""

    class Runner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.routed_experts, self.moe_config, self._shared_experts = layer, layer.moe_config, None

        @property
        def _quant_method(self) -> Any:
            return self.routed_experts.quant_method

        def _replace_quant_method(self, method: Any) -> None:
            self.routed_experts.quant_method = method

    return Runner()


def _adapter(raw: moe.RawWeights, rank: int, seed: int) -> moe.Lora:
    g = torch.Generator().manual_seed(seed)

    def factor(*size: int) -> Tensor:
        return (torch.randn(raw.num_experts, *size, generator=g) * size[-1] ** -0.5).bfloat16()

    h, i = raw.hidden_size, raw.intermediate_size
    return moe.Lora(factor(rank, h), factor(2 * i, rank), factor(rank, i), factor(h, rank))


def _set(lora_layer: Any, slot: int, adapter: moe.Lora) -> None:
    assert adapter.b13 is not None
    gate, up = adapter.b13.chunk(2, 1)
    lora_layer.set_lora(slot, [adapter.a13, adapter.a2, adapter.a13], [gate, adapter.b2, up])


@pytest.mark.parametrize("case", ["w4a16", "ct_mxfp4", "fp8_block"])
def test_tokens_of_several_adapters(case: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    model, config = config_of(FIXTURE_OF[case])
    lora_config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, lora_dtype=torch.bfloat16)
    vllm_config = VllmConfig()
    vllm_config.lora_config = lora_config
    with set_current_vllm_config(vllm_config):
        layer = layer_of(model, config, (1, 1, "linear"), 0, is_lora_enabled=True)
        assert type(layer.quant_method).__name__.endswith("MoeqMethod")
        load(layer, FIXTURE_OF[case])
        lora_layer = FusedMoEWithLoRA(_runner(layer))
        lora_layer.create_lora_weights(SLOTS, lora_config)
        punica = PunicaWrapperCPU(64, 64, "cpu")
        lora_layer.set_mapping(punica)
        raw = moe.load_experts(FIXTURES / FIXTURE_OF[case], layer=LAYER.get(FIXTURE_OF[case], 0))
        of_slots = {0: _adapter(raw, RANK, 1), 2: _adapter(raw, 4, 2)}
        for slot, adapter in of_slots.items():
            _set(lora_layer, slot, adapter)
        owners = torch.tensor([0, 2, -1] * (TOKENS // 3))
        punica._token_lora_indices[:TOKENS] = owners
        x = torch.randn(TOKENS, raw.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
        ids, weights = routing_of(raw.num_experts)
        found = layer.forward_modular(x, weights, ids)
    w = moe.prepare(raw, act_format="none", backend="reference")
    for owner in (0, 2, -1):
        mine = owners == owner
        given = (x[mine], ids[mine], weights[mine], w)
        expected = moe.fused_moe_routed(*given, lora=of_slots[owner]) if owner >= 0 else moe.fused_moe_routed(*given)
        alone = moe.fused_moe_routed(*given)
        assert (found[mine].float() - expected.float()).norm() <= 6e-3 * expected.float().norm()
        if owner >= 0:
            assert (alone.float() - expected.float()).norm() > 0.1 * expected.float().norm()
