"""The program that measures distances from the oracle: what is measured, and what cannot be, is in its result."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_modules
import pytest
import torch
from modules_by_path import load
from paths import ROOT


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    with benchmark_modules.importable(monkeypatch):
        import distance_cases
        import distances
        import peer_numerics
        from moe_peers import common

        monkeypatch.setattr(common, "DEV", "cpu")
        monkeypatch.setitem(distance_cases.LAYERS, "tiny", common.Shape("tiny", 8, 2, 256, 256))
        usual = set(distance_cases.BATCHES)
        monkeypatch.setattr(distance_cases, "BATCHES", {1: 3, 7: 2})
        yield SimpleNamespace(cases=distance_cases, run=distances, numerics=peer_numerics, common=common, usual=usual)


@pytest.mark.parametrize(
    "fmt",
    [
        "fp8",
        "fp8row",
        "fp8half",
        "int4",
        "int4g32",
        "mxint4",
        "int4zp",
        "int4f16",
        "int4zpf16",
        "int4g32zp",
        "int4zpf32",
    ],
)
def test_a_layer_is_measured_and_a_peer_that_is_not_there_is_named(program: Any, fmt: str, tmp_path: Path) -> None:
    """Our exact kernels are nearer to the oracle than what the peers round; both are far from 0 and from 1."""
    lines = list(program.cases.measure(program.cases.Case(fmt, "tiny"), tmp_path, "cpu"))
    found = {(line["kind"], line["tokens"]): line for line in lines if line["event"] == "distance"}
    assert {tokens for _, tokens in found} == {1, 7}
    for tokens in (1, 7):
        assert found["emulated", tokens]["l2"] <= found["emulated", tokens]["row"] <= 0.05
        if ("ours", tokens) in found:  # the extension is built
            assert 1e-3 < 1.5 * found["ours", tokens]["l2"] < found["emulated", tokens]["l2"]
    missing = {line["who"]: line["why"] for line in lines if line["event"] == "missing"}
    wanted = {n for n in program.cases.PEERS[fmt] if n not in program.cases.COMPILED_FOR}
    assert set(missing) == wanted and all(missing.values()), missing


@pytest.mark.parametrize("activation", ["gelu_tanh", "swigluoai", "relu2_no_mul"])
def test_other_activations_are_compared_with_what_peers_round(program: Any, activation: str, tmp_path: Path) -> None:
    """No peer runs them, so none is missing; an emulation of silu would be far from this oracle."""
    lines = list(program.cases.measure(program.cases.Case("fp8row", "tiny"), tmp_path, "cpu", activation))
    assert {line["event"] for line in lines} == {"distance"} and {line["activation"] for line in lines} == {activation}
    emulated = [line["l2"] for line in lines if line["kind"] == "emulated"]
    assert len(emulated) == 2 and all(1e-3 < value < 0.05 for value in emulated)


@pytest.mark.parametrize("activation", ["silu", "swiglustep"])
def test_a_limit_is_the_layers_and_the_emulations(program: Any, activation: str, tmp_path: Path) -> None:
    """No peer has one. What emulates none would be far from this oracle, as the layer without one is."""
    case, about = program.cases.Case("fp8row", "tiny"), (tmp_path, "cpu", activation)
    lines = list(program.cases.measure(case, *about, limit=0.5))
    assert {line["event"] for line in lines} == {"distance"} and {line["limit"] for line in lines} == {0.5}
    emulated = [line["l2"] for line in lines if line["kind"] == "emulated"]
    assert len(emulated) == 2 and all(1e-3 < value < 0.05 for value in emulated)
    weights = program.common.Weights.random("fp8row", case.shape)
    inputs = program.common.make_inputs(case.shape, 7, 1)
    clamped, plain = (
        program.numerics.emulated(weights, inputs, program.numerics.TOKENS, activation, limit) for limit in (0.5, None)
    )
    assert (clamped - plain).norm() > 0.2 * plain.norm()


def test_more_tokens_are_measured_beside_the_usual_ones(program: Any, tmp_path: Path) -> None:
    lines = program.cases.measure(
        program.cases.Case("fp8row", "tiny"), tmp_path, "cpu", ours=("cpu",), more_tokens=(4,)
    )
    calls = {(line["tokens"], line["calls"]) for line in lines if line["event"] == "distance"}
    assert calls == {(1, 3), (7, 2), (4, program.cases.MORE)}


def test_a_layer_counts_where_the_usual_tokens_were_measured(program: Any) -> None:
    assert program.usual == load("scripts/distance_table.py").TOKENS


@pytest.mark.parametrize("other", ["gelu", "swiglustep"])
def test_a_limit_is_for_activations_that_take_another(
    program: Any, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """swiglustep's own is 7."""
    options = ["--device", "cpu", "--limit", "7", "--activations", f"silu,{other}"]
    monkeypatch.setattr(sys, "argv", ["distances.py", *options])
    with pytest.raises(SystemExit, match=f"not for {other}$"):
        program.run.main()


