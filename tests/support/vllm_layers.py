"""vLLM's own RoutedExperts with the plug-in's method, filled by its weight loader from a fixture."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from checkpoints_support import FIXTURES
from safetensors.torch import load_file
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.vllm import registration

NAME = "model.layers.0.mlp.experts"
FIXTURE_OF = {
    "nvfp4": "deepseek_v3_modelopt_nvfp4",
    "w4a16": "qwen3_moe_modelopt_nvfp4_w4a16",
    "ct_nvfp4": "qwen3_moe_ct_nvfp4",
    "ct_mxfp4": "qwen3_moe_ct_mxfp4",
    "ct_int4": "qwen3_moe_ct_int4_g32",
    "ct_fp8": "qwen3_moe_ct_fp8_channel",
    "fp8": "qwen3_moe_modelopt_fp8",
    "fp8_block": "qwen3_moe_fp8_block",
}
# What a rank's part of the intermediate size must be a multiple of.
UNITS = {
    "fp8_block": 128,
    "ct_mxfp4": 32,
    "ct_int4": 32,
    "ct_fp8": 8,
    "fp8": 8,
    "nvfp4": 16,
    "w4a16": 16,
    "ct_nvfp4": 16,
}
LAYER = {"deepseek_v3_modelopt_nvfp4": 1}  # which of the fixture's layers has experts, where it is not 0
# (tp size, ep size, placement): a share of the intermediate size, or whole experts.
DIVISIONS = [(1, 1, "linear"), (2, 1, "linear"), (1, 2, "linear"), (1, 2, "round_robin")]


@contextlib.contextmanager
def in_vllm() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def config_of(fixture: str) -> tuple[dict[str, Any], Any]:
    """config.json, and our subclass of vLLM's config of its quantization."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    registration.register()
    model = json.loads((FIXTURES / fixture / "config.json").read_text())
    quantization = model["quantization_config"]
    name = quantization["quant_method"]
    if name == "modelopt":
        name = {"FP8": "modelopt"}.get(quantization["quant_algo"], "modelopt_fp4")
    kind = get_quantization_config(name)
    assert kind.__name__.startswith("Moeq")
    config = kind.from_config(quantization)
    config.packed_modules_mapping = {}
    return model, config


def layer_of(
    model: dict[str, Any], config: Any, division: tuple[int, int, str], rank: int, dp: int = 1, **changes: Any
) -> Any:
    """A RoutedExperts without weights.

    division: as in DIVISIONS. dp: over how many ranks the tokens are divided. changes: of its FusedMoEConfig.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    tp, ep, placement = division
    parallel = FusedMoEParallelConfig(
        tp_size=tp,
        pcp_size=1,
        dp_size=dp,
        ep_size=ep,
        tp_rank=rank if tp > 1 else 0,
        pcp_rank=0,
        dp_rank=rank if dp > 1 else 0,
        ep_rank=rank if ep > 1 else 0,
        sp_size=1,
        use_ep=ep > 1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    experts = next(model[key] for key in ("num_local_experts", "n_routed_experts") if model.get(key))
    inter = model["moe_intermediate_size"]
    manager = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=2,
        global_num_experts=experts,
        num_redundant_experts=0,
        # Round robin is for grouped routing.
        num_expert_group=2 if placement == "round_robin" else None,
        moe_parallel_config=parallel,
        placement_strategy=placement,
        enable_eplb=False,
    )
    moe_config = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=2,
        hidden_dim=model["hidden_size"],
        intermediate_size=inter,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=experts,
        activation=changes.pop("activation", MoEActivation.SILU),
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        **changes,
    )
    if moe_config.intermediate_size_per_partition < 0:
        moe_config.intermediate_size_per_partition = inter // tp
    return RoutedExperts(
        layer_name=NAME,
        params_dtype=torch.bfloat16,
        moe_config=moe_config,
        quant_config=config,
        expert_map_manager=manager,
    )


def load(layer: Any, fixture: str) -> None:
    """Every expert tensor of a layer through vLLM's weight loader."""
    stored: dict[str, Tensor] = {}
    for file in FIXTURES.joinpath(fixture).glob("model*.safetensors"):
        stored |= load_file(file)
    mark = f".layers.{LAYER.get(fixture, 0)}.mlp.experts."
    shards = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
    for name, tensor in stored.items():
        if mark not in name:
            continue
        expert, projection, part = name.split(mark)[1].split(".")
        matrix, shard = shards[projection]
        full = f"{matrix}_{part}"
        layer.weight_loader(getattr(layer, full), tensor, f"{NAME}.{full}", shard, int(expert), return_success=False)
    layer.quant_method.process_weights_after_loading(layer)


def routing_of(experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(9)]).to(torch.int32)
    return ids, torch.rand(9, 2, generator=generator)


def whole(fixture: str, x: Tensor, ids: Tensor, weights: Tensor, act_format: str) -> Tensor:
    """The undivided layer by load_experts and the reference backend."""
    raw = moe.load_experts(FIXTURES / fixture, layer=LAYER.get(fixture, 0))
    return moe.fused_moe_routed(x, ids, weights, moe.prepare(raw, backend="reference", act_format=act_format))
