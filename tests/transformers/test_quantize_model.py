"""quantize_model against transformers' own experts on the weights that it should have taken."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tolerances import F32, relative_l2
from torch import Tensor

import torch_moe_ops as moe

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from fixture_layers import CHECKPOINTS  # noqa: E402
from quantized_models import tiny_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def random_model(name: str) -> Any:
    """gpt_oss: interleaved, transposed, biases. nemotron_h: no gate."""
    if name in ("gpt_oss", "nemotron_h"):
        config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / f"{name}_modelopt_nvfp4")
        del config.quantization_config
        config.intermediate_size = 96
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for found in find_experts(model):
            for parameter in found.module.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        return model
    return tiny_model(name)


@pytest.mark.parametrize("accuracy", ["standard", "strict"])
def test_the_accuracy_is_that_of_prepare_and_stays_when_a_model_moves(accuracy: str) -> None:
    model = random_model("qwen3_moe")
    prepared = moeq_transformers.quantize_model(model, "fp8", act_format="fp8", accuracy=accuracy)
    assert {w.accuracy for w in prepared.values()} == {accuracy}
    weights = find_experts(model)[0].module.moeq_weights
    assert weights.to("meta").prepared.accuracy == accuracy
    with pytest.raises(ValueError, match=r"accuracy must be one of \['standard', 'strict'\], got 'exact'"):
        moeq_transformers.quantize_model(random_model("qwen3_moe"), "fp8", accuracy="exact")


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "granitemoe", "llama4_text", "dbrx", "jetmoe"],
)
def test_unquantized_weights_give_the_logits_of_the_model(name: str) -> None:
    model = random_model(name)
    want = logits(model)
    prepared = moeq_transformers.quantize_model(model, "none")
    assert prepared and {w.scheme for w in prepared.values()} == {"none"}
    # JetMoe's module of experts holds its router and a bias too.
    assert all(p.ndim < 3 for found in find_experts(model) for p in found.module.parameters())
    assert relative_l2(logits(model), want) < F32


def test_what_records_router_logits_hears_of_them() -> None:
    """JetMoe's routers are not called where nobody listens."""
    model = random_model("jetmoe")
    options = {"input_ids": IDS, "use_cache": False, "output_router_logits": True}
    with torch.no_grad():
        want = model(**options).router_logits
        moeq_transformers.quantize_model(model, "none")
        got = model(**options).router_logits
    assert len(got) == len(want) >= 4
    assert all(relative_l2(here, there) < F32 for here, there in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["dbrx", "jetmoe"])
