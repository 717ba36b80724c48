"""transformers models whose experts run through torch.ops.moeq, against logits of dequantized weights."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from fixture_layers import CHECKPOINTS
from safetensors.torch import load_file, save_file
from tolerances import F32, relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends.native import MULTIPLIES
from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.checkpoints.index import CheckpointIndex, open_checkpoint
from torch_moe_ops.core.schemes import SCHEMES

transformers = pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from quantized_models import write_model  # noqa: E402

import torch_moe_ops.transformers as moeq_transformers  # noqa: E402
from torch_moe_ops.transformers.act_formats import stored_act_format  # noqa: E402
from torch_moe_ops.transformers.interception import packed_settings  # noqa: E402
from torch_moe_ops.transformers.linears import dequantize_linear  # noqa: E402
from torch_moe_ops.transformers.modules import find_experts  # noqa: E402

# (checkpoint, weight scheme): every ModelOpt export among the fixtures.
MODELOPT = [
    ("qwen3_moe_modelopt_nvfp4", "nvfp4"),
    ("qwen3_moe_modelopt_nvfp4_w4a16", "nvfp4"),
    ("mixtral_modelopt_nvfp4", "nvfp4"),
    ("deepseek_v3_modelopt_nvfp4", "nvfp4"),
    ("gpt_oss_modelopt_nvfp4", "nvfp4"),
    ("nemotron_h_modelopt_nvfp4", "nvfp4"),
    ("qwen3_moe_modelopt_fp8", "fp8"),
]
QWEN = "qwen3_moe_modelopt_nvfp4"
# Rounding what enters each expert GEMM to 4 bits moves the logits of these models by 0.06 to 0.12.
W4A4_LOGITS = 0.2


def _load(folder: Path | str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    moeq_transformers.register(**options)
    return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / folder, dtype=dtype)


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def _expected(name: str) -> dict[str, Tensor]:
    return load_file(CHECKPOINTS / name / "expected.safetensors")


@pytest.mark.parametrize(("name", "scheme"), MODELOPT)
def test_weight_only_logits_equal_the_dequantized_model(name: str, scheme: str) -> None:
    if scheme not in SCHEMES:
        pytest.skip(f"the library has no scheme {scheme} yet")
    want = _expected(name)
    model = _load(name, act_format="none")
    assert relative_l2(_logits(model, want["input_ids"]), want["logits_dequant"]) < F32


@pytest.mark.parametrize("name", [name for name, scheme in MODELOPT if scheme == "nvfp4"])
def test_w4a4_logits(name: str) -> None:
    """Close to the dequantized model, and as the emulating reference computes them."""
    want = _expected(name)
    model = _load(name, act_format="nvfp4", backend="cpu")
    logits = _logits(model, want["input_ids"])
    assert 1e-2 < relative_l2(logits, want["logits_dequant"]) < W4A4_LOGITS
    moeq_transformers.attach_experts(model, CHECKPOINTS / name, act_format="nvfp4", backend="reference")
    # Another order of float32 sums may move single codes, far less than the quantization itself does.
    assert relative_l2(logits, _logits(model, want["input_ids"])) < 1e-2


def test_experts_stay_packed_and_linears_do_not() -> None:
    model = _load(QWEN, torch.bfloat16, act_format="none")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert max(p.ndim for p in model.parameters()) == 2
    modules = find_experts(model)
    assert [found.layer for found in modules] == [0, 1]
    for found in modules:
        w = found.module.moeq_weights.prepared
        raw = moe.load_experts(CHECKPOINTS / QWEN, layer=found.layer)
        assert moe.restore(w).equal(raw)
    assert model.config._experts_implementation == "moeq"
    want = _expected(QWEN)
    assert relative_l2(_logits(model, want["input_ids"]), want["logits_dequant"]) < 3e-2


@pytest.mark.parametrize("name", ["gpt_oss_modelopt_nvfp4", "nemotron_h_modelopt_nvfp4", "deepseek_v3_modelopt_nvfp4"])
def test_one_graph(name: str) -> None:
    want = _expected(name)
    model = _load(name, act_format="none")
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: _logits(model, ids), fullgraph=True, backend="aot_eager")
    assert relative_l2(compiled(want["input_ids"]), want["logits_dequant"]) < F32


@pytest.mark.slow
def test_inductor_compiles_the_whole_model() -> None:
    want = _expected(QWEN)
    model = _load(QWEN, act_format="none")
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: _logits(model, ids), fullgraph=True)
    assert relative_l2(compiled(want["input_ids"]), want["logits_dequant"]) < F32


def test_generate_equals_greedy_decoding_without_a_cache() -> None:
    model = _load(QWEN, act_format="none")
    ids = _expected(QWEN)["input_ids"][:1, :5]
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    for _ in range(4):
        ids = torch.cat((ids, _logits(model, ids)[:, -1:].argmax(-1)), 1)
    assert torch.equal(generated, ids)


def _plain_model(name: str) -> Any:
    """The fixture's architecture with random unquantized weights, in float32."""
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / name)
    del config.quantization_config
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", [QWEN, "gpt_oss_modelopt_nvfp4", "nemotron_h_modelopt_nvfp4"])
def test_experts_module_equals_transformers_own(name: str) -> None:
    """transformers' own experts on dequantized weights are the oracle, also for ids that no expert here has."""
    model = _plain_model(name)
    found = find_experts(model)[0]
    oracle = copy.deepcopy(found.module)
    w13, w2 = moe.dequantize_experts(moe.load_experts(CHECKPOINTS / name, layer=found.layer))
    if not oracle.is_concatenated:
        w13 = torch.stack(w13.chunk(2, dim=1), 2).flatten(1, 2)
    first = oracle.gate_up_proj if oracle.has_gate else oracle.up_proj
    first.data = w13.mT if oracle.is_transposed else w13
    oracle.down_proj.data = w2.mT if oracle.is_transposed else w2
    if oracle.has_bias:
        raw = moe.load_experts(CHECKPOINTS / name, layer=found.layer)
        oracle.gate_up_proj_bias.data = torch.stack(raw.w13_bias.float().chunk(2, dim=1), 2).flatten(1)
        oracle.down_proj_bias.data = raw.w2_bias.float()
    moeq_transformers.attach_experts(model, CHECKPOINTS / name, act_format="none", check_linears=False)
    oracle.config = copy.deepcopy(oracle.config)
    oracle.config._experts_implementation = "batched_mm"
    oracle._is_expert_parallel = True  # else batched_mm reads beyond the last expert

    hidden = torch.randn(9, w2.shape[1])
    ids = torch.stack([torch.randperm(w2.shape[0])[:3] for _ in range(9)])
    weights = torch.rand(9, 3)
    ids[2, 1] = ids[5] = w2.shape[0]  # what transformers writes for experts of other ranks
    with torch.no_grad():
        out = found.module(hidden, ids, weights)
        here = weights * (ids < w2.shape[0])  # older releases of transformers multiply the last expert by them
        assert relative_l2(out, oracle(hidden, ids, here)) < F32
        assert not out[5].any()
        ids[2, 1] = -1
        assert torch.equal(found.module(hidden, ids, weights), out)


