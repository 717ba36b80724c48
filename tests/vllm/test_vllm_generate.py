"""Whole models through vLLM's LLM.generate on this CPU, in processes of their own: exports of every format, eager and
compiled, held to transformers in float32 on dequantized experts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints_support import FIXTURES
from paths import PROGRAMS
from vllm_checkpoints import graft, with_shared_experts
from vllm_reference import disagreements, reference_model

SPEC = importlib.util.find_spec("vllm")
INSTALLED = SPEC is not None and SPEC.origin is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not INSTALLED, reason="vllm is not installed (`make test-vllm` installs it)"),
]

PROGRAM = PROGRAMS / "vllm_generate.py"
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


def _run(folder: Path, modes: list[bool], **variables: str) -> tuple[list[dict[str, Any]], str]:
    """Results of (eager or not) runs in one process, and all that it wrote."""
    jobs = folder.with_suffix(".json")
    jobs.write_text(json.dumps([{"path": str(folder), "eager": eager} for eager in modes]))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(jobs)], capture_output=True, text=True, env={**os.environ, **variables}
    )
    written = done.stdout + done.stderr
    results = [json.loads(line.removeprefix("RESULT ")) for line in written.splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(modes), written[-4000:]
    return results, written


@pytest.mark.parametrize("fixture", SAID)
def test_greedy_tokens_are_those_of_dequantized_experts(fixture: str, tmp_path: Path) -> None:
    _check_tokens(graft(FIXTURES / fixture, tmp_path / fixture), SAID[fixture])


def test_shared_experts_are_added(tmp_path: Path) -> None:
    _check_tokens(with_shared_experts(tmp_path / "model"), "ModelOpt W4A16_NVFP4")


def _check_tokens(folder: Path, said: str) -> None:
    results, written = _run(folder, [True, False])
    assert f"torch_moe_ops: {said} experts on backend cpu" in written
    model = reference_model(folder)
    for result in results:
        assert "error" not in result, result["error"]
        agreed, wrong = disagreements(model, result["prompts"], result["tokens"])
        assert not wrong, f"eager={result['eager']}: {wrong}"
        assert agreed >= 0.9 * sum(map(len, result["tokens"]))


def test_without_the_plug_in_nvfp4_raises(tmp_path: Path) -> None:
    folder = graft(FIXTURES / "mixtral_modelopt_nvfp4", tmp_path / "model")
    results, written = _run(folder, [True], MOEQ_VLLM="0")
    assert "No NvFp4 MoE backend supports" in results[0]["error"]
    assert "experts on backend" not in written
