"""From outcomes of tests to a record, and from records to the support table."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import recording
import torch
from modules_by_path import ROOT, load

from torch_moe_ops.backends import BACKENDS, tested
from torch_moe_ops.core.schemes import SCHEMES

merge = load("scripts/merge_records.py")
table = load("scripts/support_table.py")

NOW = {name: f"digest of {name}" for name in BACKENDS}
ABOUT = {
    "commit": "a" * 40, "date": "2026-01-02", "digests": NOW, "device": "NVIDIA H200", "capability": [9, 0],
    "cpu_isa": "avx512", "versions": {"torch": "2.11", "triton": "3.6", "cuda": "13.0", "flashinfer": "0.7"}, "required": ["cuda_sm90"],
}  # fmt: skip
SM90 = ["cuda_sm90", "nvfp4", "none", "exact", "sm90"]
TRITON = ["triton", "nvfp4", "none", "exact", "sm90"]
CONTRACT = ["flashinfer_trtllm", "nvfp4", "nvfp4", "exact", "simulator"]


def line(test: str, outcome: str, *ran: list[str], when: str = "call", **more: Any) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "when": when, "ran": list(ran), "seconds": 1.5, **more}


def run(folder: Path, name: str, lines: list[dict[str, Any]], **about: Any) -> None:
    folder.mkdir(exist_ok=True)
    every = [{"about": ABOUT | about}, *lines]
    (folder / f"outcomes-{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in every))


LINES = [
    line("tests/a.py::one", "passed", SM90, TRITON),
    line("tests/a.py::two", "failed", TRITON),
    line("tests/b.py::three", "skipped", SM90, when="setup", why="needs more memory"),
    line("tests/b.py::four", "passed", CONTRACT),
    line("tests/b.py::five", "passed"),
]


def row(made: dict[str, Any], backend: str) -> dict[str, int]:
    (found,) = (r for r in made["rows"] if r["backend"] == backend)
    return {name: found[name] for name in ("passed", "failed", "skipped")}


def test_a_record_counts_by_backend(tmp_path: Path) -> None:
    run(tmp_path, "1", LINES)
    made = merge.record(tmp_path)
    assert made["totals"] == {"passed": 3, "failed": 1, "skipped": 1}
    assert row(made, "cuda_sm90") == {"passed": 1, "failed": 0, "skipped": 1}
    assert row(made, "triton") == {"passed": 1, "failed": 1, "skipped": 0}
    assert made["failed"] == ["tests/a.py::two"] and made["skipped"] == {"needs more memory": 1}
    assert made["files"]["tests/b.py"] == {"passed": 2, "failed": 0, "skipped": 1}
    assert made["commit"] == "a" * 40 and made["device"] == "NVIDIA H200" and merge.missing(made) == []
    assert json.loads(merge.text_of(made)) == made


def test_what_any_run_requires_has_to_have_run(tmp_path: Path) -> None:
    run(tmp_path, "1", LINES, required=["cpu", "cuda_sm90"])
    run(tmp_path, "2", LINES)
    made = merge.record(tmp_path)
    assert made["required"] == ["cpu", "cuda_sm90"] and merge.missing(made) == ["cpu"]


def test_what_is_left_out_is_named_with_its_outcomes(tmp_path: Path) -> None:
    run(tmp_path, "1", LINES)
    made = merge.record(tmp_path, without=("tests/a.py::two", "tests/b.py"), because="they were wrong")
    assert (made["totals"]["passed"], made["failed"], row(made, "triton")["failed"]) == (1, [], 0)
    assert made["left_out"] == {
        "tests": ["tests/a.py::two", "tests/b.py"], "because": "they were wrong", "passed": 2, "failed": 1, "skipped": 1,
    }  # fmt: skip
    assert "`tests/b.py` (2 passed, 1 failed, 1 skipped): they were wrong" in table.Table([made], NOW).markdown()
    with pytest.raises(ValueError, match="needs --because"):
        merge.record(tmp_path, without=("tests/a.py",))


def test_a_backend_of_a_test_is_in_no_row(tmp_path: Path) -> None:
    run(tmp_path, "1", [line("tests/a.py::one", "passed", SM90, ["mine", *SM90[1:]])])
    assert [found["backend"] for found in merge.record(tmp_path)["rows"]] == ["cuda_sm90"]


def test_the_last_outcome_of_a_test_counts(tmp_path: Path) -> None:
    run(tmp_path, "1", LINES)
    run(tmp_path, "2", [line("tests/a.py::two", "passed", TRITON)])
    made = merge.record(tmp_path)
    assert made["totals"] == {"passed": 4, "failed": 0, "skipped": 1} and made["failed"] == []
    run(tmp_path, "3", [line("tests/a.py::two", "passed", TRITON), line("tests/a.py::two", "failed", when="teardown")])
    made = merge.record(tmp_path)
    assert made["failed"] == ["tests/a.py::two"] and row(made, "triton")["failed"] == 1


def test_runs_of_different_states_make_no_record(tmp_path: Path) -> None:
    run(tmp_path, "1", LINES, digests=NOW | {"triton": "other"})
    run(tmp_path, "2", LINES)
    with pytest.raises(ValueError, match=r"outcomes-1.jsonl differs .* in \['digests'\]"):
        merge.record(tmp_path)
    run(tmp_path, "1", LINES, commit="b" * 40)
    with pytest.raises(ValueError, match="different commits"):
        merge.record(tmp_path)


def test_a_run_without_a_commit_takes_that_of_the_same_contents(tmp_path: Path) -> None:
    run(tmp_path, "1", LINES, commit=None)
    assert merge.record(tmp_path, "c" * 40, NOW)["commit"] == "c" * 40
    for head, now in (("c" * 40, NOW | {"cpu": "other"}), (None, NOW)):
        with pytest.raises(ValueError, match=r"no run of .* knew its commit"):
            merge.record(tmp_path, head, now)


def test_a_required_backend_that_nothing_ran_is_missing(tmp_path: Path) -> None:
    run(tmp_path, "1", LINES, required=["cuda_sm90", "cuda_sm90_fp8"])
    assert merge.missing(merge.record(tmp_path)) == ["cuda_sm90_fp8"]


def test_cells_of_the_in_graph_matrix_are_in_a_record(tmp_path: Path) -> None:
    cell = {
        "backend": "auto", "chosen": "triton", "scheme": "none", "act_format": "none", "input_scale": "none",
        "weight_policy": "exact", "tokens": 1, "form": "routed", "front": "copy", "time": 2.0,
        "replays": 12, "right": 12, "repeated": 12, "like_eager": 12, "worst": 0.002, "bound": 0.004,
    }  # fmt: skip
    wrong = cell | {"front": "route", "right": 0, "worst": 1.4}
    again = cell | {"front": "early", "right": 3, "time": 1.0}
    run(tmp_path, "1", LINES)
    cells = (cell, wrong, again, again | {"time": 3.0, "right": 12})
    (tmp_path / "in_graph-7.jsonl").write_text("".join(json.dumps(c) + "\n" for c in cells))
    (made,) = merge.record(tmp_path)["in_graph"]
    assert made["cells"] == 3 and made["replays"] == 36 and made["right"] == 24 and made["worst"] == 1.4
    assert made["wrong"] == ["routed behind route"]


def made_of(tmp_path: Path, lines: list[dict[str, Any]] = LINES) -> dict[str, Any]:
    run(tmp_path, "1", lines)
    return merge.record(tmp_path)


def test_the_table_says_what_a_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("cuda_sm90", "triton", "flashinfer_trtllm")  # whatever others are registered
    monkeypatch.setattr(table, "BACKENDS", {name: BACKENDS[name] for name in known})
    made = made_of(tmp_path)
    found = table.Table([made], NOW)
    assert found.status("cuda_sm90", "nvfp4", "none", "sm90") == "tested"
    assert found.status("cuda_sm90", "nvfp4", "none", "sm80") == "not run"
    assert found.status("cuda_sm90", "nvfp4", "nvfp4", "sm90") == "not run"
    assert found.status("triton", "nvfp4", "none", "sm90") == "1 of 2 tests failed at aaaaaaa"
    assert found.status("flashinfer_trtllm", "nvfp4", "nvfp4", "sm100") == "by contract"
    cell = found.cell(SCHEMES["nvfp4"], "none", "cuda", (9, 0))
    assert cell == "cuda_sm90: tested; triton: 1 of 2 tests failed at aaaaaaa"
    assert table.Table([], NOW).cell(SCHEMES["nvfp4"], "none", "cuda", (9, 0)) == "cuda_sm90, triton: not run"
    assert (
        "NVIDIA H200, commit aaaaaaa, 2026-01-02, torch 2.11, triton 3.6, flashinfer 0.7: 3 passed, 1 failed"
        in found.markdown()
    )


def test_the_table_says_what_changed_since(tmp_path: Path) -> None:
    found = table.Table([made_of(tmp_path)], NOW | {"cuda_sm90": "other", "flashinfer_trtllm": "other"})
    assert found.status("cuda_sm90", "nvfp4", "none", "sm90") == "tested at aaaaaaa, changed since"
    assert found.status("flashinfer_trtllm", "nvfp4", "nvfp4", "sm100") == "by contract at aaaaaaa, changed since"
    assert found.status("triton", "nvfp4", "none", "sm90") == "1 of 2 tests failed at aaaaaaa"


def test_of_several_records_that_of_the_present_contents_counts(tmp_path: Path) -> None:
    old = made_of(tmp_path) | {"commit": "b" * 40, "date": "2026-01-01"}
    new = old | {"commit": "c" * 40, "date": "2026-01-03", "digests": NOW | {"cuda_sm90": "of another state"}}
    before = {**old, "digests": new["digests"]}
    said = [
        table.Table(records, NOW).status("cuda_sm90", "nvfp4", "none", "sm90") for records in ([new, old], [old, new])
    ]
    assert said == ["tested", "tested"]
    failed = {**old, "rows": [row | {"passed": 0, "failed": 1} for row in old["rows"]]}
    for records in ([old, failed], [failed, old, new]):
        assert (
            table.Table(records, NOW).status("cuda_sm90", "nvfp4", "none", "sm90") == "1 of 1 tests failed at bbbbbbb"
        )
    for records in ([before, new], [new, before]):
        assert (
            table.Table(records, NOW).status("cuda_sm90", "nvfp4", "none", "sm90") == "tested at ccccccc, changed since"
        )


def test_an_installed_library_knows_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_of(tmp_path)
    file = tmp_path / "tested.json"
    file.write_text(table.Table([made], NOW).distilled())
    monkeypatch.setattr(tested, "FILE", file)
    tested.records.cache_clear()
    try:
        assert tested.was_run("cuda_sm90", "nvfp4", "none", "cuda", (9, 0))
        assert not tested.was_run("cuda_sm90", "nvfp4", "none", "cuda", (10, 0))
        assert not tested.was_run("cuda_sm90", "mxfp4", "none", "cuda", (9, 0))
        assert not tested.was_run("triton", "nvfp4", "none", "cuda", (9, 0))  # a test failed
    finally:
        tested.records.cache_clear()


PLANTED = """
import gpu_layers, pytest, problems
import torch_moe_ops as moe

