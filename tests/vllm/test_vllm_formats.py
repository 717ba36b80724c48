"""The plug-in's formats: what vLLM's loader would put into a layer means what load_experts reads from the same file."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from checkpoints_support import FIXTURES
from paths import ROOT
from safetensors.torch import load_file
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.vllm import formats, log, registration, settings
from torch_moe_ops.vllm import plan as planning
from torch_moe_ops.vllm.activation import activation_of
from torch_moe_ops.vllm.formats import ExpertFormat
from torch_moe_ops.vllm.parameters import LayerSizes
from torch_moe_ops.vllm.placement import first_of_range, places_of
from torch_moe_ops.vllm.plan import plan_layer

CPU = torch.device("cpu")
NVFP4 = formats.nvfp4_modelopt("nvfp4")
CASES: dict[str, ExpertFormat] = {
    "mixtral_modelopt_nvfp4": formats.nvfp4_modelopt("nvfp4"),
    "qwen3_moe_modelopt_nvfp4_w4a16": formats.nvfp4_modelopt("none"),
    "nemotron_h_modelopt_nvfp4": formats.nvfp4_modelopt("nvfp4"),
    "qwen3_moe_ct_nvfp4": formats.nvfp4_compressed_tensors("nvfp4"),
    "qwen3_moe_ct_mxfp4": formats.mxfp4("compressed-tensors MXFP4", weight="weight_packed"),
    "gpt_oss_mxfp4": formats.mxfp4("gpt-oss MXFP4", interleaved=True),
    "qwen3_moe_ct_int4_g32": formats.int4_compressed_tensors(32, True, torch.bfloat16),
    "qwen3_moe_ct_fp8_channel": formats.fp8("compressed-tensors FP8", "channel", static=False),
    "qwen3_moe_modelopt_fp8": formats.fp8("ModelOpt FP8", "tensor", static=True, loader="modelopt"),
    "qwen3_moe_fp8_block": formats.fp8("FP8 128x128", "block", static=False, scale="weight_scale_inv"),
}
MATRICES = {"w1": ("gate_proj", "w1"), "w2": ("down_proj", "w2"), "w3": ("up_proj", "w3")}


def _fill(format: ExpertFormat, sizes: LayerSizes, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The format's tensors, filled from a file's as vLLM's loader does: gate and up rows one after the other."""
    filled = {name: p.empty() for name, p in format.parameters(sizes).items()}
    for name, tensor in filled.items():
        matrix, _, part = name.partition("_")
        shards = ("w2",) if matrix == "w2" else ("w1", "w3") if sizes.halves == 2 else ("w3",)
        for expert in range(sizes.experts):
            for i, shard in enumerate(shards):
                ends = [f".experts.{expert}.{m}.{part}" for m in MATRICES[shard]]
                found = [t for key, t in stored.items() if key.endswith(tuple(ends))]
                if not found:
                    continue
                place = tensor[expert]
                if len(shards) == 2 and place.ndim:
                    place = place.chunk(2)[i] if part != "weight_shape" else place
                place.copy_(found[0].reshape(place.shape))
    return filled


