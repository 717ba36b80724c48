"""Files of tuned tile sizes: what is kept, what is refused, and what the kernels then take."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_moe_ops as moe
from torch_moe_ops.backends.triton_engine import configs
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.tuning import tuned

DEVICE = "NVIDIA H200 (SXM)"
KEY = tuned.Key("nvfp4", "none", 128, 8, 2048, 768)
TILE = (128, 256, 4, 3, 168, 1)


def _entry(tokens: int, block_n: int = 128, us: float = 5.0) -> tuned.Entry:
    return tuned.Entry(tokens, us, ((16, 16), (block_n, *TILE[1:]), (*TILE[:5], 2)))


@pytest.fixture(autouse=True)
def _clean_table() -> Iterator[None]:
    kept = dict(tuned.TABLE), dict(tuned.SHIPPED)
    yield
    for table, problems in zip((tuned.TABLE, tuned.SHIPPED), kept, strict=True):
        table.clear()
        table.update(problems)
    tuned._nearest.cache_clear()
    tuned.name_of_device.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A current CUDA device of the name DEVICE."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: DEVICE)
    tuned.name_of_device.cache_clear()


def _damage(path: Path, change: Any) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = tuned.save(DEVICE, KEY, [_entry(64), _entry(1)], tmp_path / "new" / "folder")
    assert path.name == "nvidia-h200-sxm.json"
    assert tuned.read(path) == (DEVICE, {KEY: (_entry(1), _entry(64))})
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing temporary stays"


def test_saving_keeps_other_problems_and_replaces_the_same_tokens(tmp_path: Path) -> None:
    other = KEY._replace(top_k=4)
    tuned.save(DEVICE, KEY, [_entry(1), _entry(64)], tmp_path)
    tuned.save(DEVICE, other, [_entry(8)], tmp_path)
    path = tuned.save(DEVICE, KEY, [_entry(64, block_n=64)], tmp_path)
    assert tuned.read(path)[1] == {KEY: (_entry(1), _entry(64, block_n=64)), other: (_entry(8),)}


def test_saving_over_a_damaged_file_starts_anew(tmp_path: Path) -> None:
    tuned.file_of(DEVICE, tmp_path).write_text("{")
    assert tuned.read(tuned.save(DEVICE, KEY, [_entry(1)], tmp_path))[1] == {KEY: (_entry(1),)}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned.save(DEVICE, KEY, [_entry(1)], tmp_path)

    def no_replace(*args: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", no_replace)
    with pytest.raises(OSError, match="no space"):
        tuned.save(DEVICE, KEY, [_entry(2)], tmp_path)
    assert tuned.read(path)[1] == {KEY: (_entry(1),)}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["library", "triton"])
def test_other_versions_count_for_nothing(tmp_path: Path, name: str) -> None:
    path = tuned.save(DEVICE, KEY, [_entry(1)], tmp_path)
    _damage(path, lambda data: data["problems"][0].update({name: "0.0.0"}))
    assert tuned.read(path) == (DEVICE, {})


def _set(*path: Any, value: Any) -> Any:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


_CONFIG = ("problems", 0, "configs", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", value=2), "format must be 1, got 2"),
        (_set("device", value=None), "device must be a name"),
        (_set("problems", value=3), "TypeError"),
        (_set("problems", 0, "top_k", value=0), "names and positive sizes"),
        (_set("problems", 0, "scheme", value=7), "names and positive sizes"),
        (_set(*_CONFIG, "tokens", value=0), "tokens and us must be positive"),
        (_set(*_CONFIG, "tokens", value=True), "tokens and us must be positive"),
        (_set(*_CONFIG, "us", value=float("nan")), "tokens and us must be positive"),
        (_set(*_CONFIG, "blocks", value=[16]), "blocks must be two powers of two"),
        (_set(*_CONFIG, "blocks", value=[24, 16]), "blocks must be two powers of two"),
        (_set(*_CONFIG, "blocks", value=[16, 32]), "blocks must be two powers of two"),
        (_set(*_CONFIG, "gemm1", value=[96, 64, 4, 4, 0, 1]), "gemm1 must be the fields of a tile"),
        (_set(*_CONFIG, "gemm1", value=[128, 64, 4, 4, 0, 2]), "gemm1 must be the fields of a tile"),
        (_set(*_CONFIG, "gemm2", value=[128, 64, 4, 4, 300, 1]), "gemm2 must be the fields of a tile"),
        (_set(*_CONFIG, "gemm2", value=[128, 64, 4, 99, 0, 1]), "gemm2 must be the fields of a tile"),
        (_set(*_CONFIG, "gemm2", value="wide"), "gemm2 must be the fields of a tile"),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path: Path, change: Any, message: str) -> None:
    path = tuned.save(DEVICE, KEY, [_entry(1)], tmp_path)
    tuned.save("another device", KEY, [_entry(1)], tmp_path)
    _damage(path, change)
    with pytest.raises(ValueError, match=message):
        tuned.read(path)
    with pytest.warns(UserWarning, match=rf"tuned tile sizes are ignored: .*{path.name}"):
        tuned.load(tmp_path)
    assert list(tuned.TABLE) == ["another device"]


@pytest.mark.parametrize("text", ["", "null", "[]", "{", "\x00", "[" * 100000])
def test_a_file_of_something_else_is_ignored_with_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.warns(UserWarning, match="tuned tile sizes are ignored"):
        tuned.load(tmp_path)
    assert tuned.TABLE == {}


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_TUNE_DIR", "/somewhere")
    assert tuned.folder() == Path("/somewhere")
    monkeypatch.setenv("MOEQ_TUNE_DIR", "")
    assert tuned.folder() is None
    monkeypatch.delenv("MOEQ_TUNE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert tuned.folder() == Path("/cache/torch_moe_ops/tune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert tuned.folder() == Path("/home/someone/.cache/torch_moe_ops/tune")


NO_HOME = """
import os, pwd