def layer(act="nvfp4"):
    case = problems.Case(act_format=act)
    w = moe.prepare(problems.make_raw(case), act_format=act, backend="cpu")
    return moe.fused_moe_routed(*problems.make_batch(case), w)

def test_right():
    layer()

def test_wrong():
    layer("none")
    assert not __import__("os").environ.get("WRONG")

@pytest.mark.parametrize("fmt", [gpu_layers.Format("triton", "nvfp4", "fp8", "none", "exact")])
def test_elsewhere(fmt):
    pytest.skip("needs a CUDA device")

def test_other():
    pytest.skip("needs more memory")

@pytest.mark.gpu
def test_marked():
    pytest.skip("too few bytes")
"""


class Run(NamedTuple):
    status: int
    text: str


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Runs the planted tests under this suite's own plugins, in this process: (options, **environment)."""
    (tmp_path / "test_planted.py").write_text(PLANTED)

    def run_planted(*options: str, **environment: str) -> Run:
        for name in ("MOEQ_RECORD", "MOEQ_REQUIRE", "WRONG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib", "-c", os.devnull]
            arguments += [f"--rootdir={tmp_path}", "-o", "markers=gpu", "-W", "ignore", *options]
            status = pytest.main([*arguments, str(tmp_path / "test_planted.py")], plugins=[Plugins()])
        return Run(int(status), out.getvalue())

    return run_planted


