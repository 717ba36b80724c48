"""What `accuracy="standard"` may choose is made from committed results, by a script that reads nothing into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from modules_by_path import load

import torch_moe_ops as moe
from torch_moe_ops.backends.measured import distance as distances_measured
from torch_moe_ops.backends.measured import records, speed

ENV = {
    "event": "env",
    "device": "NVIDIA H200",
    "capability": [9, 0],
    "torch": "2.11.0",
    "date": "2026-11-22",
    "commit": "abc",
}
ABOUT = {"event": "distance", "format": "fp8", "scheme": "fp8_block", "act_format": "fp8", "weight_scales": None}


def distance(who: str, kind: str, l2: float, row: float, layer: str = "dsv3", tokens: int = 1) -> dict[str, Any]:
    return ABOUT | {"who": who, "kind": kind, "layer": layer, "tokens": tokens, "l2": l2, "row": row}


def bench(backend: str, tokens: int, us: float, fmt: str = "fp8") -> dict[str, Any]:
    sizes = {"E": 256, "k": 8, "H": 7168, "I": 2048, "shape": "dsv3", "covers": "ids"}
    return {"event": "bench", "layer": f"{backend}/{fmt}", "M": tokens, "us": us, **sizes}


OURS = [
    distance("triton_fp8", "ours", 4e-3, 6e-3),
    distance("triton_fp8", "ours", 5e-3, 5e-3, "qwen3_30b"),
    distance("triton", "ours", 2e-3, 2e-3),
]
FIELD = [
    distance("vllm_triton", "emulated", 3e-3, 3e-3),
    distance("vllm_triton", "peer", 8e-3, 1e-2),
    distance("deepgemm", "peer", 1e-2, 8e-3),
    distance("vllm_triton", "emulated", 1e-2, 1e-2, "qwen3_30b"),
]


def measured_with(**fields: Any) -> list[dict[str, Any]]:
    """A backend and what it is compared with, on two layers."""
    lines = (
        distance("triton_fp8", "ours", 2e-3, 5e-3),
        distance("triton_fp8", "ours", 3e-3, 6e-3, "qwen3_30b"),
        distance("vllm_triton", "emulated", 1e-2, 1e-2),
        distance("vllm_triton", "emulated", 1e-2, 1e-2, "qwen3_30b"),
    )
    return [line | fields for line in lines]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load("scripts/distance_table.py")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "TOKENS", {1})
    return module


def write(script: Any, name: str, *lines: dict[str, Any]) -> None:
    (script.RESULTS / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_committed_files_say_what_the_results_say() -> None:
    module = load("scripts/distance_table.py")
    assert module.page(module.PAGE.read_text()) == module.PAGE.read_text()
    assert module.data() == module.DATA.read_text()
    assert json.loads(module.DATA.read_text()).keys() == {"format", "device", "capability", "distances", "times"}


def test_without_results_there_is_nothing_to_choose(script: Any) -> None:
    empty = json.loads(script.data())
    assert (empty["capability"], empty["distances"], empty["times"]) == (None, [], [])
    assert script.table([]) == ['No results yet: `auto` takes what `accuracy="strict"` takes.']


def test_the_nearest_peer_that_was_run_counts_in_every_cell(script: Any) -> None:
    """Of the first cell 4e-3 / 8e-3 and 6e-3 / 8e-3, the emulated one left out; of the second, which has nothing else, 0.5."""
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD)
    entries = {entry["backend"]: entry for entry in json.loads(script.data())["distances"]}
    assert entries["triton_fp8"]["ratio"] == 0.75 and entries["triton"]["ratio"] == 0.25
    assert entries["triton_fp8"]["field"] == "DeepGEMM and vLLM's Triton kernel and vLLM's Triton kernel as emulated"
    assert (entries["triton_fp8"]["l2"], entries["triton_fp8"]["row"]) == ([4e-3, 5e-3], [5e-3, 6e-3])
    assert (entries["triton_fp8"]["layers"], entries["triton"]["layers"]) == (2, 1)


def test_a_cell_without_a_peer_leaves_no_ratio(script: Any) -> None:
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD[:3])
    entries = {entry["backend"]: entry for entry in json.loads(script.data())["distances"]}
    assert (entries["triton_fp8"]["ratio"], entries["triton_fp8"]["field"]) == (None, None)
    assert entries["triton"]["ratio"] == 0.25


def test_a_layer_counts_where_it_was_measured_to_the_end_and_a_backend_where_it_never_failed(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [distance("triton", "ours", 1e-3, 1e-3, tokens=2), distance("vllm_triton", "emulated", 1e-2, 1e-2, tokens=2)]
    lost = {"event": "missing", "format": "fp8", "layer": "glm46", "who": "triton", "kind": "ours", "why": "not finite"}
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD, *more)
    assert {e["backend"]: e["layers"] for e in json.loads(script.data())["distances"]} == {"triton_fp8": 2, "triton": 1}
    monkeypatch.setattr(script, "TOKENS", {1, 2})
    assert {e["backend"]: e["layers"] for e in json.loads(script.data())["distances"]} == {"triton_fp8": 0, "triton": 1}
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD, *more, lost)
    assert [e["backend"] for e in json.loads(script.data())["distances"]] == ["triton_fp8"]
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD, lost | {"who": "humming", "kind": "peer"})
    assert len(json.loads(script.data())["distances"]) == 2


def test_a_contestant_on_a_layer_is_what_its_last_run_says(script: Any) -> None:
    """Another contestant, layer or weight policy of an earlier run stays; one that fails loses what it had."""
    packed = {"weight_policy": "packed"}
    failed = {"event": "missing", "format": "fp8", "layer": "dsv3", "who": "triton_fp8", "kind": "ours", "why": "x"}
    whole = {"event": "missing", "format": "fp8", "layer": "glm46", "why": "the time was over"}
    first = [*OURS, distance("triton", "ours", 3e-3, 3e-3) | packed, whole]
    again = distance("triton", "ours", 1e-3, 1e-3)
    for second, lost in (
        ([again], [OURS[2]]),
        ([failed], [OURS[0]]),
        ([distance("triton", "ours", 1e-3, 1e-3, "glm46")], [whole]),
        ([again | packed], [first[3]]),
    ):
        kept = [line for line in first if line not in lost]
        assert script.merged([("a", first), ("b", second)]) == [*kept, *second]


def test_times_of_a_cell_are_of_one_run_the_last(script: Any) -> None:
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD)
    first = [bench("triton", 1, 30.0), bench("triton_fp8", 1, 20.0), bench("triton", 64, 90.0), bench("marlin", 1, 1.0)]
    write(script, "h200_moe.jsonl", {"event": "env"}, *first, bench("triton", 1, 5.0, "nvfp4"))
    write(script, "h200_standard.jsonl", {"event": "env"}, bench("triton", 1, 31.0))
    (entry,) = json.loads(script.data())["times"]
    assert entry["us"] == {"triton": {"1": 31.0, "64": 90.0}}, "no time of triton_fp8 beside it"
    sizes = (entry["num_experts"], entry["top_k"], entry["hidden_size"], entry["intermediate_size"])
    assert (entry["scheme"], entry["act_format"], sizes) == ("fp8_block", "fp8", (256, 8, 7168, 2048))


def test_what_auto_took_is_a_time_of_that_backend(script: Any) -> None:
    """Of a layer that was timed with silu as well, those times alone."""
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD)
    lines = [
        bench("auto", 1, 20.0) | {"backend": "triton_fp8"},
        bench("triton", 1, 30.0),
        bench("auto", 8, 50.0) | {"backend": "triton", "activation": "swigluoai, biases"},
        bench("auto-silu", 8, 40.0) | {"backend": "triton_fp8"},
        bench("triton-silu", 8, 45.0),
        bench("triton", 8, 52.0) | {"activation": "swigluoai, biases"},
    ]
    lines[3]["layer"] = "auto-silu/fp8"
    write(script, "h200_auto_sweep_own.jsonl", {"event": "env"}, *lines)
    (entry,) = json.loads(script.data())["times"]
    assert entry["us"] == {"triton": {"1": 30.0, "8": 45.0}, "triton_fp8": {"1": 20.0, "8": 40.0}}


def test_each_activation_is_measured_by_itself(script: Any) -> None:
    """In its own entry, of the last run that has it, and in a short table."""
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD)
    write(script, "h200_distances_activations.jsonl", ENV, *measured_with(activation="gelu_tanh"))
    entries = {(e["backend"], e["activation"]): e for e in json.loads(script.data())["distances"]}
    assert set(entries) == {("triton", "silu"), ("triton_fp8", "silu"), ("triton_fp8", "gelu_tanh")}
    assert (entries["triton_fp8", "silu"]["ratio"], entries["triton_fp8", "gelu_tanh"]["ratio"]) == (0.75, 0.6)
    assert entries["triton_fp8", "gelu_tanh"]["row"] == [5e-3, 6e-3]
    table = "\n".join(script.table(script.distances()))
    row = "| FP8 in 128x128 blocks, fp8 activations | `triton_fp8` | `gelu_tanh` | 2 | 3.0e-03 / 6.0e-03 | 0.60 |"
    assert row in table and "| 5.0e-03 / 6.0e-03 | 0.75 |" in table


def test_each_limit_is_measured_by_itself(script: Any) -> None:
    """And compared with what the field's kernels do under the same."""
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD)
    before = json.loads(script.data())["distances"]
    write(script, "h200_distances_activations.jsonl", ENV, *measured_with(limit=1.0))
    (entry,) = [e for e in json.loads(script.data())["distances"] if e not in before]
    assert (entry["activation"], entry["limit"], entry["ratio"]) == ("silu", 1.0, 0.6)
    assert not any("limit" in e for e in before)
    row = "| `triton_fp8` | `silu` with a limit of 1 | 2 | 3.0e-03 / 6.0e-03 | 0.60 |"
    assert any(line.endswith(row) for line in script.table(script.distances()))