def unknown(user):
    raise KeyError(f"no passwd entry for {user}")

pwd.getpwuid = pwd.getpwnam = unknown
"""


def _run_without_home(code: str) -> subprocess.CompletedProcess[str]:
    """In a process as a container runs it under a uid that nobody registered: no HOME, no passwd entry."""
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    command = [sys.executable, "-c", NO_HOME + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_library_works_without_a_home_directory() -> None:
    done = _run_without_home("""
import torch, torch_moe_ops as moe
from torch_moe_ops.tuning import tuned, tuned_kernels
raw = moe.quantize_experts(torch.randn(4, 64, 32), torch.randn(4, 32, 32), "nvfp4")
w = moe.prepare(raw, backend="reference")
moe.fused_moe(torch.randn(3, 32), torch.randn(3, 4), w, routing=moe.Routing("renormalize", top_k=2))
print(tuned.folder(), tuned_kernels.folder(), tuned.no_folder_reason())
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "None None MOEQ_TUNE_DIR must name a folder, got none and no home directory\n"


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    tuned.load(tmp_path / "missing")
    assert tuned.TABLE == {}


def test_the_nearest_number_of_tokens_serves() -> None:
    entries = (_entry(1), _entry(16), _entry(24), _entry(1024))
    found = {tokens: tuned.nearest(entries, tokens) for tokens in (0, 1, 2, 10, 11, 16, 19, 20, 36, 37, 700, 1536)}
    chosen = {tokens: entry.tokens if entry else None for tokens, entry in found.items()}
    assert chosen == {
        0: None, 1: 1, 2: None, 10: None, 11: 16, 16: 16, 19: 16, 20: 24, 36: 24, 37: None, 700: 1024, 1536: 1024
    }  # fmt: skip


def test_the_kernels_take_what_was_tuned_on_this_device(tmp_path: Path, gpu: None) -> None:
    tuned.save(DEVICE, KEY, [_entry(64, block_n=64)], tmp_path)
    tuned.save("another device", KEY, [_entry(64, block_n=32)], tmp_path)
    shape = (8, 128, 2048, 768)
    before = configs.select("nvfp4", 64, *shape)
    tuned.load(tmp_path)
    after = configs.select("nvfp4", 64, *shape)
    assert before == configs.rules("nvfp4", 64, *shape) != after
    tile = configs.Tile(64, 256, 4, 3, 168, 1)
    assert after == configs.Config(16, 16, tile, tile._replace(block_n=128, split_k=2))
    rules = configs.rules
    assert configs.select("nvfp4", 8, *shape) == rules("nvfp4", 8, *shape), "another number of tokens"
    assert configs.select("nvfp4", 64, 4, 128, 2048, 768) == rules("nvfp4", 64, 4, 128, 2048, 768), "another top_k"
    assert configs.select("mxfp4", 64, *shape) == rules("mxfp4", 64, *shape), "another scheme"


def test_16_bit_activations_stand_in_for_others(tmp_path: Path, gpu: None) -> None:
    quantized = KEY._replace(act_format="nvfp4")
    tuned.save(DEVICE, KEY, [_entry(8, block_n=32), _entry(64, block_n=32)], tmp_path)
    tuned.save(DEVICE, quantized, [_entry(64, block_n=64)], tmp_path)
    tuned.load(tmp_path)
    widths = {
        (m, act): configs.select("nvfp4", m, 8, 128, 2048, 768, act).gemm1.block_n
        for m in (8, 64)
        for act in ("none", "nvfp4")
    }
    assert widths == {(8, "none"): 32, (8, "nvfp4"): 32, (64, "none"): 32, (64, "nvfp4"): 64}
    problem = Problem("nvfp4", "nvfp4", device="cuda", capability=(9, 0), num_experts=128, hidden_size=2048,
                      intermediate_size=768)  # fmt: skip
    assert moe.explain(problem).notes["triton"] == (
        "tile sizes tuned here for top_k 8 and about 8, 64 tokens and 16-bit activations; "
        "tile sizes tuned here for top_k 8 and about 64 tokens"
    )
    only = tmp_path / "only"
    tuned.save(DEVICE, quantized, [_entry(64, block_n=64)], only)
    tuned.load(only)
    assert configs.select("nvfp4", 64, 8, 128, 2048, 768) == configs.rules("nvfp4", 64, 8, 128, 2048, 768), "not back"