class Plugins:
    def pytest_configure(self, config: pytest.Config) -> None:
        load("tests/conftest.py").pytest_configure(config)


def test_a_run_is_recorded_and_resumed(planted: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "record"
    done = planted(MOEQ_RECORD=str(folder), WRONG="1")
    assert "1 failed, 1 passed, 3 skipped" in done.text, done.text
    made = merge.record(folder, "c" * 40, recording.about()["digests"])
    assert made["totals"] == {"passed": 1, "failed": 1, "skipped": 3}
    assert made["failed"] == ["test_planted.py::test_wrong"]
    counts = {
        tuple(r[n] for n in ("backend", "act_format")): (r["passed"], r["failed"], r["skipped"]) for r in made["rows"]
    }
    assert counts[("cpu", "nvfp4")] == (1, 0, 0) and counts[("cpu", "none")] == (0, 1, 0)
    assert counts[("triton", "fp8")] == (0, 0, 1)

    done = planted(MOEQ_RECORD=str(folder))
    assert "1 passed, 3 skipped" in done.text and "failed" not in done.text, done.text
    assert merge.record(folder, "c" * 40, made["digests"])["totals"] == {"passed": 2, "failed": 0, "skipped": 3}


@pytest.mark.slow
def test_processes_of_xdist_write_one_record(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    paths = (ROOT, ROOT / "tests", ROOT / "tests" / "support")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "MOEQ_RECORD": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", "2", "-c", os.devnull, f"--rootdir={tmp_path}"]
    subprocess.run([*command, "-o", "markers=gpu", "test_planted.py"], cwd=tmp_path, env=env, timeout=300)
    made = merge.record(tmp_path, "c" * 40, recording.about()["digests"])
    assert made["totals"] == {"passed": 2, "failed": 0, "skipped": 3}
    assert sum(r["passed"] for r in made["rows"] if r["backend"] == "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is not there must be missing")
def test_a_required_backend_that_is_not_here_fails_what_would_be_skipped(planted: Callable[..., Run]) -> None:
    done = planted(MOEQ_REQUIRE="triton,cpu")
    assert done.status == 1 and "2 failed, 2 passed, 1 skipped" in done.text, done.text
    assert re.search(r"MOEQ_REQUIRE asks for triton \(not here: (torch sees no CUDA device|.*triton)", done.text), (
        done.text
    )
    done = planted("-k", "right", MOEQ_REQUIRE="triton")  # nothing was skipped, but it is not here
    assert done.status == 1 and "1 passed" in done.text


def test_required_backends_that_are_here_change_nothing(planted: Callable[..., Run]) -> None:
    done = planted(MOEQ_REQUIRE="cpu,reference")
    assert done.status == 0 and "2 passed, 3 skipped" in done.text, done.text


def test_an_unknown_name_is_an_error(planted: Callable[..., Run]) -> None:
    done = planted(MOEQ_REQUIRE="cuda_sm09")
    assert done.status == 4 and "MOEQ_REQUIRE must name backends of" in done.text, done.text


def test_records_are_whole() -> None:
    for made in table.read_records():
        assert made["format"] == merge.FORMAT and set(NOW) >= set(made["digests"]), made["device"]
        assert made["totals"]["failed"] == len(made["failed"])
        counted = copy.deepcopy(made["rows"])
        assert all(r["backend"] in BACKENDS and r["passed"] + r["failed"] + r["skipped"] for r in counted)
