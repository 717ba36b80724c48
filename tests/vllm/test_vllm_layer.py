"""vLLM's own RoutedExperts with the plug-in's method: its weight loader fills one rank's share, `apply` runs it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints_support import FIXTURES
from safetensors.torch import load_file
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.vllm import log, registration, settings

SPEC = importlib.util.find_spec("vllm")
INSTALLED = SPEC is not None and SPEC.origin is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="vllm is not installed (`make test-vllm` installs it)")

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
def _vllm() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def _config(fixture: str) -> tuple[dict[str, Any], Any]:
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


def _layer(model: dict[str, Any], config: Any, division: tuple[int, int, str], rank: int, **changes: Any) -> Any:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    tp, ep, placement = division
    parallel = FusedMoEParallelConfig(
        tp_size=tp,
        pcp_size=1,
        dp_size=1,
        ep_size=ep,
        tp_rank=rank if tp > 1 else 0,
        pcp_rank=0,
        dp_rank=0,
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


def _load(layer: Any, fixture: str) -> None:
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


def _routing(experts: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(9)]).to(torch.int32)
    return ids, torch.rand(9, 2, generator=generator)


def _whole(fixture: str, x: Tensor, ids: Tensor, weights: Tensor, act_format: str) -> Tensor:
    """The undivided layer by load_experts and the reference backend."""
    raw = moe.load_experts(FIXTURES / fixture, layer=LAYER.get(fixture, 0))
    return moe.fused_moe_routed(x, ids, weights, moe.prepare(raw, backend="reference", act_format=act_format))


@pytest.mark.parametrize("division", DIVISIONS, ids=lambda d: f"tp{d[0]}-ep{d[1]}-{d[2]}")
@pytest.mark.parametrize("case", FIXTURE_OF)
def test_the_ranks_shares_add_up_to_the_layer(case: str, division: tuple[int, int, str]) -> None:
    fixture = FIXTURE_OF[case]
    model, config = _config(fixture)
    per_rank, unit = model["moe_intermediate_size"] // division[0], UNITS[case]
    if division[0] > 1 and per_rank % unit:
        pytest.skip(f"{per_rank} of the intermediate size on a rank is no multiple of {unit}")
    x = torch.randn(9, model["hidden_size"], generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    total = torch.zeros(9, model["hidden_size"])
    with _vllm():
        for rank in range(division[0] * division[1]):
            layer = _layer(model, config, division, rank)
            assert type(layer.quant_method).__name__.endswith("MoeqMethod")
            assert layer.quant_method.plan.maps_ids == (division[2] == "round_robin")
            _load(layer, fixture)
            assert not list(layer.parameters()), "what was loaded must be freed"
            ids, weights = _routing(layer.global_num_experts)
            total += layer.forward_modular(x, weights, ids).float()
    expected = _whole(fixture, x, ids, weights, "none").float()
    assert (total - expected).norm() <= 6e-3 * expected.norm()


def test_the_checkpoints_activation_format_is_run_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ACT_FORMAT, "checkpoint")
    fixture = FIXTURE_OF["nvfp4"]
    model, config = _config(fixture)
    x = torch.randn(9, model["hidden_size"], generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    with _vllm():
        layer = _layer(model, config, (1, 1, "linear"), 0)
        _load(layer, fixture)
        ids, weights = _routing(layer.global_num_experts)
        found = layer.forward_modular(x, weights, ids).float()
    expected = _whole(fixture, x, ids, weights, "nvfp4").float()
    assert layer.quant_method.plan.act_format == "nvfp4"
    assert (found - expected).norm() <= 6e-3 * expected.norm()


def test_a_layer_that_does_not_run_here_gets_vllms_method(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 experts: vLLM is asked for its method, after one line that says why, however many layers there are."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    log._said.clear()
    fixture = "qwen3_moe_ct_int8"
    model, config = _config(fixture)
    # Its own for int8 runs on some CPUs only.
    own = lambda self, layer, prefix: UnquantizedFusedMoEMethod(layer.moe_config)  # noqa: E731
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", own)
    logger = logging.getLogger("vllm.torch_moe_ops")
    logger.addHandler(caplog.handler)
    try:
        with _vllm(), caplog.at_level(logging.INFO, logger=logger.name):
            methods = [_layer(model, config, (1, 1, "linear"), 0).quant_method for _ in range(2)]
    finally:
        logger.removeHandler(caplog.handler)
    assert [type(m) for m in methods] == [UnquantizedFusedMoEMethod] * 2
    lines = list(dict.fromkeys(r.getMessage() for r in caplog.records if r.name == logger.name))
    assert len(lines) == 1
    assert lines[0].startswith("torch_moe_ops: left to vLLM: format must be one of")
    assert lines[0].endswith(f"got int-quantized (first in {NAME})")


def test_experts_that_are_not_quantized_get_vllms_method() -> None:
    model, config = _config("qwen3_moe_modelopt_nvfp4")
    config.exclude_modules = ["*experts*"]
    with _vllm():
        assert type(_layer(model, config, (1, 1, "linear"), 0).quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_compiled_graphs_are_kept_by_who_runs_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM traces into the experts, and finds the graph of an earlier run by its config's hash."""
    from vllm.config import VllmConfig, set_current_vllm_config

    model, config = _config("qwen3_moe_modelopt_nvfp4")
    hashes = []
    for act_format in ("none", "none", "checkpoint"):
        monkeypatch.setenv(settings.ACT_FORMAT, act_format)
        vllm_config = VllmConfig()
        before = vllm_config.compute_hash()
        with set_current_vllm_config(vllm_config):
            _layer(model, config, (1, 1, "linear"), 0)
        hashes.append(vllm_config.compute_hash())
        assert before not in hashes
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("case", FIXTURE_OF)
def test_layers_that_are_filled_instead_of_loaded_run(case: str) -> None:
    """load_format="dummy": random numbers, which would be no scales."""
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    model, config = _config(FIXTURE_OF[case])
    with _vllm():
        layer = _layer(model, config, (1, 1, "linear"), 0)
        for parameter in layer.parameters():
            initialize_single_dummy_weight(parameter)
        layer.quant_method.process_weights_after_loading(layer)
        ids, weights = _routing(layer.global_num_experts)
        found = layer.forward_modular(torch.ones(9, model["hidden_size"], dtype=torch.bfloat16), weights, ids)
    assert found.isfinite().all()