def test_attach_experts_of_compressed_tensors() -> None:
    """transformers would drop weight_global_scale of this format; the experts come from the files instead."""
    name = "qwen3_moe_ct_nvfp4"
    model = _plain_model(name)
    attached = moeq_transformers.attach_experts(model, CHECKPOINTS / name, act_format="none", backend="cpu")
    assert [w.g1_alphas.shape[1] for w in attached.values()] == [2]
    others = load_file(CHECKPOINTS / name / "model.safetensors")
    others = {key: value for key, value in others.items() if ".experts." not in key}
    keys = model.load_state_dict(others, strict=False)
    assert not keys.unexpected_keys and all(".moeq_weights." in key for key in keys.missing_keys)
    want = _expected(name)
    assert relative_l2(_logits(model, want["input_ids"]), want["logits_dequant"]) < F32


def test_weights_follow_the_model_but_keep_their_dtypes() -> None:
    model = _load(QWEN, act_format="nvfp4").to(torch.float16)
    holder = find_experts(model)[0].module.moeq_weights
    before = holder.prepared
    assert before.g1_alphas.dtype == torch.float32
    assert not model.state_dict().keys() & {"moeq_weights"}
    holder.to("meta")
    assert {t.device.type for t in holder.prepared.tensors().values()} == {"meta"}
    assert holder.prepared.metadata() == before.metadata()


