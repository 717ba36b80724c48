"""benchmarks/bench_transformers_model.py at small sizes on a CPU: every line of its result is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from modules_by_path import ROOT

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen3_30b_a3b", []),
        pytest.param("gpt_oss_20b", [], marks=pytest.mark.slow),
        pytest.param("qwen3_30b_a3b", ["--own-router"], marks=pytest.mark.slow),
    ],
)
def test_every_number_is_measured(shape: str, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    given = ["--tiny", "--shape", shape, "--batches", "1,2", "--compile", "", "--prefill", "16", "--cache", "128"]
    given += ["--layers", "3"]
    program = [sys.executable, ROOT / "benchmarks" / "bench_transformers_model.py", *given, "--out", out, *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    subprocess.run(program, check=True, env=environment, capture_output=True, cwd=tmp_path)
    result = json.loads(out.read_text())
    assert result["shape"] == shape and result["routers"] == (
        "transformers" if "--own-router" in options else "moeq::route_hidden"
    )
    assert result["layers"] == 3  # TINY has two
    assert result["parameters"] > 200_000 and str(tmp_path) not in out.read_text()
    measured = [(line["what"], line.get("batch")) for line in result["lines"]]
    steps = [(what, batch) for batch in (1, 2) for what in ("decode", "moe", "experts", "profile")]
    assert measured == [*steps, ("prefill", None)]
    timed = [line for line in result["lines"] if line["what"] != "profile"]
    assert all(line["ms"] >= line["ms_min"] > 0 for line in timed)
    profiles = [line for line in result["lines"] if line["what"] == "profile"]
    assert [line["left_out"] for line in profiles] == ["profile: a GPU is needed"] * 2


def test_a_run_that_is_ended_keeps_what_it_knew(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    given = ["--tiny", "--batches", "1", "--compile", "-1", "--prefill", "0", "--cache", "128", "--out", out]
    program = [sys.executable, ROOT / "benchmarks" / "bench_transformers_model.py", *given]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, cwd=tmp_path)
    assert done.returncode != 0  # there is no batch of -1
    assert [line["what"] for line in json.loads(out.read_text())["lines"]] == ["decode", "moe", "experts", "profile"]


@pytest.fixture
def model_graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import model_graphs

    yield model_graphs
    del sys.modules["model_graphs"]


def _kernels(model_graphs: Any, names: list[str]) -> list[Any]:
    """Each takes 2 us, and 1 us lies before the next."""
    return [model_graphs.Kernel(name, 3.0 * i, 3.0 * i + 2.0) for i, name in enumerate(names)]


ATTENTION = ["elementwise_kernel", "nvjet_tst_64x8", "fmha_cutlassF", "gemv2T_kernel", "norm_kernel"]
EXPERTS = ["Memset (Device)", "void moeq::sm90::decode_kernel<1>()", "void moeq::sm90::combine_kernel()"]


@pytest.mark.parametrize("router", [["route_kernel"], ["softmax", "topk", "sum", "div", "copy"]])
@pytest.mark.parametrize("product", [["nvjet_hss_router"], ["sm90_xmma_gemm_splitK", "splitKreduce_kernel"]])
def test_a_router_begins_with_its_product(model_graphs: Any, router: list[str], product: list[str]) -> None:
    layer = [*ATTENTION, *product, *router, *EXPERTS]
    kernels = _kernels(model_graphs, [*layer * 3, "norm_kernel", "nvjet_head"])
    found = model_graphs.shares(kernels[::-1], layers=3)
    before = len(product) + len(router) + 1  # what is set to zero counts as the router's
    assert found["router_us"] == 2.0 * before and found["experts_us"] == 4.0
    assert found["block_us"] == 3.0 * (before + 2) - 1.0 and found["blocks_ms"] == pytest.approx(
        3e-3 * found["block_us"]
    )
    assert found["span_us"] == found["block_us"] + 1.0  # the gap in front
    assert found["step_ms"] == pytest.approx(1e-3 * (3.0 * len(kernels) - 1.0)) and found["kernels"] == len(kernels)


def test_a_router_that_multiplies_itself(model_graphs: Any) -> None:
    """It is no part of the experts, and no product before it is the router's."""
    layer = [*ATTENTION, "void moeq::sm90::route_hidden_kernel<4>(RouteHidden)", *EXPERTS[1:]]
    found = model_graphs.shares(_kernels(model_graphs, layer * 2), layers=2)
    assert (found["router_us"], found["experts_us"], found["block_us"]) == (2.0, 4.0, 8.0)


def test_kernels_of_experts_that_overlap_count_once_in_a_block(model_graphs: Any) -> None:
    names = ["gemm", "route_kernel", "moeq::a", "moeq::b"]
    kernels = [model_graphs.Kernel(name, float(i), 10.0) for i, name in enumerate(names)]
    found = model_graphs.shares(kernels, layers=1)
    assert (found["block_us"], found["experts_us"]) == (10.0, 8.0 + 7.0)


def test_a_kernel_that_begins_early_counts_from_the_end_of_the_one_in_front(model_graphs: Any) -> None:
    times = {"norm": (0.0, 4.0), "moeq::route_hidden_kernel": (1.0, 7.0), "moeq::a": (7.0, 9.0)}
    found = model_graphs.shares([model_graphs.Kernel(name, *time) for name, time in times.items()], layers=1)
    assert (found["block_us"], found["span_us"], found["router_us"]) == (8.0, 5.0, 6.0)


def test_layers_that_are_not_found_are_an_error(model_graphs: Any) -> None:
    with pytest.raises(ValueError, match=r"2 layers of experts must be found, got 1; kernels: .*'moeq::a'"):
        model_graphs.shares(_kernels(model_graphs, ["gemm", "moeq::a", "moeq::b"]), layers=2)
    with pytest.raises(ValueError, match="1 layers of experts must be found, got 0"):
        model_graphs.shares([], layers=1)


def test_a_model_with_experts_on_the_host_is_measured_at_every_split(tmp_path: Path) -> None:
    """benchmarks/bench_host_models.py, without the offload, for which accelerate is needed."""
    out = tmp_path / "result.json"
    given = ["--tiny", "--peer-layers", "0", "--rounds", "2", "--on-gpu", "8,3,0", "--batches", "2", "--out", out]
    program = [sys.executable, ROOT / "benchmarks" / "bench_host_models.py", *given]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    subprocess.run(program, check=True, env=environment, capture_output=True, cwd=tmp_path)
    lines = json.loads(out.read_text())["lines"]
    assert [(line["what"], line["on_gpu"], line["batch"]) for line in lines] == [("decode", n, 2) for n in (8, 3, 0)]
    assert all(line["ms"] >= line["ms_min"] > 0 and line["distance"] < 2e-2 for line in lines)
