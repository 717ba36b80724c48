"""The sweep of models, formats and numbers of tokens: its order, its pieces, what it calls a loss, a cliff, a dip."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_modules
import pytest
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
ALONE = {"standard": "cuda_sm90", "strict": "cuda_sm90"}


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with benchmark_modules.importable(monkeypatch):
        import bench_sweep
        import sweep_cells
        import sweep_findings
        from moe_peers import common

        yield SimpleNamespace(bench=bench_sweep, cells=sweep_cells, findings=sweep_findings, common=common)


def bench(layer: str, us: dict[int, float], fmt: str = "nvfp4", model: str = "qwen3_30b") -> list[dict[str, Any]]:
    return [{"event": "bench", "shape": model, "layer": f"{layer}/{fmt}", "M": m, "us": t} for m, t in us.items()]


def chosen(takes: dict[str, str], classes: dict[str, str], fmt: str = "nvfp4") -> dict[str, Any]:
    return {"event": "choice", "shape": "qwen3_30b", "fmt": fmt, "takes": takes, "classes": classes}


def column(sweep: Any, *records: Any) -> Any:
    (found,) = sweep.findings.columns([r for part in records for r in (part if isinstance(part, list) else [part])])
    return found


def test_the_most_wanted_cells_come_first_and_none_twice(sweep: Any) -> None:
    cells = sweep.cells
    found = cells.pieces(set(), cells.MODELS, cells.FORMATS, cells.TOKENS)
    assert found[0] == ("qwen3_30b", "fp8", (1, 8, 64, 512, 4096))
    every = [(p.model, p.fmt, m) for p in found for m in p.ms]
    assert len(every) == len(set(every))
    assert {m for model, fmt, m in every if (model, fmt) == ("kimi_k2", "int4zp")} == {2**n for n in range(15)}
    assert not [p for p in found if (p.model, p.fmt) == ("gptoss120b", "fp8")]  # 2880 is no multiple of 128


def test_what_is_done_is_not_done_again_and_shares_are_apart(sweep: Any) -> None:
    cells = sweep.cells
    done = cells.cells_done(bench("auto", {1: 10.0, 8: 20.0, 512: 30.0}) + bench("triton", {64: 1.0}))
    every = cells.pieces(done, ["qwen3_30b", "dsv3"], ["nvfp4"], [1, 8, 64, 4096])
    assert every == [("qwen3_30b", "nvfp4", (64, 4096)), ("dsv3", "nvfp4", (1, 8, 64, 4096))]
    assert cells.share(every, "0/2") + cells.share(every, "1/2") == every
    with pytest.raises(SystemExit, match=r"--share: must be I/N .*, got 2/2"):
        cells.share(every, "2/2")


def test_a_line_that_was_cut_off_is_not_read(sweep: Any, tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(json.dumps(bench("auto", {1: 9.0})[0]) + '\n{"event": "ben')
    assert [r["M"] for r in sweep.cells.read(path)] == [1]
    assert sweep.cells.read(tmp_path / "none.jsonl") == []


def test_a_loss_is_a_cell_in_which_auto_takes_over_three_percent_more(sweep: Any) -> None:
    times = [bench("auto", {1: 10.0, 8: 10.0}), bench("marlin", {1: 9.8, 8: 9.0}), bench("triton", {1: 9.9, 8: 9.8})]
    (loss,) = sweep.findings.losses(column(sweep, *times, chosen(ALONE, {"cuda_sm90": "strict", "triton": "strict"})))
    assert (loss.tokens, loss.accuracy, loss.ours, loss.other, loss.us, loss.other_us) == (
        8, "standard", "auto", "marlin", 10.0, 9.0,
    )  # fmt: skip
    assert "8 tokens, standard: auto 10.0 us, marlin 9.0 us, 1.11 times" in sweep.findings.report(
        [line for lines in times for line in lines]
    )


def test_each_class_is_compared_with_its_own_backends(sweep: Any) -> None:
    """The strict choice is not blamed for faster kernels that are farther from the oracle, nor for peers."""
    takes = {"standard": "cuda_sm90_int4", "strict": "triton"}
    classes = {"cuda_sm90_int4": "standard", "triton": "strict", "cuda_sm90": "strict"}
    times = [bench("auto", {8: 10.0}), bench("triton", {8: 20.0}), bench("humming", {8: 10.1})]
    found = column(sweep, *times, bench("cuda_sm90", {8: 15.0}), chosen(takes, classes))
    (loss,) = sweep.findings.losses(found)
    assert (loss.accuracy, loss.ours, loss.other) == ("strict", "triton", "cuda_sm90")
    assert sweep.findings.losses(column(sweep, *times, chosen(takes, classes))) == []


def test_what_is_too_far_from_the_oracle_or_computes_other_numbers_is_no_rival(sweep: Any) -> None:
    others = bench("triton_fp8", {8: 1.0}) + bench("cuda_sm90_packed", {8: 1.0})
    found = column(sweep, bench("auto", {8: 10.0}), others, chosen(ALONE, {"cuda_sm90": "strict"}))
    assert sweep.findings.losses(found) == []


def test_peers_are_compared_with_the_layer_that_does_their_work(sweep: Any) -> None:
    takes, classes = {"standard": "cuda_sm90", "strict": "cuda_sm90"}, {"cuda_sm90": "strict"}
    both = bench("auto", {8: 12.0}) + bench("auto-silu", {8: 10.0}) + bench("marlin", {8: 10.0})
    assert sweep.findings.losses(column(sweep, both, chosen(takes, classes))) == []


def test_other_libraries_beside_what_prepare_takes(sweep: Any) -> None:
    takes, classes = {"standard": "cuda_sm90", "strict": "cuda_sm90"}, {"cuda_sm90": "strict", "triton": "strict"}
    times = bench("auto", {1: 10.0, 8: 10.0, 64: 10.0}) + bench("triton", {1: 1.0}) + bench("marlin", {1: 15.0, 8: 9.0})
    lines = [*times, *bench("humming-indexed", {1: 20.0}), chosen(takes, classes)]
    assert sweep.findings.beside_peers([column(sweep, *lines)]) == {"nvfp4": [1.5, 0.9]}
    assert "| nvfp4 | 2 | 0.90 | 1.20 | 1.50 | 1 |" in sweep.findings.report(lines).splitlines()
    assert "other library" not in sweep.findings.report(bench("auto", {1: 10.0}) + bench("triton", {1: 1.0}))


def test_a_cell_is_that_of_its_last_run(sweep: Any) -> None:
    env = [{"event": "env"}]
    old = env + bench("auto", {8: 10.0, 64: 30.0}) + bench("marlin", {8: 5.0})
    new = env + bench("auto", {8: 9.0})
    assert column(sweep, old, new).cells == {8: {"auto": 9.0}, 64: {"auto": 30.0}}


def test_cliffs_and_dips_are_steps_of_over_ten_percent(sweep: Any) -> None:
    found = sweep.findings.steps(column(sweep, bench("auto", {1: 10.0, 2: 21.9, 4: 50.0, 8: 40.0, 64: 40.0})))
    assert [(s.kind, s.tokens) for s in found] == [("dip", (2, 4)), ("cliff", (4, 8))]


def test_the_report_in_the_results_is_that_of_the_file_beside_it(sweep: Any) -> None:
    """python benchmarks/bench_sweep.py --read > benchmarks/results/h200_auto_sweep.md"""
    path = sweep.bench.RESULTS
    assert path.with_suffix(".md").read_text("utf-8") == sweep.findings.report(sweep.cells.read(path)) + "\n"


def test_a_piece_is_timed_on_a_cpu_too(sweep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, called once, timed, and told: `auto` by its own name beside what it did not take."""
    import torch
    from moe_peers import runner

    monkeypatch.setattr(sweep.common, "DEV", "cpu")
    monkeypatch.setitem(sweep.common.SHAPES, "qwen3_30b", sweep.common.Shape("qwen3_30b", 4, 2, 256, 128))
    out = tmp_path / "sweep.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench_sweep.py", "--out", str(out), "--ms", "1,8", "--reps", "1", "--peers", ""])
    args, sink = sweep.bench.parser().parse_args(), sweep.common.Sink(out)
    piece = sweep.cells.Piece("qwen3_30b", "nvfp4", (1, 8))
    with torch.inference_mode():
        assert sweep.bench.run_piece(piece, args, runner.Context(tmp_path), sink, float("inf"))
    sink.file.close()
    records = sweep.cells.read(out)
    assert [r["takes"] for r in records if r["event"] == "choice"] == [{"standard": "cpu", "strict": "cpu"}]
    assert sweep.cells.cells_done(records) == {("qwen3_30b", "nvfp4", 1), ("qwen3_30b", "nvfp4", 8)}
    assert not [r for r in records if r["event"] == "error"]
    assert ("dsv3", "nvfp4", (1, 8)) in sweep.bench.left_of(args)
    assert piece not in sweep.bench.left_of(args)
    assert "2 cells of 1 layers" in sweep.findings.report(records)