def _fused(filled: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """gpt-oss: all experts in one tensor."""
    names = {"w13": "gate_up_proj", "w2": "down_proj"}
    parts = {"weight": "_blocks", "weight_scale": "_scales", "bias": "_bias"}
    for name, tensor in filled.items():
        matrix, _, part = name.partition("_")
        found = next(t for key, t in stored.items() if key.endswith(names[matrix] + parts[part]))
        tensor.copy_(found.reshape(tensor.shape))


def _loaded(case: str) -> tuple[dict[str, Tensor], moe.RawWeights]:
    layer = 1 if case.startswith("nemotron") else 0
    expected = moe.load_experts(FIXTURES / case, layer=layer)
    stored: dict[str, Tensor] = {}
    for file in FIXTURES.joinpath(case).glob("model*.safetensors"):
        stored |= {k: v for k, v in load_file(file).items() if f"layers.{layer}." in k and ".experts." in k}
    sizes = LayerSizes(
        experts=expected.num_experts,
        hidden=expected.hidden_size,
        intermediate=expected.intermediate_size,
        halves=2 if expected.is_gated else 1,
        has_bias=expected.w13_bias is not None,
        dtype=torch.bfloat16,
    )
    format = CASES[case]
    filled = _fill(format, sizes, stored)
    if format.interleaved:
        _fused(filled, stored)
    return filled, expected


@pytest.mark.parametrize("case", CASES)
def test_a_format_means_what_load_experts_reads(case: str) -> None:
    filled, expected = _loaded(case)
    found = CASES[case].raw(filled, CASES[case].act_format, "here")
    assert found.scheme == expected.scheme
    theirs, ours = expected.tensors(), found.tensors()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name.endswith("_input_scale"):
            value = value.expand_as(ours[name])
        assert torch.equal(ours[name].view(torch.uint8), value.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("case", CASES)
def test_shapes_alone_pose_the_same_problem(case: str) -> None:
    filled, _ = _loaded(case)
    format = CASES[case]
    meta = {name: t.to("meta") for name, t in filled.items()}
    act = format.act_format
    posed = moe.explain(format.raw(meta, act, ""), act_format=act, device="cpu").problem
    assert posed == moe.explain(format.raw(filled, act, ""), act_format=act, device="cpu").problem


def test_calibrated_scales_that_the_file_lacks_stay_away() -> None:
    filled, _ = _loaded("qwen3_moe_modelopt_nvfp4_w4a16")
    assert filled["w13_input_scale"].isnan().all()
    assert formats.nvfp4_modelopt("nvfp4").raw(filled, "nvfp4", "").a13_input_scale is None


def test_gate_and_up_share_the_larger_input_scale() -> None:
    filled, _ = _loaded("mixtral_modelopt_nvfp4")
    filled["w13_input_scale"].copy_(torch.tensor([[1.0, 2.0], [4.0, 3.0], [5.0, 5.0], [6.0, 7.0]]))
    assert NVFP4.raw(filled, "nvfp4", "").a13_input_scale.tolist() == [2.0, 4.0, 5.0, 7.0]


def _layer(**changes: Any) -> Any:
    """What plan_layer reads of vLLM's RoutedExperts."""
    parallel = Namespace(
        tp_size=1, enable_eplb=False, use_all2all_kernels=False, all2all_backend="", dp_size=1, use_ep=False
    )
    config = Namespace(
        num_experts=8,
        num_local_experts=8,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size_per_partition=96,
        is_act_and_mul=True,
        has_bias=False,
        is_lora_enabled=False,
        moe_backend="auto",
        in_dtype=torch.bfloat16,
        moe_parallel_config=parallel,
    )
    for name in set(changes) & (set(vars(config)) | set(vars(parallel))):
        setattr(config if name in vars(config) else parallel, name, changes.pop(name))
    values = {
        "params_dtype": torch.bfloat16,
        "activation": Namespace(value="silu"),
        "apply_router_weight_on_input": False,
    }
    values |= {"_expert_map": None, "expert_map_manager": Namespace(num_fused_shared_experts=0), "swiglu_limit": None}
    return Namespace(moe_config=config, **{**values, **changes})


def test_a_plan_is_weight_only_where_nothing_multiplies_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_layer(_layer(), NVFP4, CPU)
    assert (plan.backend, plan.act_format, plan.maps_ids) == ("cpu", "none", False)
    monkeypatch.setenv(settings.ACT_FORMAT, "checkpoint")
    assert plan_layer(_layer(), NVFP4, CPU).act_format == "nvfp4"


def test_a_plan_has_the_accuracy_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_layer(_layer(), NVFP4, CPU).options["accuracy"] == "standard"
    monkeypatch.setenv(settings.ACCURACY, "Strict")
    assert plan_layer(_layer(), NVFP4, CPU).options["accuracy"] == "strict"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"moe_backend": "marlin"}, "moe_backend must be 'auto', got 'marlin'"),
        ({"enable_eplb": True}, "EPLB"),
        (
            {"use_all2all_kernels": True, "all2all_backend": "deepep_low_latency"},
            "all2all_backend must be one of ['allgather_reducescatter'], got 'deepep_low_latency'",
        ),
        ({"dp_size": 2, "all2all_backend": "mori_low_latency"}, "all2all_backend must be one of"),
        ({"expert_map_manager": Namespace(num_fused_shared_experts=1)}, "shared experts must not be fused"),
        ({"activation": Namespace(value="gelu_tanh_no_mul")}, "activation must be one of"),
        ({"activation": Namespace(value="swigluoai")}, "gates before ups"),
        ({"activation": Namespace(value="swigluoai_uninterleave")}, "swiglu_limit must be a number"),
        ({"intermediate_size_per_partition": 40}, "multiple of 16"),
        ({"intermediate_size_per_partition": 40, "tp_size": 2}, "a rank's intermediate size must be a multiple of 16"),
        ({"has_bias": True, "tp_size": 2}, "tensor parallelism must be off for experts with biases"),
        ({"in_dtype": torch.float64}, "hidden states must be one of"),
        ({"apply_router_weight_on_input": True}, "top_k must be 1"),
    ],
)
def test_what_does_not_run_here_says_why(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as raised:
        plan_layer(_layer(**changes), NVFP4, CPU)
    assert reason in str(raised.value)


def test_adapters_that_vllm_divides_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = Namespace(fully_sharded_loras=False)
    monkeypatch.setattr(planning, "_lora_config", lambda: lora)
    assert plan_layer(_layer(is_lora_enabled=True), NVFP4, CPU).backend == "cpu"
    lora.fully_sharded_loras = True
    with pytest.raises(ValueError, match="fully_sharded_loras must be off"):
        plan_layer(_layer(is_lora_enabled=True), NVFP4, CPU)


def test_ranks_that_exchange_tokens_have_a_kernel_of_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plan_layer(_layer(), NVFP4, CPU).exchanges
    alone = plan_layer(_layer(apply_router_weight_on_input=True, experts_per_token=1), NVFP4, CPU)
    assert alone.options["router_weight_on_input"]
    changes = {"dp_size": 2, "all2all_backend": "allgather_reducescatter", "apply_router_weight_on_input": True}
    plan = plan_layer(_layer(**changes, experts_per_token=1), NVFP4, CPU)
    assert plan.exchanges
    assert not plan.options["router_weight_on_input"], "who sends a token multiplies it"
    untested = _layer(use_all2all_kernels=True, all2all_backend="deepep_high_throughput")
    monkeypatch.setenv(settings.ALL2ALL, "any")
    assert plan_layer(untested, NVFP4, CPU).exchanges
    monkeypatch.setenv(settings.ALL2ALL, "none")
    with pytest.raises(ValueError, match=r"MOEQ_VLLM_ALL2ALL must be one of \['tested', 'any'\], got 'none'"):
        plan_layer(untested, NVFP4, CPU)


def test_the_slow_reference_is_no_reason_to_take_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_moe_ops.backends import BACKENDS

    real = type(BACKENDS["cpu"]).reasons
    patched = lambda self, problem: ["must be built"] if self.name == "cpu" else real(self, problem)  # noqa: E731
    monkeypatch.setattr(type(BACKENDS["cpu"]), "reasons", patched)
    with pytest.raises(ValueError, match=r"besides the slow `reference`.*cpu: must be built"):
        plan_layer(_layer(), NVFP4, CPU)
    monkeypatch.setenv("MOEQ_BACKEND", "reference")
    assert plan_layer(_layer(), NVFP4, CPU).backend == "reference"


def test_expert_maps_that_are_ranges_become_offsets() -> None:
    ranged = torch.tensor([-1, -1, 0, 1, 2, -1])
    scattered = torch.tensor([-1, 0, -1, 1, -1, 2])
    swapped = torch.tensor([-1, 1, 0, -1])
    assert [first_of_range(m) for m in (None, ranged, scattered, swapped)] == [0, 2, None, None]
    plan = plan_layer(_layer(_expert_map=ranged, num_experts=6, num_local_experts=3), NVFP4, CPU)
    assert not plan.maps_ids
    assert (plan.options["num_experts"], plan.options["local_expert_offset"]) == (6, 2)
    assert plan_layer(_layer(_expert_map=scattered, num_experts=6, num_local_experts=3), NVFP4, CPU).maps_ids
    ids = torch.tensor([[2, 1], [0, -1]], dtype=torch.int32)
    assert places_of(ids, torch.tensor([0, -1, 1])).tolist() == [[1, -1], [0, -1]]
    assert places_of(ids, torch.tensor([0, -1, 1])).dtype == torch.int32


def test_activations_have_vllms_constants() -> None:
    limited = _layer(swiglu_limit=10.0)
    assert activation_of(limited) == {"activation": "silu", "swiglu_limit": 10.0}
    packed = _layer(activation=Namespace(value="swigluoai_uninterleave"), swiglu_limit=7.0, swiglu_alpha=1.702)
    assert activation_of(packed) == {
        "activation": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_beta": 0.0,
        "swiglu_limit": 7.0,
    }


@pytest.mark.parametrize(
    "version, insist, off",
    [
        ("0.26.0", False, False),
        ("0.33.1.post2", False, False),
        ("0.25.9", True, True),
        ("0.34.0", False, True),
        ("0.34.0", True, False),
        ("1.0.0", False, True),
        ("dev", False, True),
    ],
)
def test_releases(version: str, insist: bool, off: bool) -> None:
    assert bool(registration._release_reason(version, insist)) == off


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SWITCH, "0")
    monkeypatch.setattr(registration, "_version", lambda: pytest.fail("asked for vLLM"))
    registration.register()
    monkeypatch.setenv(settings.SWITCH, "maybe")
    with pytest.raises(ValueError, match="MOEQ_VLLM must be one of"):
        registration.register()
    monkeypatch.setenv(settings.SWITCH, "")
    monkeypatch.setenv(settings.ACT_FORMAT, "w4a4")
    with pytest.raises(ValueError, match="MOEQ_VLLM_ACT_FORMAT must be one of"):
        registration.register()
    monkeypatch.setenv(settings.ACT_FORMAT, "")
    monkeypatch.setenv(settings.ACCURACY, "exact")
    with pytest.raises(ValueError, match=r"MOEQ_VLLM_ACCURACY must be one of \['standard', 'strict'\], got 'exact'"):
        registration.register()


def test_importing_the_plug_in_imports_nothing_of_vllm() -> None:
    code = "import sys, torch_moe_ops.vllm; sys.exit(any(n.split('.')[0] == 'vllm' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_entry_point_is_there() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"moeq": "torch_moe_ops.vllm:register"}


def test_say_once_counts_what_is_said_and_not_of_whom() -> None:
    lines: list[tuple[Any, ...]] = []
    log._said.clear()
    for name in ("layers.0", "layers.1"):
        log.say_once(lambda *args: lines.append(args), "%s first in %s", "why", name)
    log.say_once(lambda *args: lines.append(args), "%s first in %s", "another", "layers.1")
    assert lines == [("%s first in %s", "why", "layers.0"), ("%s first in %s", "another", "layers.1")]
