"""Checkpoints by the name of their repository, through a cache of huggingface_hub that the test makes; offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixture_layers import CHECKPOINTS
from modules_by_path import ROOT

import torch_moe_ops as moe
from torch_moe_ops.checkpoints import hub
from torch_moe_ops.checkpoints.index import open_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")

from huggingface_hub import constants  # noqa: E402

NAME, COMMIT = "someone/tiny-qwen3", "0123456789abcdef0123456789abcdef01234567"
CHECKPOINT = CHECKPOINTS / "qwen3_moe_modelopt_nvfp4"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository as huggingface_hub keeps it: links to files named by their hashes."""
    root = tmp_path / "hub"
    repository = root / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(CHECKPOINT.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    hub.repository_folder.cache_clear()
    return root


@pytest.mark.parametrize("name", [NAME, f"{NAME}@main", f"{NAME}@{COMMIT}"])
def test_experts_of_a_repository(name: str, cache: Path) -> None:
    for layer in (0, 1):
        raw, want = (moe.load_experts(path, layer=layer) for path in (name, CHECKPOINT))
        assert all(raw.tensors()[key].equal(tensor) for key, tensor in want.tensors().items())
    assert open_checkpoint(name).path == str(cache / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT)


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / NAME
    folder.parent.mkdir()
    folder.symlink_to(CHECKPOINTS / "mixtral_modelopt_nvfp4")
    assert moe.load_experts(NAME, layer=0).num_experts == 4
    folder.unlink()
    with pytest.raises(ValueError, match=f"{NAME}: no such file or folder$"):  # a mistyped path asks no network
        moe.load_experts(NAME, layer=0)


def test_the_hub_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    theirs = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append(k) or theirs(*a, **k))
    for layer in (0, 1, 0):
        moe.load_experts(NAME, layer=layer)
    assert len(asked) == 1
    assert "*.safetensors" in asked[0]["allow_patterns"] and not any("bin" in p for p in asked[0]["allow_patterns"])


def test_what_cannot_be_had_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"someone/other: no such file or folder, and the Hugging Face Hub .*Error: "):
        moe.load_experts("someone/other", layer=0)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"someone/third: no such .* huggingface_hub must be installed: pip install"):
        moe.load_experts("someone/third", layer=0)


@pytest.mark.parametrize(
    "path", ["name", "a/b/c", "/a/b", "./a", "../a", "a/", "a b/c", "benchmarks/missing", "a/..", "~/a"]
)
def test_paths_are_no_repositories(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert not hub.is_repository(path)


def test_inspect_takes_a_name(cache: Path) -> None:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch_moe_ops", "inspect", NAME]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "ModelOpt NVFP4" in done.stdout and "layer 1" in done.stdout
    done = subprocess.run([*command[:-1], "someone/other"], env=environment, capture_output=True, text=True)
    assert done.returncode and "someone/other: no such file or folder, and" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "name", ["org/name@../x", "org/name@v1/../..", "folder/model.safetensors", "folder/config.json"]
)
def test_what_is_no_repository(name: str) -> None:
    assert not hub.is_repository(name)