def test_the_emulation_rounds_what_it_says(program: Any) -> None:
    """Weights that are bfloat16 already cost Marlin nothing more than 16-bit results do."""
    weights = program.common.Weights.random("int4", program.common.Shape("tiny", 4, 2, 128, 128))
    inputs = program.common.make_inputs(weights.shape, 5, 3)
    marlin = program.numerics.MARLIN
    rounded = program.numerics.emulated(weights, inputs, marlin)
    kept = program.numerics.emulated(weights, inputs, program.numerics.Numerics("", round_weights=False))
    assert not torch.equal(rounded, kept)
    for which in (1, 2):
        weights.matrix(which)[1].fill_(2.0**-4)
    same = [program.numerics.emulated(weights, inputs, program.numerics.Numerics("", r)) for r in (True, False)]
    assert torch.equal(*same)


def test_a_quantized_operand_is_codes_times_scales(program: Any) -> None:
    x = torch.randn(3, 256)
    values = program.numerics.operand(x, "group").unflatten(1, (2, 128))
    assert values.abs().amax(2).float() == pytest.approx(x.unflatten(1, (2, 128)).abs().amax(2), rel=1e-6)
    error = (values.flatten(1) - x).norm() / x.norm()
    assert 0.01 < error < 0.04
    assert torch.equal(program.numerics.operand(x, "none"), x.bfloat16().double())


def _arguments(program: Any, **changes: Any) -> argparse.Namespace:
    args = program.run.parser().parse_args(["--device", "cpu", "--jobs", "1"])
    return argparse.Namespace(**{**vars(args), **changes})


def test_a_process_that_fails_leaves_a_line(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = program.cases.Case("nonsense", "qwen3_30b")
    monkeypatch.setattr(program.run.distance_cases, "cases", lambda formats, layers: [broken])
    (line,) = program.run.run_all(_arguments(program), tmp_path)
    assert (line["event"], line["format"], line["layer"]) == ("missing", "nonsense", "qwen3_30b")
    assert "its process ended with 1" in line["why"] and "nonsense" in line["why"]


def test_what_the_time_does_not_hold_is_named(program: Any, tmp_path: Path) -> None:
    """And nothing is left running."""
    wanted = _arguments(program, seconds=0.05, formats="int4,fp8", layers="qwen3_30b")
    lines = program.run.run_all(wanted, tmp_path)
    assert [(line["format"], line["why"]) for line in lines] == [
        ("int4", "the time was over"),
        ("fp8", "the time was over"),
    ]


def test_results_name_no_folder_of_the_machine(program: Any) -> None:
    text = "OSError: /home/user/.peers/_moe_C.abi3.so: cannot open\nshared 1/2 and a/b"
    assert program.cases.without_folders(text) == "OSError: _moe_C.abi3.so: cannot open shared 1/2 and a/b"


def test_every_format_comes_before_the_next_layer_and_sizes_are_kept(program: Any) -> None:
    cases = program.cases.cases(["fp8", "nvfp4"], ["qwen3_30b", "dsv3", "mixtral"])
    assert [tuple(c) for c in cases] == [
        ("fp8", "qwen3_30b"), ("nvfp4", "qwen3_30b"), ("fp8", "dsv3"), ("nvfp4", "dsv3"), ("fp8", "mixtral"),
    ]  # fmt: skip
    assert [(c.shape.E, c.shape.k, c.shape.H, c.shape.I) for c in cases[::2]] == [
        (16, 8, 2048, 768), (16, 8, 7168, 2048), (8, 2, 4096, 14336),
    ]  # fmt: skip
    assert program.cases.Case("fp8", "qwen3_next").shape.E == 20, "twice its top_k"


def test_names_are_checked() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "distances.py"), "--device", "cpu", "--formats", "nvfp3"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and "--formats must be of fp8," in ended.stderr
    ended = subprocess.run([*command[:-2], "--activations", "gelu2"], capture_output=True, text=True)
    assert ended.returncode == 1 and "--activations must be of silu," in ended.stderr


def test_the_table_knows_every_format(program: Any) -> None:
    assert set(program.cases.FORMATS) <= set(load("scripts/distance_table.py").FORMATS)
