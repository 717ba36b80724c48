"""The tune command without a GPU: its arguments, what is timed, and which configuration is kept."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
from cuda_events import events_noted_in
from paths import DATA
from safetensors.torch import save_file

from torch_moe_ops.__main__ import main
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.triton import FORMATS
from torch_moe_ops.backends.triton_engine.configs import Config, Tile, rules
from torch_moe_ops.checkpoints import CheckpointError
from torch_moe_ops.commands.tune import candidates, command, layers
from torch_moe_ops.commands.tune.command import layers_of, tokens_of
from torch_moe_ops.commands.tune.replays import replay_us
from torch_moe_ops.commands.tune.search import plan, search
from torch_moe_ops.tuning import tuned

CHECKPOINTS = DATA / "checkpoints"
RULES = rules("nvfp4", 64, 8, 128, 2048, 768)
SIZES = (64, 8, 128)  # tokens, top_k, experts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "qwen"], "--shapes: must be names of qwen3_30b, .*, got 'qwen'"),
        (["--shapes", "4:8:64:64"], "--shapes: top_k must be at most the number of experts"),
        (["--shapes", "8:2:72:64"], "hidden_size must be a positive multiple of 16 for nvfp4, got 72"),
        (["--scheme", "fp3"], "--scheme: must be one of nvfp4, .*, got 'fp3'"),
        (["--act-format", "int8"], "--act-format: must be one of .* for nvfp4, got 'int8'"),
        (["--tokens", "1,x"], "--tokens: must be a comma list of positive numbers, got '1,x'"),
        (["--tokens", "0"], "--tokens: must be a comma list of positive numbers, got '0'"),
        (["--max-minutes", "0"], "--max-minutes: must be a positive number, got 0"),
        (["--max-minutes", "nan"], "--max-minutes: must be a positive number, got nan"),
        (["--top-k", "2"], "--top-k: must be left out without --checkpoint"),
        (["--layer", "2"], "--layer: must be left out without --checkpoint"),
        (["--checkpoint", str(CHECKPOINTS / "missing")], "missing"),
        (
            ["--checkpoint", str(CHECKPOINTS / "qwen3_moe_modelopt_nvfp4"), "--scheme", "nvfp4"],
            "--scheme: must be left",
        ),
        (["--checkpoint", str(CHECKPOINTS / "qwen3_moe_modelopt_nvfp4"), "--layer", "99"], "99"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tune: ")
    assert re.search(message, error), error


def test_shapes_and_a_checkpoint_exclude_each_other(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["tune", "--shapes", "mixtral", "--checkpoint", "x"])
    assert stop.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert capsys.readouterr().err == "tune: a CUDA device must be visible, got none\n"


def test_an_empty_folder_name_leaves_nowhere_to_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("MOEQ_TUNE_DIR", "")
    assert main(["tune"]) == 2
    assert capsys.readouterr().err == "tune: MOEQ_TUNE_DIR must name a folder, got an empty one\n"


def _options(*arguments: str) -> list[layers.Layer]:
    import argparse

    from torch_moe_ops.commands.tune import command

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return layers_of(parser.parse_args(["tune", *arguments]))


def test_layers_of_shapes() -> None:
    found = _options("--shapes", "mixtral,16:4:64:96", "--scheme", "nvfp4,none", "--act-format", "none")
    assert [layer.key for layer in found] == [
        ("nvfp4", "none", 8, 2, 4096, 14336),
        ("nvfp4", "none", 16, 4, 64, 96),
        ("none", "none", 8, 2, 4096, 14336),
        ("none", "none", 16, 4, 64, 96),
    ]
    assert _options()[0].key == ("nvfp4", "nvfp4", 128, 8, 2048, 768), "the scheme's own activation format"


def test_layers_of_a_checkpoint(tmp_path: Path) -> None:
    (layer,) = _options("--checkpoint", str(CHECKPOINTS / "qwen3_moe_modelopt_nvfp4"), "--act-format", "none")
    assert layer.key == ("nvfp4", "none", 8, 2, 64, 48)
    (layer,) = _options("--checkpoint", str(CHECKPOINTS / "gpt_oss_modelopt_nvfp4"))
    assert layer.raw.activation == "swigluoai"
    assert layer.raw.w13_bias is not None
    copy = tmp_path / "no_config"
    shutil.copytree(CHECKPOINTS / "qwen3_moe_modelopt_nvfp4", copy)
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match="--top-k: must be given"):
        _options("--checkpoint", str(copy))
    assert _options("--checkpoint", str(copy), "--top-k", "3")[0].key.top_k == 3


def test_a_checkpoint_without_experts(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no layer has experts"):
        _options("--checkpoint", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--scheme", "int4"),
            "must be for one of nvfp4 with nvfp4, nvfp4 with none, nvfp4 with fp8, mxfp4 with none, mxfp4 with fp8, "
            "mxfp4 with mxfp8, fp8 with none, fp8 with fp8, fp8_block with none, fp8_block with fp8, mxfp8 with none, "
            "mxfp8 with mxfp8, int8 with none, "
            "got int4",
        ),
        (("--shapes", "8:2:2000:512"), "hidden_size must be a multiple of 32, got 2000"),
        (
            ("--shapes", "8:2:2008:512", "--scheme", "fp8_block", "--act-format", "none"),
            "hidden_size must be a multiple of 16, got 2008",
        ),
        (("--shapes", "1025:2:64:64"), "num_experts must be at most 1024, got 1025"),
    ],
)
def test_layers_that_cuda_sm90_does_not_run(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _options("--backend", "cuda_sm90", *arguments)
    _options(*arguments)  # triton does


def test_int8_layers_have_scales_of_rows() -> None:
    """Which `cuda_sm90` takes alone."""
    _options("--backend", "cuda_sm90", "--scheme", "int8", "--act-format", "none", "--shapes", "8:2:256:128")
    layer = layers.of_shape("8:2:256:128", "int8", "none")
    assert layer.raw.w13_scale is not None and layer.raw.w13_scale.shape == (8, 256, 1)
    groups = torch.empty((8, 256, 2), device="meta")
    wrong = layer._replace(raw=dataclasses.replace(layer.raw, w13_scale=groups))
    with pytest.raises(ValueError, match=r"int8 weights must have a scale for each row, .* got group"):
        command._check_for_sm90(wrong)


def test_tokens_are_sorted_and_distinct() -> None:
    assert tokens_of("64,1, 8,64") == [1, 8, 64]


@pytest.mark.parametrize("scheme", sorted(FORMATS))
def test_random_layers_give_finite_results(scheme: str) -> None:
    """Else a comparison of results would drop every configuration."""
    for act in FORMATS[scheme]:
        layer = layers.of_shape("8:2:256:128", scheme, act)
        layers.check(layer)
        call = layers.with_inputs(layers.random_call(layer, torch.device("cpu")), layer, 5, seed=0)
        out = torch.empty(5, 256, dtype=torch.bfloat16)
        BACKENDS["reference"].run(call, out)
        assert out.isfinite().all()
        assert out.abs().max() > 0


def test_a_layer_of_one_expert_in_memory_computes_the_same() -> None:
    """What is compiled ahead has the shapes of the real layer."""
    layer = layers.of_shape("8:2:64:32", "nvfp4", "none")
    small = layers.random_call(layer, torch.device("cpu"), one_expert=True)
    assert small.w13.shape == (8, 64, 32)
    assert small.w13.untyped_storage().nbytes() == 64 * 32
    call = layers.with_inputs(small, layer, 3, seed=0, one_expert=True)
    assert not call.topk_ids.any()
    out, same = torch.empty(3, 64, dtype=torch.bfloat16), torch.empty(3, 64, dtype=torch.bfloat16)
    BACKENDS["reference"].run(call, out)
    whole = {name: t.contiguous() for name, t in call._asdict().items() if isinstance(t, torch.Tensor)}
    BACKENDS["reference"].run(call._replace(**whole), same)
    assert torch.equal(out, same)


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [("nvfp4", 4), ("mxint4", 4), ("int4", 4), ("mxfp6_e3m2", 8), ("fp8", 8), ("int8", 8), ("none", 16)],
)
def test_candidates_go_by_the_bits_of_a_weight(scheme: str, bits: int) -> None:
    assert layers.of_shape("8:2:256:128", scheme, "none").bits == bits
    for block in (16, 64):
        assert all(tile.split_k == 1 for tile in candidates.tiles(bits, block, 1))
        both = set(candidates.tiles(bits, block, 2))
        assert len(both) == len(candidates.tiles(bits, block, 2)) >= 6
        assert set(candidates.tiles(bits, block, 1)) <= both


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, [(16, 16)]), (64, [(16, 16)]), (256, [(16, 16), (32, 16)]), (1024, [(32, 16), (64, 16), (64, 32), (128, 32), (128, 64)]), (65536, [(128, 32), (128, 64), (256, 64)])],
)  # fmt: skip
def test_blocks_go_by_tokens_an_expert(tokens: int, expected: list[tuple[int, int]]) -> None:
    assert candidates.blocks(tokens, 8, 128) == expected


def test_the_search_finds_the_best_of_both_gemms() -> None:
    best = Config(16, 16, Tile(64, 256, 4, 3), Tile(128, 128, 8, 4))

    def time(config: Config) -> float:
        return 100 - 20 * (config.gemm1 == best.gemm1) - 30 * (config.gemm2 == best.gemm2)

    found = search(time, RULES, 4, SIZES)
    assert found == (50, best, 100)


def test_a_gain_within_the_noise_keeps_the_rules() -> None:
    found = search(lambda config: 100.0 if config == RULES else 99.5, RULES, 4, SIZES)
    assert found == (100.0, RULES, 100.0)


def test_the_rules_are_timed_again_after_the_others() -> None:
    """A GPU that was slow at first must not make another configuration look better."""
    calls: list[Config] = []

    def time(config: Config) -> float:
        calls.append(config)
        return 120.0 if len(calls) == 1 else 100.0

    assert search(time, RULES, 4, SIZES) == (100.0, RULES, 100.0)
    assert calls[0] == calls[-1] == RULES


def test_what_does_not_run_is_not_kept() -> None:
    found = search(lambda config: 100.0 if config == RULES else float("inf"), RULES, 4, SIZES)
    assert found is not None and found.config == RULES


def test_every_block_is_searched() -> None:
    seen: set[tuple[int, int]] = set()

    def time(config: Config) -> float:
        seen.add((config.block_t, config.tail_t))
        return 50.0 if (config.block_t, config.tail_t) == (128, 64) else 100.0

    start = rules("nvfp4", 1024, 8, 128, 2048, 768)
    found = search(time, start, 4, (1024, 8, 128))
    assert seen >= set(candidates.blocks(1024, 8, 128))
    assert found is not None and (found.config.block_t, found.config.tail_t) == (128, 64)


def test_the_search_ends_when_time_is_up() -> None:
    calls: list[Config] = []

    def time(config: Config) -> float:
        calls.append(config)
        return 100.0

    assert search(time, RULES, 4, SIZES, expired=lambda: len(calls) >= 4) is None
    assert len(calls) == 4


def test_what_is_compiled_ahead_holds_every_tile() -> None:
    configs = plan(RULES, 4, *SIZES)
    assert configs[0] == RULES
    assert {c.gemm1 for c in configs} >= set(candidates.tiles(4, 16, 1))
    assert {c.gemm2 for c in configs} >= set(candidates.tiles(4, 16, 2))


def _table_of_this_device() -> list[tuple[tuned.Key, tuned.Entry]]:
    if not torch.cuda.is_available():
        return []
    problems = tuned.SHIPPED.get(torch.cuda.get_device_name(), {})
    return [(key, entry) for key, entries in problems.items() for entry in entries]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_configuration_of_the_library_s_table_runs_here() -> None:
    """With the sizes that it is meant for; only one expert has memory."""
    from torch_moe_ops.backends.triton_engine import configs, launch

    for key, entry in _table_of_this_device():
        layer = layers.of_shape(":".join(map(str, key[2:])), key.scheme, key.act_format)
        assert layer.key == key
        weights = layers.random_call(layer, torch.device("cuda"), one_expert=True)
        call = layers.with_inputs(weights, layer, entry.tokens, 0, one_expert=True)
        config = configs.select(key.scheme, entry.tokens, *_sizes(key), key.act_format, own=False)
        assert ((config.block_t, config.tail_t), tuple(config.gemm1), tuple(config.gemm2)) == entry.config
        out, by_rules = torch.empty_like(call.hidden_states), torch.empty_like(call.hidden_states)
        launch.run_experts(call, out, config)
        launch.run_experts(call, by_rules, rules(key.scheme, entry.tokens, *_sizes(key)))
        assert (out.double() - by_rules.double()).norm() <= 4e-3 * by_rules.double().norm(), (key, entry)


def _sizes(key: tuned.Key) -> tuple[int, int, int, int]:
    return key.top_k, key.num_experts, key.hidden_size, key.intermediate_size


def test_a_graph_is_launched_while_another_replay_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch, which takes the longer the more kernels it has, is then no part of its time."""
    done: list[str] = []

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    monkeypatch.setattr(torch.cuda, "Event", events_noted_in(done))
    assert replay_us(Graph()) == 250.0  # type: ignore[arg-type]
    assert done == ["replay", "event", "replay", "event", "synchronize"]
