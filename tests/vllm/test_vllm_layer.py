"""vLLM's own RoutedExperts with the plug-in's method: its weight loader fills one rank's share, `apply` runs it."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
from vllm_layers import DIVISIONS, FIXTURE_OF, NAME, UNITS, config_of, in_vllm, layer_of, load, routing_of, whole
from vllm_runs import INSTALLED, NOT_INSTALLED

from torch_moe_ops.vllm import log, registration, settings

pytestmark = pytest.mark.skipif(not INSTALLED, reason=NOT_INSTALLED)


@pytest.mark.parametrize("division", DIVISIONS, ids=lambda d: f"tp{d[0]}-ep{d[1]}-{d[2]}")
@pytest.mark.parametrize("case", FIXTURE_OF)
def test_the_ranks_shares_add_up_to_the_layer(case: str, division: tuple[int, int, str]) -> None:
    fixture = FIXTURE_OF[case]
    model, config = config_of(fixture)
    per_rank, unit = model["moe_intermediate_size"] // division[0], UNITS[case]
    if division[0] > 1 and per_rank % unit:
        pytest.skip(f"{per_rank} of the intermediate size on a rank is no multiple of {unit}")
    x = torch.randn(9, model["hidden_size"], generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    total = torch.zeros(9, model["hidden_size"])
    with in_vllm():
        for rank in range(division[0] * division[1]):
            layer = layer_of(model, config, division, rank)
            assert type(layer.quant_method).__name__.endswith("MoeqMethod")
            assert layer.quant_method.plan.maps_ids == (division[2] == "round_robin")
            load(layer, fixture)
            assert not list(layer.parameters()), "what was loaded must be freed"
            ids, weights = routing_of(layer.global_num_experts)
            total += layer.forward_modular(x, weights, ids).float()
    expected = whole(fixture, x, ids, weights, "none").float()
    assert (total - expected).norm() <= 6e-3 * expected.norm()


def test_the_checkpoints_activation_format_is_run_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ACT_FORMAT, "checkpoint")
    fixture = FIXTURE_OF["nvfp4"]
    model, config = config_of(fixture)
    x = torch.randn(9, model["hidden_size"], generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    with in_vllm():
        layer = layer_of(model, config, (1, 1, "linear"), 0)
        load(layer, fixture)
        ids, weights = routing_of(layer.global_num_experts)
        found = layer.forward_modular(x, weights, ids).float()
    expected = whole(fixture, x, ids, weights, "nvfp4").float()
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
    model, config = config_of(fixture)
    # Its own for int8 runs on some CPUs only.
    own = lambda self, layer, prefix: UnquantizedFusedMoEMethod(layer.moe_config)  # noqa: E731
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", own)
    logger = logging.getLogger("vllm.torch_moe_ops")
    logger.addHandler(caplog.handler)
    try:
        with in_vllm(), caplog.at_level(logging.INFO, logger=logger.name):
            methods = [layer_of(model, config, (1, 1, "linear"), 0).quant_method for _ in range(2)]
    finally:
        logger.removeHandler(caplog.handler)
    assert [type(m) for m in methods] == [UnquantizedFusedMoEMethod] * 2
    lines = list(dict.fromkeys(r.getMessage() for r in caplog.records if r.name == logger.name))
    assert len(lines) == 1
    assert lines[0].startswith("torch_moe_ops: left to vLLM: format must be one of")
    assert lines[0].endswith(f"got int-quantized (first in {NAME})")


def test_experts_that_are_not_quantized_get_vllms_method() -> None:
    model, config = config_of("qwen3_moe_modelopt_nvfp4")
    config.exclude_modules = ["*experts*"]
    with in_vllm():
        assert type(layer_of(model, config, (1, 1, "linear"), 0).quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_compiled_graphs_are_kept_by_who_runs_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM traces into the experts, and finds the graph of an earlier run by its config's hash."""
    from vllm.config import VllmConfig, set_current_vllm_config

    model, config = config_of("qwen3_moe_modelopt_nvfp4")
    hashes = []
    for act_format in ("none", "none", "checkpoint"):
        monkeypatch.setenv(settings.ACT_FORMAT, act_format)
        vllm_config = VllmConfig()
        before = vllm_config.compute_hash()
        with set_current_vllm_config(vllm_config):
            layer_of(model, config, (1, 1, "linear"), 0)
        hashes.append(vllm_config.compute_hash())
        assert before not in hashes
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("case", FIXTURE_OF)
def test_layers_that_are_filled_instead_of_loaded_run(case: str) -> None:
    """load_format="dummy": random numbers, which would be no scales."""
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    model, config = config_of(FIXTURE_OF[case])
    with in_vllm():
        layer = layer_of(model, config, (1, 1, "linear"), 0)
        for parameter in layer.parameters():
            initialize_single_dummy_weight(parameter)
        layer.quant_method.process_weights_after_loading(layer)
        ids, weights = routing_of(layer.global_num_experts)
        found = layer.forward_modular(torch.ones(9, model["hidden_size"], dtype=torch.bfloat16), weights, ids)
    assert found.isfinite().all()


def test_gate_and_up_keep_their_calibrated_scales_apart() -> None:
    """vLLM's loader does so for methods with "ModelOpt" in their name alone; else the second one takes the whole row."""
    model, config = config_of("qwen3_moe_modelopt_nvfp4")
    with in_vllm():
        layer = layer_of(model, config, (1, 1, "linear"), 0)
    for shard, value in (("w1", 0.5), ("w3", 0.25)):
        name = f"{NAME}.w13_input_scale"
        layer.weight_loader(layer.w13_input_scale, torch.tensor(value), name, shard, 1, return_success=False)
    assert layer.w13_input_scale[1].tolist() == [0.5, 0.25]
    assert layer.w13_input_scale[0].isnan().all()


def test_mixed_precision_asks_for_each_layer() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    model, _ = config_of("qwen3_moe_modelopt_nvfp4")
    algorithms = {f"{NAME}.{e}.{p}_proj": {"quant_algo": "NVFP4"} for e in range(8) for p in ("gate", "up", "down")}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": algorithms, "ignore": []}
    config = get_quantization_config("modelopt_mixed").from_config(mixed)
    config.packed_modules_mapping = {}
    with in_vllm():
        layer = layer_of(model, config, (1, 1, "linear"), 0)
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


@pytest.mark.parametrize("case", FIXTURE_OF)
def test_configs_reach_worker_processes(case: str) -> None:
    """vLLM pickles them."""
    _, config = config_of(FIXTURE_OF[case])
    again = pickle.loads(pickle.dumps(config))
    assert type(again) is type(config)
    assert vars(again).keys() == vars(config).keys()


def test_vllm_calls_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.plugins

    monkeypatch.setenv("VLLM_PLUGINS", "moeq")
    found = vllm.plugins.load_plugins_by_group("vllm.general_plugins")
    assert found == {"moeq": registration.register}, "torch_moe_ops must be installed beside vllm, not on a path alone"
