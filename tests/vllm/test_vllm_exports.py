"""Checkpoints that `save_pretrained` wrote, through vLLM's LLM.generate on this CPU: vLLM reads what we write.

What is written comes from tools of others (their experts under an attention that vLLM runs) or from `quantize_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints_support import FIXTURES
from vllm_checkpoints import HEAD, graft
from vllm_runs import WHOLE_MODELS, check_tokens, run_vllm

pytestmark = WHOLE_MODELS

# Fixture -> what the plug-in says of its export.
READ_AND_WRITTEN = {
    "qwen3_moe_modelopt_nvfp4": "ModelOpt NVFP4",
    "mixtral_modelopt_nvfp4": "ModelOpt NVFP4",
    "qwen3_moe_ct_nvfp4": "ModelOpt NVFP4",
    "qwen3_moe_modelopt_fp8": "ModelOpt FP8",
    "qwen3_moe_ct_fp8_channel": "compressed-tensors FP8",
    "qwen3_moe_fp8_block": "compressed-tensors FP8",
    "qwen3_moe_ct_int4_g32": "compressed-tensors INT4",
    "qwen3_moe_ct_mxfp4": "compressed-tensors MXFP4",
    "gpt_oss_mxfp4": "gpt-oss MXFP4",
}
# Scheme of `quantize_model` -> what the plug-in says of the export.
QUANTIZED_HERE = {
    "nvfp4": "ModelOpt W4A16_NVFP4 experts on backend cpu",
    "mxfp4": "compressed-tensors MXFP4 experts on backend cpu",
    "int4": "compressed-tensors INT4 experts on backend cpu",
    "fp8": "compressed-tensors FP8 experts on backend cpu",
}


@pytest.mark.parametrize("fixture", READ_AND_WRITTEN)
def test_exports_of_what_other_tools_wrote(fixture: str, tmp_path: Path) -> None:
    import transformers

    import torch_moe_ops.transformers as moeq_transformers

    moeq_transformers.register(act_format="none")
    folder = graft(FIXTURES / fixture, tmp_path / fixture)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "export")
    check_tokens(tmp_path / "export", f"{READ_AND_WRITTEN[fixture]} experts on backend cpu", [True])


@pytest.mark.parametrize("scheme", QUANTIZED_HERE)
def test_exports_of_what_was_quantized_here(scheme: str, tmp_path: Path) -> None:
    from torch_moe_ops.transformers import quantize_model

    model = _small_model()
    quantize_model(model, scheme)
    model.save_pretrained(tmp_path / "export")
    check_tokens(tmp_path / "export", QUANTIZED_HERE[scheme], [True, False] if scheme == "nvfp4" else [True])


@pytest.mark.parametrize("scheme", ["int8", "mxfp8"])
def test_what_is_left_to_vllm_is_read_there(scheme: str, tmp_path: Path) -> None:
    """Its own methods take it as what it is. They have no INT8 backend on such a CPU, and for MXFP8 a Triton kernel."""
    from torch_moe_ops.transformers import quantize_model

    model = _small_model()
    quantize_model(model, scheme)
    model.save_pretrained(tmp_path / "export")
    results, written = run_vllm(tmp_path / "export", [True])
    assert "experts on backend" not in written
    error = results[0].get("error", "")
    if scheme == "mxfp8":
        assert not error or "module 'triton.language' has no attribute" in error
        return
    assert "torch_moe_ops: left to vLLM: format must be one of" in written
    kind = "scale(f32,static,per_channel),symmetric), activation_key=QuantKey(i8,scale(f32,dynamic,per_token)"
    assert not error or ("No Int8 MoE backend" in error and kind in error)


def _small_model() -> Any:
    """A Qwen3-MoE with random weights in bfloat16, its router far from ties."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": HEAD}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = Qwen3MoeConfig(**sizes, **heads, norm_topk_prob=True, tie_word_embeddings=False)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape) * (0.35 if ".gate.weight" in name else 0.1)
        parameter.data.copy_(1 + noise if "norm" in name else noise)
    return model
