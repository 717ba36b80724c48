"""Every example runs as a user runs it, and the figures that it prints are checked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fixture_layers import CHECKPOINTS
from modules_by_path import ROOT, load


def _run(name: str, *arguments: str | Path, status: int = 0, **variables: str) -> str:
    """Standard output of an example; its exit status must be `status`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **variables}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


def _figure(pattern: str, text: str) -> float:
    """The number that the group of `pattern` finds, in a line of its own."""
    match = re.search(pattern, text, re.MULTILINE)
    assert match is not None, f"{pattern!r} is not in:\n{text}"
    return float(match[1])


def test_quickstart() -> None:
    out = _run("quickstart.py")
    assert re.search(r"^checkpoint +\S+qwen3_moe_modelopt_nvfp4 layer 0$", out, re.MULTILINE)
    assert re.search(r"^sizes +8 experts, hidden 64, intermediate 48$", out, re.MULTILINE)
    assert re.search(r"^  -> \w+", out, re.MULTILINE), "explain() marks the chosen backend"
    assert _figure(r"^error +(\S+) relative L2", out) <= 4e-3
    assert 0 < _figure(r"^time +(\S+) ms, median", out) < 1000


@pytest.mark.slow
def test_quickstart_takes_a_checkpoint_and_a_layer() -> None:
    """Biases, and an activation with constants."""
    out = _run("quickstart.py", CHECKPOINTS / "gpt_oss_modelopt_nvfp4", "--layer", "0", "--tokens", "5")
    assert "gpt_oss_modelopt_nvfp4 layer 0" in out
    assert "activation='swigluoai'" in out
    assert _figure(r"^error +(\S+) relative L2", out) <= 4e-3


def test_quickstart_fails_where_the_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The exit status is what a script sees."""
    quickstart = load("examples/quickstart.py")
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--tokens", "3"])
    monkeypatch.setattr(quickstart.torch, "compile", lambda module, fullgraph: lambda *args: module(*args) * 1.01)
    assert quickstart.main() == 1
    assert _figure(r"^error +(\S+) relative L2", capsys.readouterr().out) == pytest.approx(0.01, rel=0.3)


@pytest.mark.slow
def test_transformers_qwen3_moe() -> None:
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")
    out = _run("transformers_qwen3_moe.py")
    assert "Qwen3MoeForCausalLM, experts: moeq" in out
    assert _figure(r"^none +logits (\S+) from", out) <= 1e-5
    assert 1e-2 < _figure(r"^nvfp4 +logits (\S+) from", out) <= 0.2
    assert _figure(r"layers, (\d+) KiB packed", out) < 0.3 * _figure(r"packed, (\d+) KiB in bfloat16", out)


# Matrices are so small that threads cost more than they give, the more so where other processes run.
ON_A_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_qlora_qwen3_moe() -> None:
    """The loss falls, and what was trained is what was exported."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")
    pytest.importorskip("peft", minversion="0.17", reason="needs peft >= 0.17, for target_parameters")
    out = _run("qlora_qwen3_moe.py", **ON_A_CPU)
    assert _figure(r"^loss +\S+ to (\S+) in 40 steps", out) < 0.6 * _figure(r"^loss +(\S+) to", out)
    assert _figure(r"^export +NVFP4, experts the same bits; logits (\S+) from the trained$", out) <= 1e-6
    assert _figure(r"^memory +(\S+) GiB", out) > 0


@pytest.mark.slow
def test_qlora_qwen3_moe_synthetic() -> None:
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")
    pytest.importorskip("peft", minversion="0.17", reason="needs peft >= 0.17, for target_parameters")
    out = _run("qlora_qwen3_moe.py", "--synthetic", "--layers", "2", "--tokens", "256", "--steps", "6", **ON_A_CPU)
    assert re.search(r"^experts +2 layers, \S+ MiB packed", out, re.MULTILINE)
    assert _figure(r"^loss +\S+ to (\S+) in 6 steps of 256 tokens$", out) < _figure(r"^loss +(\S+) to", out)


@pytest.mark.slow
def test_transformers_qwen3_moe_synthetic(tmp_path: Path) -> None:
    """A random model: one graph, and the figures that it prints are those that it writes."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs the experts interface of transformers 5")
    figures = tmp_path / "figures.json"
    out = _run("transformers_qwen3_moe.py", "--synthetic", "--layers", "2", "--tokens", "1,7", "--out", figures)
    assert re.search(r"^  -> \w+", out, re.MULTILINE), "explain() marks the chosen backend"
    records = json.loads(figures.read_text())["records"]
    assert [r["tokens"] for r in records] == [1, 7]
    for r in records:
        assert 0 < r["error"] <= 0.1
        assert r["layers"] == 2 and r["eager_ms"] > 0
        line = rf"^tokens {r['tokens']} .* compiled (\S+) ms; logits"
        assert _figure(line, out) == pytest.approx(r["compiled_ms"], abs=0.006)


@pytest.mark.slow
def test_export_aoti(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_CXX", os.environ.get("CXX", "g++"))
    monkeypatch.setenv("CXX", str(ROOT / "scripts" / "cxx_local_archives.sh"))
    package = tmp_path / "layer.pt2"
    out = _run("export_aoti.py", "--package", package)
    assert re.search(r"^exported .*: moeq.nvfp4_moe.default, bound to backend '\w+'$", out, re.MULTILINE)
    assert _figure(r"^package +(\d+) KiB", out) == round(package.stat().st_size / 1024)
    assert _figure(r"\((\d+) KiB of weights", out) > 30
    assert _figure(r"^difference +(\S+) at most", out) == 0


def test_expert_parallel() -> None:
    """Two processes over gloo, each with half of the experts, against one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = str(ROOT / "examples" / "expert_parallel.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    for rank, experts in ((0, "0-3"), (1, "4-7")):
        assert (
            _figure(rf"^rank {rank} +experts {experts}, {5 + rank} tokens, error (\S+) relative L2$", done.stdout)
            <= 1e-6
        )
    load = re.search(r"^load +\[(.*)\]$", done.stdout, re.MULTILINE)
    assert load and sum(int(n) for n in load[1].split(",")) == (5 + 6) * 2
