"""`python -m torch_moe_ops doctor`: every backend on every device, with what it runs or why it runs nothing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from modules_by_path import ROOT

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.commands import doctor
from torch_moe_ops.core.schemes import SCHEMES

CPU = doctor.Device("CPU", "cpu", None)
HOPPER = doctor.Device("a Hopper GPU", "cuda", (9, 0))


def test_the_command_names_every_backend_for_the_cpu() -> None:
    command = [sys.executable, "-m", "torch_moe_ops", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"torch {torch.__version__}" in done.stdout
    on_cpu = done.stdout.split("on CPU:\n")[1].split("\non ")[0]
    assert re.findall(r"^  (?:ok|no) (\S+)", on_cpu, re.MULTILINE) == list(BACKENDS)


def test_the_reference_runs_every_scheme() -> None:
    assert doctor.usable(BACKENDS["reference"], CPU) == (list(SCHEMES), [])


def test_a_backend_that_runs_nothing_says_why() -> None:
    schemes, reasons = doctor.usable(BACKENDS["cuda_sm90"], CPU)
    assert schemes == []
    assert "device must be one of ['cuda'], got 'cpu'" in reasons


def test_reasons_that_only_some_formats_have_are_not_the_machine_s() -> None:
    _, reasons = doctor.usable(BACKENDS["cuda_sm90"], HOPPER)
    assert not any("scheme must be" in reason for reason in reasons)


def test_a_package_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libcudart.so.13 is missing")

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    assert any(line == "triton: installed, but does not import: libcudart.so.13 is missing" for line in doctor.report())


def test_what_reads_its_output_may_end() -> None:
    """As in `python -m torch_moe_ops doctor | head -1`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "torch_moe_ops", "doctor"], cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "BrokenPipeError" not in process.stderr.read()
    assert process.returncode == 1
