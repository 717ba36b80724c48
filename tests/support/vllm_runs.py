"""Runs vLLM's LLM.generate in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import PROGRAMS
from vllm_reference import disagreements, reference_model

SPEC = importlib.util.find_spec("vllm")
INSTALLED = SPEC is not None and SPEC.origin is not None
NOT_INSTALLED = "vllm is not installed (`make test-vllm` installs it)"


def run_vllm(folder: Path, modes: list[bool], **variables: str) -> tuple[list[dict[str, Any]], str]:
    """Results of (eager or not) runs of a checkpoint in one process, and all that it wrote."""
    jobs = folder.with_suffix(".json")
    jobs.write_text(json.dumps([{"path": str(folder), "eager": eager} for eager in modes]))
    program = [sys.executable, str(PROGRAMS / "vllm_generate.py"), str(jobs)]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **variables})
    written = done.stdout + done.stderr
    results = [json.loads(line.removeprefix("RESULT ")) for line in written.splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(modes), written[-4000:]
    return results, written


def check_tokens(folder: Path, said: str, modes: list[bool]) -> None:
    """Hold vLLM's greedy tokens to transformers in float32 on dequantized experts, but for ties.

    Args:
        said: what the plug-in must say of the experts.
        modes: of runs, eager (True) or compiled.
    """
    results, written = run_vllm(folder, modes)
    assert f"torch_moe_ops: {said}" in written
    model = reference_model(folder)
    for result in results:
        assert "error" not in result, result["error"]
        agreed, wrong = disagreements(model, result["prompts"], result["tokens"])
        assert not wrong, f"eager={result['eager']}: {wrong}"
        assert agreed >= 0.9 * sum(map(len, result["tokens"]))
