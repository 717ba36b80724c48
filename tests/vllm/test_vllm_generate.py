"""Whole models through vLLM's LLM.generate on this CPU, in processes of their own: exports of every format, eager and
compiled, held to transformers in float32 on dequantized experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints_support import FIXTURES
from vllm_checkpoints import SHARED, graft, with_shared_experts
from vllm_runs import WHOLE_MODELS, check_tokens, run_vllm

pytestmark = WHOLE_MODELS

# Fixture -> what the plug-in says of it.
SAID = {
    "mixtral_modelopt_nvfp4": "ModelOpt NVFP4",
    "qwen3_moe_modelopt_nvfp4": "ModelOpt NVFP4",
    "qwen3_moe_modelopt_nvfp4_w4a16": "ModelOpt W4A16_NVFP4",
    "qwen3_moe_ct_nvfp4": "compressed-tensors NVFP4",
    "gpt_oss_mxfp4": "gpt-oss MXFP4",
    "qwen3_moe_ct_mxfp4": "compressed-tensors MXFP4",
    "qwen3_moe_ct_int4_g32": "compressed-tensors INT4",
    "qwen3_moe_ct_fp8_channel": "compressed-tensors FP8",
    "qwen3_moe_fp8_block": "FP8 128x128",
    "qwen3_moe_modelopt_fp8": "ModelOpt FP8",
}


@pytest.mark.parametrize("fixture", SAID)
def test_greedy_tokens_are_those_of_dequantized_experts(fixture: str, tmp_path: Path) -> None:
    check_tokens(
        graft(FIXTURES / fixture, tmp_path / fixture), f"{SAID[fixture]} experts on backend cpu", [True, False]
    )


@pytest.mark.parametrize("architecture", SHARED)
def test_shared_experts_are_added(architecture: str, tmp_path: Path) -> None:
    folder = with_shared_experts(tmp_path / "model", architecture)
    check_tokens(folder, "ModelOpt W4A16_NVFP4 experts on backend cpu", [True, False])


def test_without_the_plug_in_nvfp4_raises(tmp_path: Path) -> None:
    folder = graft(FIXTURES / "mixtral_modelopt_nvfp4", tmp_path / "model")
    results, written = run_vllm(folder, [True], MOEQ_VLLM="0")
    assert "No NvFp4 MoE backend supports" in results[0]["error"]
    assert "experts on backend" not in written