def test_off_cuda_nothing_tuned_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    tuned.save(DEVICE, KEY, [_entry(64, block_n=64)], tmp_path)
    tuned.load(tmp_path)
    assert configs.select("nvfp4", 64, 8, 128, 2048, 768) == configs.rules("nvfp4", 64, 8, 128, 2048, 768)


def test_explain_says_what_was_tuned(tmp_path: Path, gpu: None) -> None:
    problem = Problem("nvfp4", "none", device="cuda", capability=(9, 0), num_experts=128, hidden_size=2048,
                      intermediate_size=768)  # fmt: skip
    assert moe.explain(problem).notes["triton"] == ""
    tuned.save(DEVICE, KEY, [_entry(1), _entry(64)], tmp_path)
    tuned.load(tmp_path)
    text = "tile sizes tuned here for top_k 8 and about 1, 64 tokens"
    assert moe.explain(problem).notes["triton"] == text
    elsewhere = Problem("nvfp4", "none", device="cpu", num_experts=128, hidden_size=2048, intermediate_size=768)
    assert moe.explain(elsewhere).notes["triton"] == ""
    rank = dataclasses.replace(problem, num_experts=512)
    assert rank.num_local_experts == 128
    text = "tile sizes tuned here for top_k 8 and about 1, 256 tokens"
    assert moe.explain(rank).notes["triton"] == text, "a quarter of them comes here"


def test_the_library_s_own_table_comes_after_the_user_s(
    tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, shipped, shape = tmp_path / "mine", tmp_path / "shipped", (8, 128, 2048, 768)
    monkeypatch.setattr(tuned, "SHIPPED_FOLDER", shipped)
    path = tuned.save(DEVICE, KEY, [_entry(8, block_n=32), _entry(64, block_n=32)], shipped)
    _damage(path, lambda data: data["problems"][0].update(library="0.0.0"))  # it ships with this one all the same
    tuned.save(DEVICE, KEY, [_entry(64, block_n=64)], mine)
    tuned.load(mine)
    widths = {(m, own): configs.select("nvfp4", m, *shape, own=own).gemm1.block_n for m in (8, 64) for own in (0, 1)}
    assert widths == {(8, 0): 32, (8, 1): 32, (64, 0): 32, (64, 1): 64}
    problem = Problem("nvfp4", "none", device="cuda", capability=(9, 0), num_experts=128, hidden_size=2048,
                      intermediate_size=768)  # fmt: skip
    assert moe.explain(problem).notes["triton"] == (
        "tile sizes tuned here for top_k 8 and about 64 tokens; "
        "tile sizes of the library's table for top_k 8 and about 8, 64 tokens"
    )


def test_the_library_s_own_tables_can_be_read() -> None:
    for path in tuned.SHIPPED_FOLDER.glob("*.json"):
        data = json.loads(path.read_text())
        assert path == tuned.file_of(data["device"], tuned.SHIPPED_FOLDER)
        for problem in data["problems"]:
            problem["triton"] = tuned.triton_version()
            assert tuned.key_from(problem) and [tuned._entry(value) for value in problem["configs"]]


def test_files_are_read_when_the_library_is_imported(tmp_path: Path) -> None:
    """And at no other time: what a layer takes must not change between eager calls and a capture."""
    tuned.save(DEVICE, KEY, [_entry(64)], tmp_path)
    code = "import torch_moe_ops; from torch_moe_ops.tuning import tuned; print(list(tuned.TABLE))"
    environment = {**os.environ, "MOEQ_TUNE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.strip() == str([DEVICE]), done.stderr


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "int4", "fp8_block", "mxfp6_e2m3", "int8", "none"])
def test_the_rules_give_tiles_that_a_file_may_hold(scheme: str) -> None:
    for experts, top_k, hidden, inter in (
        (128, 8, 2048, 768),
        (8, 2, 4096, 14336),
        (128, 4, 2880, 2880),
        (4, 1, 64, 48),
    ):
        for tokens in (1, 2, 8, 64, 256, 1024, 4096, 65536):
            config = configs.rules(scheme, tokens, top_k, experts, hidden, inter)
            fields = ((config.block_t, config.tail_t), tuple(config.gemm1), tuple(config.gemm2))
            value = json.loads(json.dumps(tuned._as_json(tuned.Entry(tokens, 1.0, fields))))
            assert tuned._entry(value).config == fields
