"""Architectures x formats: from_pretrained after register(), against plain transformers on dequantized weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from modules_by_path import ROOT
from safetensors.torch import load_file, save_file
from tolerances import F32, relative_l2
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from quantized_models import ARCHITECTURES, FORMATS, MORE_ARCHITECTURES, REFUSED, REFUSED_FORMAT, TABLE, write_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

GUIDE = ROOT / "docs" / "howto" / "transformers.md"
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))


def load(folder: Path, **options: Any) -> Any:
    moeq_transformers.register(**{"act_format": "none", **options})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def packed_layers(model: Any) -> int:
    """Layers of experts, all of which must hold packed weights and none of their own."""
    modules = find_experts(model)
    # JetMoe's module of experts holds its router and a bias too.
    left = [name for found in modules for name, _ in found.module.named_parameters()]
    assert set(left) <= {"bias", "router.layer.weight"}
    assert all(hasattr(found.module, "moeq_weights") for found in modules)
    return len(modules)


# In the usual tests every format of three architectures, and two formats of every architecture.
WHOLE, EVERYWHERE = ("qwen3_moe", "mixtral", "deepseek_v3"), (REFUSED_FORMAT, "compressed-tensors INT4")
PRODUCT = [
    pytest.param(name, form, marks=() if name in WHOLE or form in EVERYWHERE else pytest.mark.slow)
    for name in ARCHITECTURES
    for form in FORMATS
]


@pytest.mark.parametrize(("architecture", "format_name"), PRODUCT)
def test_logits_are_those_of_the_dequantized_model(architecture: str, format_name: str, tmp_path: Path) -> None:
    written = write_model(tmp_path, architecture, format_name)
    assert written.linears
    model = load(written.quantized)
    assert packed_layers(model)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(written.dequantized, dtype=torch.float32)
    assert relative_l2(logits(model), logits(oracle)) < F32


# Of one format in the usual tests.
MORE = [
    pytest.param(name, form, marks=() if form == REFUSED_FORMAT else pytest.mark.slow)
    for name in MORE_ARCHITECTURES
    for form in FORMATS
]


@pytest.mark.parametrize(("architecture", "format_name"), MORE)
def test_logits_of_further_architectures(architecture: str, format_name: str, tmp_path: Path) -> None:
    try:
        transformers.AutoConfig.for_model(architecture)
    except ValueError:
        pytest.skip(f"transformers {transformers.__version__} does not have {architecture}")
    test_logits_are_those_of_the_dequantized_model(architecture, format_name, tmp_path)


@pytest.mark.parametrize("format_name", [REFUSED_FORMAT, "compressed-tensors INT4", "GPTQ"])
@pytest.mark.parametrize("architecture", ["llama4_text", "dbrx", "jetmoe"])
def test_blocks_without_the_interface_are_given_experts(architecture: str, format_name: str, tmp_path: Path) -> None:
    """A model that was built in another way: of a checkpoint's experts, and of unquantized ones."""
    written = write_model(tmp_path, architecture, format_name)
    oracle, model = (
        transformers.AutoModelForCausalLM.from_pretrained(written.dequantized, dtype=torch.float32) for _ in range(2)
    )
    want = logits(oracle)
    for found in find_experts(model):
        for parameter in found.module.parameters():
            if parameter.ndim == 3 or architecture == "dbrx":
                torch.nn.init.zeros_(parameter)
    assert relative_l2(logits(model), want) > 0.1
    attached = moeq_transformers.attach_experts(model, written.quantized, act_format="none")
    assert len(attached) == packed_layers(model) == 2 and "none" not in {w.scheme for w in attached.values()}
    assert relative_l2(logits(model), want) < F32
    attached = moeq_transformers.attach_experts(oracle, written.dequantized, act_format="none")
    assert {w.scheme for w in attached.values()} == {"none"}
    assert relative_l2(logits(oracle), want) < F32


@pytest.mark.parametrize("format_name", ["compressed-tensors FP8", "compressed-tensors MXFP4"])
def test_granite_with_all_experts_in_one_tensor(format_name: str, tmp_path: Path) -> None:
    """As its unquantized files have them: input_linear holds gate and up."""
    written = write_model(tmp_path, "granitemoe", format_name)
    file = written.quantized / "model.safetensors"
    stored = load_file(file)
    for layer in (0, 1):
        root = f"model.layers.{layer}.block_sparse_moe"
        parts = {name.rpartition(".")[2] for name in stored if name.startswith(f"{root}.experts.0.")}
        for part in parts:
            gate, up, down = (
                torch.stack([stored.pop(f"{root}.experts.{e}.{which}_proj.{part}").view(torch.uint8) for e in range(4)])
                for which in ("gate", "up", "down")
            )
            dtype = {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}.get(part, torch.uint8)
            dtype = torch.uint8 if "MXFP4" in format_name else dtype
            stored[f"{root}.input_linear.{part}"] = torch.cat((gate, up), 1).contiguous().view(dtype)
            stored[f"{root}.output_linear.{part}"] = down.view(dtype)
    save_file(stored, file, metadata={"format": "pt"})
    model = load(written.quantized)
    assert packed_layers(model) == 2
    oracle = transformers.AutoModelForCausalLM.from_pretrained(written.dequantized, dtype=torch.float32)
    assert relative_l2(logits(model), logits(oracle)) < F32