def _edited(tmp_path: Path, edit: Callable[[dict[str, Tensor]], None], name: str = QWEN) -> Path:
    """A copy of a checkpoint with other tensors."""
    folder = tmp_path / name
    shutil.copytree(CHECKPOINTS / name, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda t: t.update({f"{_PROJ}.pre_quant_scale": torch.ones(64)}), f"tensor {_PROJ}.pre_quant_scale: nothing"),
        (lambda t: t.pop(f"{_PROJ}.weight_scale_2"), f"tensor weight_scale_2 is missing (beside {_PROJ}"),
        (
            lambda t: t.update({f"{_PROJ}.weight": t[f"{_PROJ}.weight"].int()}),
            f"no known format stores a weight as {_PROJ}.input_scale F32 ()",
        ),
        (
            lambda t: t[f"{_PROJ}.weight_scale_2"].fill_(torch.inf),
            "weight_scale_2 (outside the experts) must be finite and positive, got",
        ),
        (lambda t: t.pop(f"{_PROJ}.weight_scale"), f"no known format stores a weight as {_PROJ}.input_scale F32 ()"),
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "expert 3, up: tensor weight is missing"),
    ],
)
def test_damaged_checkpoints_do_not_load(
    edit: Callable[[dict[str, Tensor]], None], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as error:
        _load(_edited(tmp_path, edit))
    # transformers collects the errors of conversions in its log and raises one of its own.
    assert text in str(error.value) + caplog.text


def test_a_model_that_bypasses_the_experts_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_moe_ops.transformers.quantizer.find_experts", lambda model: [])
    with pytest.raises(
        ValueError, match=r"Qwen3MoeForCausalLM must run its experts .* got other modules in layers \[0, 1\]"
    ):
        _load(QWEN)


@pytest.mark.parametrize("folder", [QWEN, "gpt_oss_mxfp4"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_attach_experts_compares_activations_whatever_torchs_default_dtype(folder: str, default: torch.dtype) -> None:
    model, before = _plain_model(folder), torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        attached = moeq_transformers.attach_experts(model, CHECKPOINTS / folder, check_linears=False)
        options: dict[str, Any] = {"check_linears": False, "swiglu_limit": 6.9}
        with pytest.raises(ValueError, match="activation must be the one of"):
            moeq_transformers.attach_experts(_plain_model(folder), CHECKPOINTS / folder, **options)
    finally:
        torch.set_default_dtype(before)
    assert len(attached) == len(find_experts(model))


def test_attach_experts_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"model must have experts modules .* got Linear without"):
        moeq_transformers.attach_experts(torch.nn.Linear(2, 2), CHECKPOINTS / QWEN)
    model = _plain_model(QWEN)
    with pytest.raises(
        ValueError, match=r"num_experts, hidden_size, intermediate_size of model.layers.0.mlp.experts must"
    ):
        moeq_transformers.attach_experts(model, CHECKPOINTS / "mixtral_modelopt_nvfp4", check_linears=False)
    with pytest.raises(ValueError, match=r"activation must be the one of model.layers.0.mlp.experts, got 'gelu_tanh'"):
        moeq_transformers.attach_experts(model, CHECKPOINTS / QWEN, check_linears=False, activation="gelu_tanh")
    with pytest.raises(ValueError, match="activation must be the one of"):
        moeq_transformers.attach_experts(model, CHECKPOINTS / QWEN, check_linears=False, swiglu_limit=7.0)
    with pytest.raises(ValueError, match=r"gating of .* must be not gated as in the model, got gated"):
        for found in find_experts(model):
            found.module.has_gate = False
        moeq_transformers.attach_experts(model, CHECKPOINTS / QWEN, check_linears=False)


def test_attach_experts_refuses_offloaded_models() -> None:
    model = _plain_model(QWEN).to("meta")
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.gate.weight must be loaded, got it on the meta device"):
        moeq_transformers.attach_experts(model, CHECKPOINTS / QWEN, check_linears=False)


def test_experts_without_weights_say_so() -> None:
    moeq_transformers.register()
    model = _plain_model(QWEN)
    model.set_experts_implementation("moeq")
    with pytest.raises(RuntimeError, match="Qwen3MoeExperts must hold prepared weights, got none: call"):
        _logits(model, torch.zeros(1, 3, dtype=torch.int64))


def test_another_modelopt_quantizer_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "modelopt", dict)
    with pytest.raises(ValueError, match=r"'modelopt' belongs to builtins\.dict already"):
        moeq_transformers.register()


_NO_FILES = CheckpointIndex(path="", entries={}, digests={}, config={}, quant_config={})


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_fp8_linears_are_dequantized_per_tensor_and_row(shape: tuple[int, ...]) -> None:
    weight = torch.randn(6, 32).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) + 0.5
    result = dequantize_linear("q_proj", {"weight": weight, "weight_scale": scale}, _NO_FILES)
    rows = scale.double().reshape(-1).expand(6) if scale.numel() == 1 else scale.double().reshape(6)
    exact = torch.stack([weight[i].double() * rows[i] for i in range(6)])
    torch.testing.assert_close(result.double(), exact, rtol=2**-24, atol=0)