def test_gate_and_up_keep_their_calibrated_scales_apart() -> None:
    """vLLM's loader does so for methods with "ModelOpt" in their name alone; else the second one takes the whole row."""
    model, config = _config("qwen3_moe_modelopt_nvfp4")
    with _vllm():
        layer = _layer(model, config, (1, 1, "linear"), 0)
    for shard, value in (("w1", 0.5), ("w3", 0.25)):
        name = f"{NAME}.w13_input_scale"
        layer.weight_loader(layer.w13_input_scale, torch.tensor(value), name, shard, 1, return_success=False)
    assert layer.w13_input_scale[1].tolist() == [0.5, 0.25]
    assert layer.w13_input_scale[0].isnan().all()


def test_mixed_precision_asks_for_each_layer() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    model, _ = _config("qwen3_moe_modelopt_nvfp4")
    algorithms = {f"{NAME}.{e}.{p}_proj": {"quant_algo": "NVFP4"} for e in range(8) for p in ("gate", "up", "down")}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms, "ignore": []}
    config = get_quantization_config("modelopt_mixed").from_config(mixed)
    config.packed_modules_mapping = {}
    with _vllm():
        layer = _layer(model, config, (1, 1, "linear"), 0)
        assert type(layer.quant_method).__name__ == "ModelOptMoeqMethod"
        assert layer.quant_method.plan.format.name == "ModelOpt NVFP4"


def test_every_config_is_ours_and_still_vllms() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    registration.register()
    from torch_moe_ops.vllm.configs import CONFIGS

    for name, (base, _) in CONFIGS.items():
        found = get_quantization_config(name)
        assert issubclass(found, base)
        assert found.get_quant_method is not base.get_quant_method


def test_vllm_calls_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.plugins

    monkeypatch.setenv("VLLM_PLUGINS", "moeq")
    found = vllm.plugins.load_plugins_by_group("vllm.general_plugins")
    assert found == {"moeq": registration.register}, "torch_moe_ops must be installed beside vllm, not on a path alone"
