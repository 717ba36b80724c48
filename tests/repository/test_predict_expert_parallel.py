"""benchmarks/predict_expert_parallel.py: its formula on numbers that are made up to follow it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import predict_expert_parallel as predict

START, RATE = 12.0, 150_000.0  # us, bytes a us
TOKENS = (1, 64, 4096)


def exchange_of(m: int) -> float:
    return START + 2 * m * 4096 / RATE


@pytest.fixture
def measured(tmp_path: Path) -> predict.Measured:
    """One GPU takes 2 us a token, two ranks' local ops a tenth more than half of it."""
    path = tmp_path / "lines.jsonl"
    lines = [{"gpu": "x"}, {"shape": "qwen3_30b", "backend": "y"}]
    for m in TOKENS:
        us = {
            "one gpu": 4.0 * m,
            "local op": 2.2 * m,
            "total, nccl bfloat16": 9.0,
            "exchange, nccl bfloat16": exchange_of(m),
        }
        lines.append({"shape": "qwen3_30b", "m": m, "ranks": 2, "us": us})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return predict.read(path)[0]


def test_start_and_rate_are_found(measured: predict.Measured) -> None:
    line = predict.lines_of([measured], measured)["nccl"]
    assert line.start == pytest.approx(START) and line.rate == pytest.approx(RATE)


@pytest.mark.parametrize("m", TOKENS)
def test_two_ranks_are_what_was_measured(measured: predict.Measured, m: int) -> None:
    line = predict.lines_of([measured], measured)["nccl"]
    us, efficiency = predict.predict(measured, line, 2, m)  # type: ignore[misc]
    assert us == pytest.approx(2.2 * m + exchange_of(m))
    assert efficiency == pytest.approx(2 * m / us)


def test_more_ranks_and_hosts(measured: predict.Measured) -> None:
    m, row = 64, 4096
    line = predict.lines_of([measured], measured)["nccl"]
    assert predict.one_gpu(measured, 8 * m) == pytest.approx(2 * 8 * m)  # between what was measured
    assert predict.one_gpu(measured, 8 * 4096) == pytest.approx(2 * 8 * 4096)  # and beyond
    us, _ = predict.predict(measured, line, 8, m)  # type: ignore[misc]
    assert us == pytest.approx(2.2 * m + START + 7 * 2 * m * row / RATE)
    us, _ = predict.predict(measured, line, 32, m)  # type: ignore[misc]
    assert us == pytest.approx(2.2 * m + 3 * START + 24 * 2 * m * row / predict.NETWORK)
    assert "nccl, 32 ranks (4 hosts)" in predict.table([measured], measured)[0]


def test_what_is_not_known_is_left_out(measured: predict.Measured) -> None:
    """Few tokens say nothing of many more; the rate is that of the shape with the most bytes."""
    few = measured._replace(
        one={2: 4.0, 128: 256.0}, skew={1: 1.1, 64: 1.1}, exchange={"nccl": {1: START + 1, 64: 99.0}}, shape="tiny"
    )
    assert predict.one_gpu(few, 129) is None and predict.one_gpu(few, 128) == 256.0
    line = predict.lines_of([few, measured], few)["nccl"]
    assert line.rate == pytest.approx(RATE) and line.start == pytest.approx(START + 1, abs=0.1)
    assert predict.table([few, measured], few)[-1].endswith("| - | - | - | - |")


def test_times_of_one_gpu_go_on_where_two_ranks_ended(measured: predict.Measured, tmp_path: Path) -> None:
    """Those that two ranks had stay; a row that two ranks did not have takes the skew of the most tokens they had."""
    few = measured._replace(one={2: 4.0, 128: 256.0}, skew={1: 1.5, 64: 1.2}, shape="deepseek_v3")
    sweep = tmp_path / "sweep.jsonl"
    lines = [{"event": "env"}]
    for m, layer, shape in ((128, "cuda_sm90/nvfp4", "dsv3"), (2048, "triton/nvfp4", "dsv3")):
        lines.append({"event": "bench", "layer": layer, "shape": shape, "M": m, "us": 1.0})
    lines += [
        {"event": "bench", "layer": "cuda_sm90/nvfp4", "shape": "dsv3", "M": m, "us": 3.0 * m} for m in (512, 2048)
    ]
    sweep.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row.split()[1] for row in predict.table([few, measured], few)[2:]] == ["1", "64"]
    predict.add_one_gpu([few, measured], sweep)
    assert few.one == {2: 4.0, 128: 256.0, 512: 1536.0, 2048: 6144.0} and max(measured.one) == 8192
    line = predict.lines_of([few, measured], few)["nccl"]
    us, efficiency = predict.predict(few, line, 2, 256)  # type: ignore[misc]
    assert us == pytest.approx(1.2 * 1536 / 2 + predict.exchange(few, line, 2, 256))
    assert efficiency == pytest.approx(1536 / 2 / us)
    assert [row.split()[1] for row in predict.table([few, measured], few)[2:]] == ["1", "64", "4096"]


def test_four_ranks_are_what_was_measured(tmp_path: Path) -> None:
    """Three times the bytes of two ranks enter each of four."""
    path = tmp_path / "lines.jsonl"
    lines = []
    for m in TOKENS:
        exchange = START + 3 * 2 * m * 4096 / RATE
        us = {"one gpu": 8.0 * m, "local op": 2.2 * m, "exchange, p2p bfloat16": exchange}
        lines.append({"shape": "qwen3_30b", "m": m, "ranks": 4, "us": us})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    of_four = predict.read(path)[0]
    line = predict.lines_of([of_four], of_four)["p2p"]
    assert line.start == pytest.approx(START) and line.rate == pytest.approx(RATE)
    us, _ = predict.predict(of_four, line, 4, 64)  # type: ignore[misc]
    assert us == pytest.approx(2.2 * 64 + START + 6 * 64 * 4096 / RATE)
    assert "p2p, 2 ranks" not in predict.table([of_four], of_four)[0]


def test_lines_of_other_ranks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    us = {"one gpu": 1.0, "local op": 1.0}
    lines = [{"shape": "qwen3_30b", "m": 1, "ranks": ranks, "us": us} for ranks in (2, 4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="as many ranks, got 2 and 4"):
        predict.read(path)