def test_a_linear_without_its_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no known format stores a weight as q_proj\.weight F8_E4M3"):
        dequantize_linear("q_proj", {"weight": torch.zeros(256, 256).to(torch.float8_e4m3fn)}, _NO_FILES)


def test_a_parameter_that_no_file_holds_is_an_error(tmp_path: Path) -> None:
    """transformers only warns, and leaves it random."""
    folder = _edited(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM, \['model.layers.1.self_attn.q_norm.weight'\] missing"):
        _load(folder)


def test_exports_with_only_hf_quant_config(tmp_path: Path) -> None:
    folder = _edited(tmp_path, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert (folder / "hf_quant_config.json").exists()
    want = _expected(QWEN)
    model = _load(folder, act_format="none")
    assert relative_l2(_logits(model, want["input_ids"]), want["logits_dequant"]) < F32


def test_models_without_quantized_experts_keep_their_quantizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moeq_transformers.register()
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert packed_settings(transformers.Qwen3Config(quantization_config=settings)) is None
    assert packed_settings(transformers.Qwen3MoeConfig(quantization_config=settings)) == settings
    assert packed_settings(transformers.Qwen3MoeConfig(quantization_config={"quant_method": "bitsandbytes"})) is None
    # Experts that are not quantized: only the files tell.
    written = write_model(tmp_path, "qwen3_moe", "FP8 128x128", experts=False)
    with contextlib.suppress(ImportError):  # transformers' quantizer asks for another package
        model = _load(written.quantized)
        assert model.config._experts_implementation != "moeq"
    assert "quant_method 'fp8' is left to transformers: its experts are not quantized" in caplog.text


def test_settings_given_to_from_pretrained_ask_for_transformers_own_quantizer() -> None:
    moeq_transformers.register()
    folder = CHECKPOINTS / "gpt_oss_mxfp4"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    assert model.config._experts_implementation != "moeq"
    assert find_experts(model)[0].module.gate_up_proj.is_floating_point()


@pytest.mark.parametrize("format_name", ["ModelOpt NVFP4", "compressed-tensors NVFP4", "FP8 128x128", "GPTQ"])
def test_another_name_for_experts_is_refused(format_name: str, tmp_path: Path) -> None:
    written = write_model(tmp_path, "qwen3_moe", format_name)
    file = written.quantized / "model.safetensors"
    tensors = {name.replace(".experts.", ".specialists."): t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"must name the experts of layers \[0, 1\] of Qwen3MoeForCausalLM"):
        _load(written.quantized)


def test_auto_takes_the_checkpoint_format_only_where_it_is_multiplied_natively(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W4A4 is emulated on a CPU: slower than weight-only, and less accurate."""
    caplog.set_level(logging.INFO, "torch_moe_ops")
    moeq_transformers.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / QWEN, dtype=torch.float32)
    want = _expected(QWEN)
    assert relative_l2(_logits(model, want["input_ids"]), want["logits_dequant"]) < F32
    lines = [record.message for record in caplog.records if record.message.startswith("experts of")]
    backend = find_experts(model)[0].module.moeq_weights.prepared.backend
    assert len(lines) == 1 and lines[0].endswith(
        f"2 layers with act_format 'none' (made for 'nvfp4', which no backend multiplies natively here), "
        f"backend {backend} on cpu"
    )
    monkeypatch.setitem(MULTIPLIES, backend, frozenset({"nvfp4"}))
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / QWEN, dtype=torch.float32)
    assert find_experts(model)[0].module.moeq_weights.prepared.act_format == "nvfp4"
    assert "2 layers with act_format 'nvfp4', backend" in caplog.text


@pytest.mark.parametrize(
    ("name", "act_format"),
    [
        (QWEN, "nvfp4"),
        ("qwen3_moe_modelopt_nvfp4_w4a16", "none"),
        ("gpt_oss_mxfp4", "none"),
        ("qwen3_moe_ct_fp8_channel", "fp8"),
        ("qwen3_moe_ct_int4_g32", "none"),
        ("qwen3_moe_ct_int8", "int8"),
        ("qwen3_moe_ct_mxfp4", "none"),
        ("qwen3_moe_ct_nvfp4", "nvfp4"),
        ("qwen3_moe_fp8_block", "fp8"),
        ("qwen3_moe_modelopt_fp8", "fp8"),
    ],
)
def test_activation_format_of_checkpoints(name: str, act_format: str) -> None:
    quantization = open_checkpoint(CHECKPOINTS / name).model.quantization
    assert stored_act_format(moe.load_experts(CHECKPOINTS / name, layer=0), quantization) == act_format


def test_activation_format_of_mixed_checkpoints() -> None:
    """They say it layer by layer: calibrated input scales tell."""
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    assert stored_act_format(moe.load_experts(CHECKPOINTS / QWEN, layer=0), mixed) == "nvfp4"
    assert stored_act_format(moe.load_experts(CHECKPOINTS / QWEN, layer=0, input_scales=False), mixed) == "none"


_DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("changes", "of_int4", "of_int8"),
    [
        ({}, "int8", "int8"),
        ({"symmetric": False}, "none", "none"),
        ({"strategy": "group", "group_size": 128}, "none", "none"),
        ({"strategy": "tensor"}, "none", "none"),
        ({"strategy": "tensor", "dynamic": False}, "none", "int8"),
        ({"strategy": "tensor", "dynamic": False, "symmetric": False}, "none", "none"),
    ],
)
def test_integer_activations_that_no_op_rounds_so_are_not_chosen(
    changes: dict[str, Any], of_int4: str, of_int8: str
) -> None:
    quantization = {"config_groups": {"group_0": {"input_activations": _DYNAMIC | changes}}}
    for name, expected in (("qwen3_moe_ct_int4_g32", of_int4), ("qwen3_moe_ct_int8", of_int8)):
        assert stored_act_format(moe.load_experts(CHECKPOINTS / name, layer=0), quantization) == expected


def test_a_scale_that_a_format_does_not_use_is_not_dropped() -> None:
    """FP8 codes that were cast to floats look like a plain weight; the scale beside them says otherwise."""
    parts = {"weight": torch.zeros(4, 32), "weight_scale": torch.ones(())}
    with pytest.raises(ValueError, match="q_proj: format unquantized does not use weight_scale"):
        dequantize_linear("q_proj", parts, _NO_FILES)


def test_attach_experts_refuses_random_linears() -> None:
    """A model made from a config has random weights where the checkpoint quantizes attention."""
    model = _plain_model(QWEN)
    with pytest.raises(ValueError, match=r"self_attn\.\w_proj\.weight must be what .* holds \(quantized there\)"):
        moeq_transformers.attach_experts(model, CHECKPOINTS / QWEN)
    assert find_experts(model)[0].module.down_proj.ndim == 3  # nothing was taken from it
    moeq_transformers.attach_experts(_load(QWEN, torch.bfloat16), CHECKPOINTS / QWEN)


def test_a_change_of_dtype_that_no_forward_would_survive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _plain_model("gpt_oss_mxfp4").bfloat16()
    moeq_transformers.attach_experts(model, CHECKPOINTS / "gpt_oss_mxfp4")
    ids = _expected("gpt_oss_mxfp4")["input_ids"]
    assert _logits(model.float(), ids).dtype == torch.float32
    backend = find_experts(model)[0].module.moeq_weights.prepared.backend
    # As those of GPUs.
    half = dataclasses.replace(BACKENDS[backend], hidden_dtypes=(torch.bfloat16, torch.float16))
    monkeypatch.setitem(BACKENDS, backend, half)
    with pytest.raises(ValueError, match=r"take hidden states of .* the model cannot be made torch\.float32"):
        model.bfloat16().float()


def test_fp8_experts_of_transformers_run_attached_ones() -> None:
    """On a GPU transformers gives FP8 checkpoints experts of another class, with an interface of its own."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    name = "qwen3_moe_fp8_block"
    model = _load(name, act_format="none")
    want = _expected(name)
    theirs = _plain_model(name)
    settings = transformers.FineGrainedFP8Config(weight_block_size=(128, 128))
    linears = [module for module, kind in theirs.named_modules() if isinstance(kind, torch.nn.Linear)]
    replace_with_fp8_linear(theirs, linears, settings, pre_quantized=True)
    module = find_experts(theirs)[0].module
    assert type(module).__name__ == "FP8Experts"
    theirs.load_state_dict(model.state_dict(), strict=False)  # all but the experts
    moeq_transformers.attach_experts(theirs, CHECKPOINTS / name, act_format="none")
    assert not list(module.parameters())
    assert relative_l2(_logits(theirs, want["input_ids"]), want["logits_dequant"]) < F32
