"""MOEQ_REQUIRE=cuda_sm90,triton: backends that must be here. Where one is not, tests fail that would be skipped for it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attribution import backends_of

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.problem import Problem

VARIABLE = "MOEQ_REQUIRE"
# Reasons of skipped tests that speak of a GPU, of what was compiled for it, or of Triton.
_GPU = re.compile(r"\bcuda\b|\bgpu\b|\bhopper\b|compute capability|\btriton\b|extension", re.IGNORECASE)
_CPU = re.compile(r"C\+\+ extension|moeq_C|\bcpu\b", re.IGNORECASE)


def names(value: str) -> tuple[str, ...]:
    """The backends of a list with commas; pytest.UsageError for one that the registry lacks."""
    found = tuple(name.strip() for name in value.split(",") if name.strip())
    for name in found:
        if name not in BACKENDS:
            raise pytest.UsageError(f"{VARIABLE} must name backends of {list(BACKENDS)}, got {name!r}")
    return found


def absent(required: tuple[str, ...]) -> dict[str, str]:
    """Of the required backends, those that cannot run here, with the reason."""
    return {name: "; ".join(reasons) for name in required if (reasons := _reasons(name))}


def _reasons(name: str) -> list[str]:
    """What this machine lacks: unmet requirements of what is installed, and of the device where others would do."""
    device = "cpu" if name in ("cpu", "reference") else "cuda"
    there = device == "cpu" or torch.cuda.is_available()
    anywhere = Problem("none", device=device)
    here = replace(anywhere, capability=torch.cuda.get_device_capability()) if device == "cuda" and there else anywhere
    found = [] if there else ["torch sees no CUDA device"]
    for requirement in BACKENDS[name].requires:
        text = requirement.unmet(here)
        if text is not None and (requirement.of_machine or requirement.unmet(anywhere) is None):
            found.append(text)
    return found


def concerns(reason: str, missing: dict[str, str], on_gpu: bool, said: frozenset[str]) -> bool:
    """Whether a test was skipped because of a missing backend. on_gpu: it is marked as one that needs a GPU.
    said: the backends that it says it is of; where it says none, the reason has to."""
    if said:
        return not said.isdisjoint(missing)
    for name, why in missing.items():
        vocabulary = _CPU if name == "cpu" else _GPU
        if name in reason or why in reason or vocabulary.search(reason) or (on_gpu and name != "cpu"):
            return True
    return False


class Required:
    """A pytest plugin. In every process, since each makes its own reports."""

    def __init__(self, missing: dict[str, str], controller: bool):
        self.missing, self.controller = missing, controller

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        on_gpu = item.get_closest_marker("gpu") is not None
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        return self._failed(report, on_gpu, backends_of(item.path, parameters))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        return self._failed((yield), on_gpu=False, said=backends_of(collector.path, {}))

    def _failed(self, report: Any, on_gpu: bool, said: frozenset[str]) -> Any:
        if not report.skipped or hasattr(report, "wasxfail"):
            return report
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if concerns(reason, self.missing, on_gpu, said):
            report.outcome = "failed"
            report.longrepr = f"{VARIABLE} asks for {self._text()}, so this must not be skipped: {reason}"
        return report

    def _text(self) -> str:
        return ", ".join(f"{name} (not here: {why})" for name, why in self.missing.items())

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.missing and self.controller and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):  # fmt: skip
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.missing:
            terminalreporter.write_line(f"{VARIABLE}: {self._text()}", red=True)


def plugin(config: pytest.Config) -> Required | None:
    """A Required where MOEQ_REQUIRE is set."""
    required = names(os.environ.get(VARIABLE, ""))
    return Required(absent(required), not hasattr(config, "workerinput")) if required else None
