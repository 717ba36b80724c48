"""save_pretrained of models with packed experts: what third-party tools wrote, what they read, and what comes back."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from safetensors import safe_open
from tolerances import F32, relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.same_bits import same_bits

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from quantized_models import ARCHITECTURES, tiny_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
# Written in the format in which they were read; the others are in another one, of the same meaning.
SAME_FORMAT = [
    "qwen3_moe_modelopt_nvfp4",
    "qwen3_moe_modelopt_nvfp4_w4a16",
    "mixtral_modelopt_nvfp4",
    "deepseek_v3_modelopt_nvfp4",
    "gpt_oss_modelopt_nvfp4",
    "nemotron_h_modelopt_nvfp4",
    "qwen3_moe_modelopt_fp8",
    "gpt_oss_mxfp4",
    "qwen3_moe_ct_int4_g32",
    "qwen3_moe_ct_int8",
    "qwen3_moe_ct_mxfp4",
]
OTHER_FORMAT = ["qwen3_moe_ct_nvfp4", "qwen3_moe_ct_fp8_channel", "qwen3_moe_fp8_block"]


def load(folder: Path | str, **options: Any) -> Any:
    moeq_transformers.register(act_format="none")
    return transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / folder, **{"dtype": torch.float32, **options}
    )


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def layers(model: Any) -> list[moe.RawWeights]:
    """The experts of each layer, with a scale_2 for gate and one for up as files of single experts have it."""
    raws = [moe.restore(found.module.moeq_weights.prepared) for found in find_experts(model)]
    halves = {True: 2, False: 1}
    return [
        dataclasses.replace(
            raw,
            source="",
            w13_scale_2=None if raw.w13_scale_2 is None else raw.w13_scale_2.expand(-1, halves[raw.is_gated]),
        )
        for raw in raws
    ]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as stream:
            found |= {name: stream.get_tensor(name) for name in list(stream.keys())}
    return found


def check_comes_back(model: Any, folder: Path) -> None:
    again = load(folder)
    assert all(here.equal(there) for here, there in zip(layers(again), layers(model), strict=True))
    # Mapped from a file, weights lie at addresses at which torch's own linears may add in another order.
    for parameter in again.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", SAME_FORMAT + OTHER_FORMAT)
def test_checkpoints_of_other_tools_come_back(name: str, tmp_path: Path) -> None:
    model = load(name)
    before = copy.deepcopy(model.config.to_dict())
    model.save_pretrained(tmp_path)
    assert model.config.to_dict() == before
    check_comes_back(model, tmp_path)


@pytest.mark.parametrize("name", SAME_FORMAT)
def test_experts_are_written_as_the_tools_wrote_them(name: str, tmp_path: Path) -> None:
    model = load(name)
    model.save_pretrained(tmp_path)
    ours, theirs = tensors_of(tmp_path), tensors_of(CHECKPOINTS / name)
    experts = {key for key in theirs if ".experts." in key}
    assert experts and experts == {key for key in ours if ".experts." in key}
    for key in sorted(experts):
        assert ours[key].dtype == theirs[key].dtype, key
        assert same_bits(ours[key], theirs[key]), key
    mine, its = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, CHECKPOINTS / name))
    said, wanted = mine["quantization_config"], its["quantization_config"]
    for key in ("quant_method", "quant_algo", "format"):
        assert said.get(key) == wanted.get(key), key
    groups = [config.get("config_groups", {}).get("group_0", {}) for config in (said, wanted)]
    for part in ("weights", "input_activations"):
        here, there = (group.get(part) or {} for group in groups)
        assert {k: v for k, v in here.items() if v is not None} == {k: v for k, v in there.items() if v is not None}
    assert (tmp_path / "hf_quant_config.json").exists() == (CHECKPOINTS / name / "hf_quant_config.json").exists()


def test_everything_that_is_not_quantized_is_named(tmp_path: Path) -> None:
    """Attention was quantized in the file that was read; in the model it is not."""
    load("qwen3_moe_modelopt_nvfp4").save_pretrained(tmp_path)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    stored = tensors_of(tmp_path)
    quantized = {name.rpartition(".")[0] for name in stored if name.endswith("weight_scale")}
    linears = {name.removesuffix(".weight") for name, t in stored.items() if name.endswith(".weight") and t.ndim == 2}
    assert set(ignored) == linears - quantized
    assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate"} <= set(ignored)
    older = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert older["producer"]["name"] == "modelopt"
    assert older["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "exclude_modules": ignored,
        "group_size": 16,
    }


# Their files keep experts in one tensor: the tools that quantize them write them one by one.
SPLIT = {"granitemoe": "block_sparse_moe", "llama4_text": "feed_forward"}


@pytest.mark.parametrize("scheme", ["nvfp4", "int8", "mxfp4", "none"])
@pytest.mark.parametrize("architecture", SPLIT)
def test_quantized_experts_are_written_one_by_one(architecture: str, scheme: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    want = logits(model)
    names = set(model.state_dict())
    moeq_transformers.quantize_model(model, scheme)
    model.save_pretrained(tmp_path)
    if scheme == "none":
        plain = load(tmp_path)
        assert set(plain.state_dict()) == names
        assert relative_l2(logits(plain), want) < F32
        return
    root = f"model.layers.0.{SPLIT[architecture]}.experts.0"
    modules = {name.rpartition(".")[0] for name in tensors_of(tmp_path) if name.startswith(f"{root}.")}
    assert modules == {f"{root}.{projection}_proj" for projection in ("gate", "up", "down")}
    check_comes_back(model, tmp_path)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in SPLIT])
def test_quantized_models_have_the_names_of_their_architecture(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path / "plain")
    moeq_transformers.quantize_model(model, "nvfp4")
    model.save_pretrained(tmp_path / "packed")
    plain, packed = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "packed")
    weights = {name for name in packed if name.endswith("weight") or ".experts." not in name}
    assert weights == set(plain)
    scales = {name.removesuffix("_scale_2") for name in packed if name.endswith("weight_scale_2")}
    assert scales == {name for name in plain if ".experts." in name and name.endswith("weight")}
    config, other = (json.loads((tmp_path / kind / "config.json").read_text()) for kind in ("plain", "packed"))
    assert other.pop("quantization_config")["quant_algo"] == "W4A16_NVFP4"
    assert other == config
    check_comes_back(model, tmp_path / "packed")


SCHEMES = ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_block", "int4", "mxint4", "int8", "none"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_comes_back(scheme: str, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    moeq_transformers.quantize_model(model, scheme)
    model.save_pretrained(tmp_path, max_shard_size="50kB")  # several files
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    if scheme != "none":
        return check_comes_back(model, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    plain = load(tmp_path)
    assert not hasattr(find_experts(plain)[0].module, "moeq_weights")
    assert relative_l2(logits(plain), logits(model)) < F32
    check_comes_back_unquantized(tmp_path, model)


def check_comes_back_unquantized(folder: Path, model: Any) -> None:
    again = load(folder, experts_implementation="moeq")
    assert all(here.equal(there) for here, there in zip(layers(again), layers(model), strict=True))


@pytest.mark.parametrize("scheme", ["mxfp4", "none"])
def test_fused_experts_come_back(scheme: str, tmp_path: Path) -> None:
    """gpt-oss: biases, transposed matrices, alternating rows."""
    model = load("gpt_oss_mxfp4", quantization_config=transformers.Mxfp4Config(dequantize=True))
    moeq_transformers.quantize_model(model, scheme)
    model.save_pretrained(tmp_path)
    if scheme == "none":
        check_comes_back_unquantized(tmp_path, model)
    else:
        check_comes_back(model, tmp_path)


def test_experts_quantized_while_loading_are_saved(tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path / "plain")
    moeq_transformers.register()
    config = moeq_transformers.MoeqConfig(scheme="mxfp8")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "packed")
    check_comes_back(model, tmp_path / "packed")


def test_attached_experts_are_saved(tmp_path: Path) -> None:
    """Into a model that another way of loading made: its own conversions give the names."""
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / "qwen3_moe_ct_mxfp4")
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    moeq_transformers.attach_experts(model, CHECKPOINTS / "qwen3_moe_ct_mxfp4", act_format="none")
    model.save_pretrained(tmp_path)
    check_comes_back(model, tmp_path)


def test_an_earlier_export_leaves_no_contradiction(tmp_path: Path) -> None:
    load("qwen3_moe_modelopt_nvfp4").save_pretrained(tmp_path)
    model = load("qwen3_moe_ct_int8")
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "hf_quant_config.json").exists()
    check_comes_back(model, tmp_path)


COMPRESSED = ["mxfp4", "fp8", "fp8_block", "int4", "mxint4", "int8"]


def _meaning(model: Any) -> list[tuple[Tensor, Tensor]]:
    return [moe.dequantize_experts(raw) for raw in layers(model)]


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("scheme", COMPRESSED)
def test_compressed_tensors_decompresses_what_is_written(scheme: str, zero_points: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = tiny_model("mixtral")
    moeq_transformers.quantize_model(model, scheme)
    if zero_points:
        if scheme not in ("int4", "int8"):
            return
        _give_zero_points(model)
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme_of_group = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    compressor: Any = BaseCompressor.get_value_from_registry(settings["format"])
    stored = tensors_of(tmp_path)
    for number, (w13, w2) in enumerate(_meaning(model)):
        for expert in range(w2.shape[0]):
            gate, up = w13[expert].chunk(2)
            for projection, wanted in (("w1", gate), ("w3", up), ("w2", w2[expert])):
                root = f"model.layers.{number}.block_sparse_moe.experts.{expert}.{projection}."
                parts = {name.removeprefix(root): t for name, t in stored.items() if name.startswith(root)}
                got = compressor.decompress(parts, scheme_of_group)["weight"]
                # bfloat16 scales are multiplied in bfloat16 there.
                assert relative_l2(got, wanted) < (4e-3 if got.dtype == torch.bfloat16 else 1e-6), root


def _give_zero_points(model: Any) -> None:
    for found in find_experts(model):
        raw = moe.restore(found.module.moeq_weights.prepared)
        middle, dtype = (8, torch.uint8) if raw.scheme == "int4" else (0, torch.int8)
        points = {}
        for name in ("w13", "w2"):
            shape = getattr(raw, f"{name}_scale").shape
            points[f"{name}_zero_point"] = (torch.randint(-3, 4, shape) + middle).to(dtype)
        found.module.moeq_weights.prepared = moe.prepare(dataclasses.replace(raw, **points), act_format="none")


@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_zero_points_come_back(scheme: str, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    moeq_transformers.quantize_model(model, scheme)
    _give_zero_points(model)
    model.save_pretrained(tmp_path)
    check_comes_back(model, tmp_path)


@pytest.mark.parametrize("scheme", ["mxfp4", "int4", "fp8"])
def test_transformers_reads_it_without_this_library(scheme: str, tmp_path: Path) -> None:
    """By its own quantizer, which unpacks the experts: the formats of which it does so rightly."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    model = tiny_model("mixtral")
    moeq_transformers.quantize_model(model, scheme)
    model.save_pretrained(tmp_path)
    theirs = load(tmp_path, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False))
    module = find_experts(theirs)[0].module
    assert module.gate_up_proj.is_floating_point() and not hasattr(module, "moeq_weights")
    assert relative_l2(logits(theirs), logits(model)) < 2e-2  # unpacked in bfloat16