@pytest.mark.parametrize("name", sorted(folder.name for folder in CHECKPOINTS.iterdir()))
def test_logits_of_checkpoints_that_other_tools_wrote(name: str) -> None:
    expected = load_file(CHECKPOINTS / name / "expected.safetensors")
    model = load(CHECKPOINTS / name)
    assert packed_layers(model)
    assert relative_l2(logits(model, expected["input_ids"]), expected["logits_dequant"]) < F32


@pytest.mark.parametrize("architecture", REFUSED)
def test_refusals_name_their_reason(architecture: str, tmp_path: Path) -> None:
    written = write_model(tmp_path, architecture, REFUSED_FORMAT)
    reason = r"must (name the experts of|run its experts through the experts interface).* layers \[0"
    with pytest.raises(ValueError, match=reason):
        load(written.quantized)


def test_the_guide_shows_the_architectures_and_formats_that_are_run_here() -> None:
    assert TABLE in GUIDE.read_text(), f"docs/howto/transformers.md must hold\n{TABLE}"


def _greedy(model: Any, ids: Tensor, tokens: int) -> Tensor:
    for _ in range(tokens):
        ids = torch.cat((ids, logits(model, ids)[:, -1:].argmax(-1)), 1)
    return ids


COMPILED = ["qwen3_moe_ct_nvfp4", "qwen3_moe_ct_int8", "qwen3_moe_fp8_block", "gpt_oss_mxfp4", "mixtral_modelopt_nvfp4"]

REST = sorted(folder.name for folder in CHECKPOINTS.iterdir() if folder.name not in COMPILED)


@pytest.mark.parametrize("name", [*COMPILED, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_static_cache_and_one_graph(name: str) -> None:
    """generate with a static cache gives the tokens of decoding without one; the model compiles to one graph."""
    expected = load_file(CHECKPOINTS / name / "expected.safetensors")
    model = load(CHECKPOINTS / name)
    ids = expected["input_ids"][:1, :5]
    generated = model.generate(
        ids, max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(generated, _greedy(model, ids, generated.shape[1] - 5))
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: logits(model, ids), fullgraph=True, backend="aot_eager")
    assert relative_l2(compiled(expected["input_ids"]), expected["logits_dequant"]) < F32


@pytest.mark.parametrize("architecture", ["llama4_text", "granitemoe", "dbrx", "jetmoe"])
def test_static_cache_and_one_graph_of_other_blocks(architecture: str, tmp_path: Path) -> None:
    if architecture == "llama4_text" and transformers.__version__.startswith("5.17."):
        pytest.skip("generate of Llama 4 with a static cache fails in transformers 5.17 itself")
    written = write_model(tmp_path, architecture, "compressed-tensors INT4")
    model = load(written.quantized)
    generated = model.generate(
        IDS[:1, :5], max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True
    )
    assert torch.equal(generated, _greedy(model, IDS[:1, :5], generated.shape[1] - 5))
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: logits(model, ids), fullgraph=True, backend="aot_eager")
    assert relative_l2(compiled(IDS), logits(model)) < F32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe_modelopt_nvfp4", "gpt_oss_mxfp4"])
def test_generate_compiles_itself(name: str) -> None:
    """As on a GPU, where `generate` compiles the step through a static cache: by inductor, in one graph."""
    model = load(CHECKPOINTS / name)
    ids = load_file(CHECKPOINTS / name / "expected.safetensors")["input_ids"][:1, :5]
    torch._dynamo.reset()
    settings = transformers.CompileConfig(fullgraph=True, dynamic=False, mode="default")
    settings._compile_all_devices = True
    generated = model.generate(
        ids, max_new_tokens=4, do_sample=False, cache_implementation="static", compile_config=settings
    )
    counts = torch._dynamo.utils.counters
    assert counts["stats"]["unique_graphs"] >= 1 and not counts["graph_break"]
    assert torch.equal(generated, _greedy(model, ids, generated.shape[1] - 5))
