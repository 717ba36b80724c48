"""Adapters of experts inside vLLM, on a CPU: its own LoRA layers beside the op, whole models beside merged ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from checkpoints_support import FIXTURES
from cuda_graphs import captured
from safetensors.torch import save_file
from torch import Tensor
from vllm_checkpoints import graft
from vllm_layers import FIXTURE_OF, LAYER, config_of, in_vllm, layer_of, load, routing_of
from vllm_reference import disagreements, reference_model
from vllm_runs import INSTALLED, NOT_INSTALLED, run_vllm

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside vLLM")
def test_an_adapter_that_is_loaded_between_replays_is_served() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.v1.worker.workspace import init_workspace_manager

    from torch_moe_ops.vllm.lora_experts import lora_kernel_of
    from torch_moe_ops.vllm.modular import no_weights

    fixture = FIXTURE_OF["w4a16"]
    model, config = config_of(fixture)
    raw = moe.load_experts(FIXTURES / fixture, layer=0, device="cuda")
    w, adapter = moe.prepare(raw, act_format="none"), _adapter(raw, RANK, 1).to("cuda")
    e, h, i = raw.num_experts, raw.hidden_size, raw.intermediate_size

    def stack(*size: int) -> Tensor:
        return torch.zeros(SLOTS, e, *size, device="cuda", dtype=torch.bfloat16)

    w13 = (stack(RANK, h), stack(RANK, h)), (stack(i, RANK), stack(i, RANK))
    w2 = (stack(RANK, i),), (stack(h, RANK),)
    owners = torch.arange(TOKENS, device="cuda") % 2 - 1
    context = Namespace(
        w13_lora_a_stacked=w13[0], w13_lora_b_stacked=w13[1], w2_lora_a_stacked=w2[0], w2_lora_b_stacked=w2[1],
        max_loras=SLOTS, punica_wrapper=Namespace(_token_lora_indices=owners), original_hidden_states=None,
    )  # fmt: skip
    x = torch.randn(TOKENS, h, device="cuda", dtype=torch.bfloat16)
    ids, weights = (t.cuda() for t in routing_of(e))
    with in_vllm():
        init_workspace_manager(x.device)
        kernel = lora_kernel_of(layer_of(model, config, (1, 1, "linear"), 0), w, False)
        kernel.fused_experts.set_lora_context(context)
        given = {"activation": MoEActivation.SILU, "global_num_experts": e, "expert_map": None}
        sizes = no_weights(e, 2 * i, h, x.device)

        def run() -> Tensor:
            return kernel.apply(x, *sizes, weights, ids, apply_router_weight_on_input=False, **given)

        graph, result = captured(run)
    assert adapter.b13 is not None
    for target, value in zip(
        (*w13[0], *w13[1], *w2[0], *w2[1]),
        (adapter.a13, adapter.a13, *adapter.b13.chunk(2, 1), adapter.a2, adapter.b2),
        strict=True,
    ):
        target[0].copy_(value)
    graph.replay()
    alone = moe.fused_moe_routed(x, ids, weights, w)
    adapted = moe.fused_moe_routed(x, ids, weights, w, lora=adapter)
    expected = torch.where((owners == 0)[:, None], adapted, alone)
    assert (result.float() - expected.float()).norm() <= 6e-3 * expected.float().norm()
    assert (alone.float() - expected.float()).norm() > 0.1 * expected.float().norm()


def _adapter_file(folder: Path, model: torch.nn.Module, rank: int, seed: int) -> dict[str, Tensor]:
    """Writes PEFT's files of an adapter of all experts; deltas by the names of the model's parameters."""
    g = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    deltas = {}
    for number, layer in enumerate(model.model.layers):  # type: ignore[union-attr,arg-type]
        experts = layer.mlp.experts
        gate, down = (experts.gate_up_proj.shape[1] // 2, experts.gate_up_proj.shape[2]), experts.down_proj.shape[1:]
        of_layer: dict[str, list[Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
        for expert in range(experts.gate_up_proj.shape[0]):
            for name, (rows, k) in (("gate_proj", gate), ("up_proj", gate), ("down_proj", down)):
                a = (torch.randn(rank, k, generator=g) * k**-0.5).bfloat16()
                b = (torch.randn(rows, rank, generator=g) * rank**-0.5).bfloat16()
                path = f"base_model.model.model.layers.{number}.mlp.experts.{expert}.{name}"
                stored |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
                of_layer[name].append(b.float() @ a.float())
        gates, ups, downs = (torch.stack(each) for each in of_layer.values())
        deltas[f"model.layers.{number}.mlp.experts.gate_up_proj"] = torch.cat((gates, ups), 1)
        deltas[f"model.layers.{number}.mlp.experts.down_proj"] = downs
    folder.mkdir()
    save_file(stored, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("eager", [True, False])
def test_a_batch_of_several_adapters_generates_what_merged_models_do(eager: bool, tmp_path: Path) -> None:
    folder = graft(FIXTURES / FIXTURE_OF["w4a16"], tmp_path / "model")
    model = reference_model(folder)
    deltas = [_adapter_file(tmp_path / f"adapter{rank}", model, rank, rank) for rank in (8, 4)]
    results, written = run_vllm(folder, [eager], (tmp_path / "adapter8", tmp_path / "adapter4"))
    assert "error" not in results[0], results[0]["error"]
    assert "experts on backend cpu" in written
    parameters = dict(model.named_parameters())
    right = []
    for owner, of_owner in enumerate([{}, *deltas]):
        for name, delta in of_owner.items():
            parameters[name].data.add_(delta)
        for i, (prompt, tokens) in enumerate(zip(results[0]["prompts"], results[0]["tokens"], strict=True)):
            agreed, wrong = disagreements(model, [prompt], [tokens])
            if i % 3 == owner:
                assert not wrong, f"prompt {i}: {wrong}"
            right.append((i % 3 == owner, agreed / len(tokens)))
        for name, delta in of_owner.items():
            parameters[name].data.sub_(delta)
    own = [share for mine, share in right if mine]
    others = [share for mine, share in right if not mine]
    assert min(own) >= 0.9 > sum(others) / len(others), "adapters must make a difference"
