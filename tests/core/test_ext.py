"""Loading of the compiled extensions: what is absent says why, what is broken says so loudly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torch_moe_ops.core import extension


def test_an_absent_extension_says_how_to_build_it() -> None:
    loaded = extension.load("torch_moe_ops._no_such_extension", "ask the smith")
    assert not loaded.loaded
    assert loaded.reason == "torch_moe_ops._no_such_extension was not compiled (ask the smith)"


def test_a_broken_extension_warns_and_keeps_the_loader_s_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moeq_broken_extension.abi3.so").write_bytes(b"not a shared library")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(RuntimeWarning, match="exists but does not load"):
        loaded = extension.load("moeq_broken_extension", "never shown")
    assert not loaded.loaded
    assert "moeq_broken_extension.abi3.so" in loaded.reason and torch.__version__ in loaded.reason


def test_a_module_that_loads_has_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moeq_good_extension.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = extension.load("moeq_good_extension", "never shown")
    assert loaded.loaded and loaded.reason == ""
    assert "moeq_good_extension" in sys.modules


@pytest.mark.skipif(not extension.has_cpu_extension(), reason="the CPU extension is not compiled")
def test_an_extension_of_other_sources_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = extension.Extension("torch_moe_ops._C", "")
    assert extension.of_these_sources(loaded, "build it") is loaded
    monkeypatch.setitem(extension.ARGUMENTS, "experts", extension.ARGUMENTS["experts"][::-1])
    with pytest.warns(RuntimeWarning, match="compiled from other sources"):
        other = extension.of_these_sources(loaded, "build it")
    text = "torch_moe_ops._C was compiled from other sources (moeq_C::experts has other arguments): build it"
    assert not other.loaded and other.reason == text
    monkeypatch.undo()
    assert extension.of_these_sources(loaded, "build it", ("experts",)) is loaded
    with pytest.warns(RuntimeWarning, match="compiled from other sources"):
        older = extension.of_these_sources(loaded, "build it", ("experts", "of_tomorrow"))
    text = "torch_moe_ops._C was compiled from other sources (it has no moeq_C::of_tomorrow): build it"
    assert not older.loaded and older.reason == text


@pytest.mark.parametrize(
    ("present", "reason", "op"),
    [
        (extension.has_cpu_extension, extension.cpu_extension_reason, "experts"),
        (extension.has_cuda_extension, extension.cuda_extension_reason, "quantize_nvfp4_cuda"),
    ],
)
def test_presence_reason_and_ops_agree(present: object, reason: object, op: str) -> None:
    assert callable(present) and callable(reason)
    assert present() == (reason() == "") == hasattr(torch.ops.moeq_C, op)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_a_cpu_only_torch_is_the_reason() -> None:
    assert extension.cuda_extension_reason() == f"torch {torch.__version__} was built without CUDA"