def test_copies_of_adapted_models_run_and_are_not_written_quantized(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    moeq_transformers.quantize_model(model, "nvfp4")
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    assert model.num_parameters() == random_model(name).num_parameters()
    with pytest.raises(ValueError, match="must be of a class whose packed experts other tools have names for, got"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must hold two weights of all experts, got 0"):
        moeq_transformers.quantize_model(model)


def test_adapted_models_run_where_they_are_unpickled(tmp_path: Path) -> None:
    """In a process that has adapted no such class before."""
    saved = []
    for name in ("llama4_text", "dbrx", "jetmoe"):
        model = random_model(name)
        moeq_transformers.quantize_model(model, "nvfp4")
        torch.save({"model": model, "ids": IDS, "want": logits(model)}, tmp_path / f"{name}.pt")
        saved.append(tmp_path / f"{name}.pt")
    program = (
        "import sys, torch\n"
        "for file in sys.argv[1:]:\n"
        "    saved = torch.load(file, weights_only=False)\n"
        "    with torch.no_grad():\n"
        "        got = saved['model'](input_ids=saved['ids'], use_cache=False).logits\n"
        "    torch.testing.assert_close(got, saved['want'], rtol=1e-4, atol=1e-4)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *saved], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["dbrx", "jetmoe"])
@pytest.mark.parametrize("scheme", ["none", "nvfp4", "int4"])
def test_adapted_models_are_quantized_while_they_are_loaded(name: str, scheme: str, tmp_path: Path) -> None:
    """DBRX's files hold the rows of all experts below each other."""
    model = random_model(name)
    model.save_pretrained(tmp_path)
    moeq_transformers.register()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=moeq_transformers.MoeqConfig(scheme=scheme), dtype=torch.float32
    )
    assert {found.module.moeq_weights.prepared.scheme for found in find_experts(loaded)} == {scheme}
    moeq_transformers.quantize_model(model, scheme)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("name", ["dbrx", "jetmoe"])
def test_adapted_models_with_unquantized_experts_are_written_as_they_were(name: str, tmp_path: Path) -> None:
    """By the names of transformers' own files, which it then reads without this library."""
    model = random_model(name)
    before, want = {key: tensor.clone() for key, tensor in model.state_dict().items()}, logits(model)
    moeq_transformers.quantize_model(model, "none")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not any(hasattr(found.module, "moeq_weights") for found in find_experts(again))
    after = again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(logits(again), want)


def _experts_as_they_are_meant(model: Any, prepared: dict[str, Any]) -> Any:
    """Give adapted modules what `prepared` means, by the names of their own parameters."""
    for found in find_experts(model):
        w13, w2 = moe.dequantize_experts(moe.restore(prepared[found.name]))
        if hasattr(found.module, "mlp"):
            gate, up = w13.chunk(2, dim=1)
            meant = {"mlp.w1": gate.flatten(0, 1), "mlp.v1": up.flatten(0, 1), "mlp.w2": w2.mT.flatten(0, 1)}
        else:
            meant = {"input_linear.weight": w13, "output_linear.weight": w2}
        for name, tensor in meant.items():
            found.module.get_parameter(name).data = tensor.contiguous()
    return model


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_block", "int8", "int4"])
@pytest.mark.parametrize("name", ["dbrx", "jetmoe"])
def test_schemes_give_the_logits_of_adapted_models_on_dequantized_weights(name: str, scheme: str) -> None:
    model, oracle = random_model(name), random_model(name)
    before = logits(model)
    prepared = moeq_transformers.quantize_model(model, scheme)
    assert relative_l2(logits(model), logits(_experts_as_they_are_meant(oracle, prepared))) < F32
    assert 1e-4 < relative_l2(logits(model), before) < 0.5


@pytest.mark.parametrize("norm", [None, 1.0, 2.0])
def test_weights_of_experts_of_dbrx_are_divided_by_any_norm(norm: float | None) -> None:
    """It is the block's to divide them: its experts get what it has made of them."""
    model, oracle = random_model("dbrx"), random_model("dbrx")
    for block in (*model.transformer.blocks, *oracle.transformer.blocks):
        block.ffn.moe_normalize_expert_weights = norm
    prepared = moeq_transformers.quantize_model(model, "int4")
    _experts_as_they_are_meant(oracle, prepared)
    assert relative_l2(logits(model), logits(oracle)) < F32
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids = IDS[:1, :5]
    assert torch.equal(model.generate(ids, **options), oracle.generate(ids, **options))


@pytest.mark.parametrize(
    ("name", "said"), [("dbrx", {"ffn_act_fn": {"name": "gelu"}}), ("jetmoe", {"activation_function": "gelu"})]
)
def test_activations_of_adapted_models_are_those_of_their_configs(
    name: str, said: dict[str, Any], tmp_path: Path
) -> None:
    """In memory and from files: neither calls it hidden_act."""
    config = random_model(name).config
    for key, value in said.items():
        setattr(config.ffn_config if name == "dbrx" else config, key, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for found in find_experts(model):
        for parameter in found.module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    want = logits(model)
    model.save_pretrained(tmp_path)
    moeq_transformers.register()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moeq", dtype=torch.float32
    )
    moeq_transformers.quantize_model(model, "none")
    for here in (model, loaded):
        assert {found.module.moeq_weights.prepared.activation for found in find_experts(here)} == {"gelu"}
        assert relative_l2(logits(here), want) < F32


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_block", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_schemes_give_the_logits_of_dequantized_weights(name: str, scheme: str) -> None:
    model = random_model(name)
    before = logits(model)
    oracle = copy.deepcopy(model)
    prepared = moeq_transformers.quantize_model(model, scheme)
    for found in find_experts(oracle):
        w13, w2 = moe.dequantize_experts(moe.restore(prepared[found.name]))
        if not found.module.is_concatenated:
            w13 = torch.stack(w13.chunk(2, dim=1), 2).flatten(1, 2)
        found.module.gate_up_proj.data = w13.mT if found.module.is_transposed else w13
        found.module.down_proj.data = w2.mT if found.module.is_transposed else w2
    assert relative_l2(logits(model), logits(oracle)) < F32
    assert 1e-4 < relative_l2(logits(model), before) < 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_backends_are_told_of_float16(dtype: torch.dtype, tmp_path: Path) -> None:
    """Not every backend takes such hidden states. Models in float32 may be cast later."""
    said = dtype if dtype == torch.float16 else None
    prepared = moeq_transformers.quantize_model(random_model("qwen3_moe").to(dtype), "nvfp4")
    assert {w.problem.dtype for w in prepared.values()} == {said}
    random_model("qwen3_moe").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path), dtype=dtype
    )
    attached = moeq_transformers.attach_experts(model, tmp_path, scheme="nvfp4")
    assert {w.problem.dtype for w in attached.values()} == {said}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must have experts modules .* got Linear without"):
        moeq_transformers.quantize_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"weights of model.layers.0.mlp.experts must be loaded floats, got them on"):
        moeq_transformers.quantize_model(tiny_model("qwen3_moe").to("meta"))
    model = tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match=r"activation must be the one of model.layers.0.mlp.experts"):
        moeq_transformers.quantize_model(model, "none", activation="gelu")
    moeq_transformers.quantize_model(model, "none")
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts must hold two weights of all experts, got 0"):
        moeq_transformers.quantize_model(model)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_quantizing_while_loading_equals_quantizing_in_memory(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    moeq_transformers.register()
    config = moeq_transformers.MoeqConfig(scheme="nvfp4")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, dtype=torch.float32
    )
    prepared = moeq_transformers.quantize_model(model, "nvfp4")
    for found in find_experts(loaded):
        here, there = (moe.restore(w) for w in (found.module.moeq_weights.prepared, prepared[found.name]))
        assert dataclasses.replace(here, source="").equal(dataclasses.replace(there, source=""))
    assert torch.equal(logits(loaded), logits(model))


def test_moeq_on_an_unquantized_checkpoint_runs_the_unquantized_op(tmp_path: Path) -> None:
    model = random_model("mixtral")
    model.save_pretrained(tmp_path)
    moeq_transformers.register()
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = load(tmp_path, experts_implementation="moeq", dtype=torch.float32)
    assert {found.module.moeq_weights.prepared.scheme for found in find_experts(loaded)} == {"none"}
    assert relative_l2(logits(loaded), logits(model)) < F32
    assert not hasattr(find_experts(load(tmp_path))[0].module, "moeq_weights")


def test_quantized_checkpoints_are_not_quantized_again() -> None:
    moeq_transformers.register()
    with pytest.raises(ValueError, match="MoeqConfig: the checkpoint must be unquantized, got quantization_config"):
        transformers.AutoModelForCausalLM.from_pretrained(
            CHECKPOINTS / "gpt_oss_mxfp4", quantization_config=moeq_transformers.MoeqConfig()
        )
    with pytest.raises(ValueError, match="scheme must be one of"):
        moeq_transformers.MoeqConfig(scheme="int3")