def test_what_the_script_writes_is_what_auto_reads(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(script, "h200_distances.jsonl", ENV, *OURS, *FIELD)
    timed = [bench(name, m, us * m) for m in (1, 64, 512) for name, us in (("triton", 30.0), ("triton_fp8", 20.0))]
    write(script, "h200_standard.jsonl", {"event": "env"}, *timed)
    monkeypatch.setattr(records, "measured", lambda: json.loads(script.data()))
    problem = moe.Problem(
        "fp8_block", "fp8", device="cuda", capability=(9, 0), num_experts=256, hidden_size=7168, intermediate_size=2048
    )
    assert distances_measured.too_far("triton_fp8", problem) is None
    mean, text = speed.speed("triton_fp8", "triton", problem)
    assert mean == pytest.approx(2 / 3) and "on this layer" in text
    assert "4.0e-03 to 5.0e-03 from the oracle" in distances_measured.statement("triton_fp8", problem)


def test_the_table_has_a_row_a_contestant_and_says_what_is_missing(script: Any) -> None:
    missing = [
        {"event": "missing", "format": "int4", "layer": "dsv3", "who": "humming", "why": "no such module"},
        {"event": "missing", "format": "fp8", "layer": "mixtral", "why": "the time was over"},
    ]
    more = (
        distance("triton_fp8", "ours", 1e-3, 2e-3, tokens=64),
        distance("vllm_triton", "emulated", 1e-2, 1e-2, tokens=64),
    )
    text = "\n".join(script.table([ENV, *OURS, *FIELD, *more, *missing]))
    assert "| FP8 in 128x128 blocks, fp8 activations | layers | M=1 | M=64 | of the field's |" in text
    assert "| `triton_fp8` | 2 | 5.0e-03 / 6.0e-03 | 1.0e-03 / 2.0e-03 | 0.75 |" in text
    assert "| DeepGEMM | 1 | 1.0e-02 / 8.0e-03 | - |  |" in text
    assert "- humming on INT4 in groups of 128, dsv3: no such module" in text
    assert text.endswith("- FP8 in 128x128 blocks, fp8 activations, mixtral: the time was over")
