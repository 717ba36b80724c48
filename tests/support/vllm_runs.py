"""Runs vLLM's LLM.generate in processes that stay: importing vLLM takes longer than generating."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from paths import PROGRAMS
from vllm_reference import disagreements, plain_model, reference_model

SPEC = importlib.util.find_spec("vllm")
INSTALLED = SPEC is not None and SPEC.origin is not None
NOT_INSTALLED = "vllm is not installed (`make test-vllm` installs it)"
# Marks of tests of whole models.
WHOLE_MODELS = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.skipif(not INSTALLED, reason=NOT_INSTALLED)]


class Engine:
    """A process that runs one checkpoint after the other.

    variables: of its environment. Compiled graphs are kept in a folder of this run alone, so that none is older than
    the code.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        environment = {**os.environ, "VLLM_CACHE_ROOT": _graphs().name, **variables}
        program = [sys.executable, str(PROGRAMS / "vllm_generate.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(program, text=True, env=environment, **pipes)  # type: ignore[call-overload]
        atexit.register(self.close)

    def run(self, job: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """The result, None where the process ended, and what was written until then."""
        written = []
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # what it wrote before it ended is read below
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT ")), "".join(written)
            written.append(line)
        return None, "".join(written)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()


@cache
def _graphs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


_ENGINES: dict[tuple[tuple[str, str], ...], Engine] = {}


def run_vllm(
    folder: Path, modes: list[bool], adapters: tuple[Path, ...] = (), **variables: str
) -> tuple[list[dict[str, Any]], str]:
    """Results of (eager or not) runs of a checkpoint in one process, and all that it wrote."""
    key = tuple(sorted(variables.items()))
    engine = _ENGINES.get(key) or _ENGINES.setdefault(key, Engine(variables))
    results, texts = [], []
    for eager in modes:
        result, written = engine.run(
            {"path": str(folder), "eager": eager, "adapters": [str(path) for path in adapters]}
        )
        texts.append(written)
        if result is None:
            del _ENGINES[key]
            raise AssertionError(f"the process must stay, ended after:\n{written[-4000:]}")
        results.append(result)
    return results, "".join(texts)


def check_tokens(folder: Path, said: str, modes: list[bool], dequantized: Path | None = None, **variables: str) -> str:
    """Hold vLLM's greedy tokens to transformers in float32 on dequantized experts, but for ties.

    Args:
        said: what the plug-in must say of the experts.
        modes: of runs, eager (True) or compiled.
        dequantized: the same model in float32; None: only its experts are quantized.
        variables: of the environment.

    Returns: all that vLLM wrote.
    """
    results, written = run_vllm(folder, modes, **variables)
    model = reference_model(folder) if dequantized is None else plain_model(dequantized)
    for result in results:
        assert "error" not in result, result["error"]
        agreed, wrong = disagreements(model, result["prompts"], result["tokens"])
        assert not wrong, f"eager={result['eager']}: {wrong}"
        assert agreed >= 0.9 * sum(map(len, result["tokens"]))
    assert written.count(f"torch_moe_ops: {said}") == len(modes)
    return written
