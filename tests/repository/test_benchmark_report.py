"""Tables made from result files: which run a cell takes, and that the pages in the repository are up to date."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from modules_by_path import ROOT, load


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return load("scripts/benchmark_report.py")


def _bench(layer: str, m: int, us: float, shape: str = "mixtral", **fields: Any) -> dict[str, Any]:
    record = {"event": "bench", "layer": layer, "shape": shape, "M": m, "us": us, "floor_us": 1.0, "covers": "ids"}
    return record | fields


ENV = {"event": "env"}
FIRST = [
    ENV,
    {"event": "check", "layer": "triton/nvfp4"},
    _bench("triton/nvfp4", 1, 100.0),
    _bench("marlin/nvfp4", 1, 150.0),
    _bench("triton/nvfp4", 64, 300.4),
    _bench("marlin/nvfp4", 64, 900.0),
    _bench("triton/nvfp4-a4", 64, 200.0, floor_us=0.5),
    _bench("triton_kernels+topk/mxfp4", 1, 10.0, covers="logits"),
    _bench("triton/nvfp4", 1, 10.0, shape="tiny"),
]
SECOND = [ENV, _bench("cuda_sm90/nvfp4", 1, 50.0), _bench("humming-indexed/nvfp4", 1, 75.0)]


def _write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_cell_takes_all_its_layers_from_the_last_run(report: ModuleType, tmp_path: Path) -> None:
    cells = report.read(_write(tmp_path / "a", FIRST + SECOND))
    assert {key: set(cell.layers) for key, cell in cells.items()} == {
        ("mixtral", "nvfp4", 1): {"cuda_sm90/nvfp4", "humming-indexed/nvfp4"},
        ("mixtral", "nvfp4", 64): {"triton/nvfp4", "triton/nvfp4-a4", "marlin/nvfp4"},
    }


def test_what_auto_took_goes_by_its_own_name(report: ModuleType, tmp_path: Path) -> None:
    """A file that does not say what it was leaves it out."""
    took = {"backend": "cuda_sm90"}
    records = [ENV, _bench("auto/nvfp4", 1, 40.0, **took), _bench("auto-silu/nvfp4", 1, 30.0, **took)]
    cells = report.read(_write(tmp_path / "a", [*records, _bench("auto/mxfp4", 1, 9.0)]))
    assert {key: set(cell.layers) for key, cell in cells.items()} == {
        ("mixtral", "nvfp4", 1): {"cuda_sm90/nvfp4", "cuda_sm90-silu/nvfp4"}
    }


def test_layers_with_other_activations_may_be_of_another_run(report: ModuleType, tmp_path: Path) -> None:
    """The last one of each: a run of the plain format does not hide them."""
    later = [ENV, _bench("cuda_sm90/nvfp4", 64, 250.0), _bench("marlin/nvfp4", 64, 700.0)]
    cell = report.read(_write(tmp_path / "a", FIRST + later))["mixtral", "nvfp4", 64]
    assert {layer: record["us"] for layer, record in cell.layers.items()} == {
        "cuda_sm90/nvfp4": 250.0,
        "marlin/nvfp4": 700.0,
        "triton/nvfp4-a4": 200.0,
    }


def test_the_table_of_the_readme(report: ModuleType, tmp_path: Path) -> None:
    table = report.readme_table(report.read(_write(tmp_path / "a", FIRST + SECOND)))
    assert table.splitlines()[2] == "| Mixtral-8x7B, NVFP4 | 50.0 / 75.0 (1.50) | 300 / 900 (3.00) |"
    assert table.endswith("|---|---|\n| Marlin (vLLM); humming, indexed | NVFP4: Mixtral-8x7B |")


def test_the_full_table(report: ModuleType, tmp_path: Path) -> None:
    cells = report.read(_write(tmp_path / "a", FIRST))
    assert report.full_table(cells, "mixtral", "nvfp4") == [
        "| Mixtral-8x7B, NVFP4 | M=1 | M=64 |",
        "|---|---:|---:|",
        "| `triton` | 100 | 300 |",
        "| `triton`, 4-bit activations |  | 200 |",
        "| Marlin (vLLM) | 150 | 900 |",
        "| *physical floor* | *1.0* | *1.0* |",
    ]


def test_ratios_are_those_of_the_best_other_library(report: ModuleType, tmp_path: Path) -> None:
    cells = report.read(_write(tmp_path / "a", FIRST))
    assert report.ratios(cells, "mixtral", "nvfp4") == {1: 150 / 100, 64: 900 / 300.4}


def test_a_sweep_is_set_against_triton(report: ModuleType, tmp_path: Path) -> None:
    records = [_bench("cuda_sm90/nvfp4", 8, 50.0), _bench("triton/nvfp4", 8, 60.0), _bench("cuda_sm90/nvfp4", 12, 70.0)]
    _write(tmp_path / report.SWEEP, [ENV, *records, _bench("cuda_sm90/nvfp4", 64, 99.9, shape="dsv3")])

    assert report.page({}, tmp_path).splitlines()[-3:] == [
        "| tokens | Mixtral-8x7B |",
        "|---:|---:|",
        "| 8 | 50.0 (1.20) |",
    ]


def test_other_results_are_added_where_they_are(report: ModuleType, tmp_path: Path) -> None:
    emulated = _bench("emulation/nvfp4", 1, 14000.0, shape="qwen3_30b")
    _write(tmp_path / "h200_emulation.jsonl", [ENV, _bench("triton/nvfp4", 1, 20.0, shape="qwen3_30b"), emulated])
    times = [{"event": "route", "method": "renormalize", "M": m, "us": us} for m, us in ((1, 4.0), (4096, 20.0))]
    _write(tmp_path / "h200_route.jsonl", [ENV, *times])
    example = {"command": "python x", "records": [{"tokens": 1, "eager_ms": 3.0, "compiled_ms": 0.5}]}
    (tmp_path / "h200_example.json").write_text(json.dumps(example))
    text = report.page({}, tmp_path)
    for line in ("| Qwen3-30B-A3B | 1 | 14.0 | 20.0 | 700 |", "| renormalize | 4.0 | 20.0 |", "| 1 | 3.00 | 0.50 |"):
        assert line in text.splitlines()


def test_the_pages_are_what_the_result_files_say(report: ModuleType) -> None:
    cells = report.read(*(report.RESULTS / name for name in report.LAYERS))
    readme = report.README.read_text("utf-8")
    same = report.readme_with_table(readme, cells) == readme and report.PAGE.read_text("utf-8") == report.page(cells)
    assert same, "run: python scripts/benchmark_report.py --write"


def test_every_result_file_is_in_the_index() -> None:
    index = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    names = [p.name for p in (ROOT / "benchmarks" / "results").iterdir() if p.name != "README.md"]
    missing = [name for name in names if f"`{name}`" not in index]
    assert missing == []


@pytest.mark.slow
def test_plots_are_drawn(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot(report.read(_write(tmp_path / "a", FIRST)), "mixtral", tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    for label in ("triton, 4-bit activations", "Marlin (vLLM)", "physical floor", "Mixtral-8x7B, NVFP4"):
        assert label in text