def test_what_cannot_be_written_names_its_reason(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    moeq_transformers.quantize_model(model, "mxfp6_e3m2")
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts cannot be written: no format that other tools read"):
        model.save_pretrained(tmp_path / "mxfp6")
    model = load("gpt_oss_mxfp4", quantization_config=transformers.Mxfp4Config(dequantize=True))
    other = copy.deepcopy(model)
    moeq_transformers.quantize_model(model, "nvfp4")
    with pytest.raises(ValueError, match="fused layout has one weight_scale_2 for all experts of a layer, got"):
        model.save_pretrained(tmp_path / "nvfp4")
    moeq_transformers.quantize_model(other, "int8")
    with pytest.raises(ValueError, match="compressed-tensors int-quantized has no layout for experts that one tensor"):
        other.save_pretrained(tmp_path / "int8")
    assert not list(tmp_path.iterdir())


def test_models_that_hold_no_whole_checkpoint_are_refused(tmp_path: Path) -> None:
    model = load("qwen3_moe_modelopt_nvfp4")
    with pytest.raises(ValueError, match="state_dict must be None for a model with packed experts, got dict"):
        model.save_pretrained(tmp_path, state_dict={})
    with pytest.raises(ValueError, match=r"save_original_format must be True .* got False"):
        model.save_pretrained(tmp_path, save_original_format=False)
    first, second = (found.module.moeq_weights for found in find_experts(model))
    whole = second.prepared
    second.prepared = moe.prepare(moe.restore(whole), num_experts=2 * whole.num_experts)
    with pytest.raises(ValueError, match="must hold all 16 experts, got the 8 of one rank"):
        model.save_pretrained(tmp_path)
    w13, w2 = moe.dequantize_experts(moe.restore(whole))
    second.prepared = moe.prepare(moe.quantize_experts(w13, w2, "fp8_block"))
    with pytest.raises(
        ValueError, match=r"all layers must have one format, got modelopt NVFP4 of .* and compressed-tensors float"
    ):
        model.save_pretrained(tmp_path)
    second.prepared = whole
    first.to("meta")
    with pytest.raises(ValueError, match="must be loaded, got them on the meta device"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_models_without_packed_experts_are_saved_by_transformers(tmp_path: Path) -> None:
    moeq_transformers.register()
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
