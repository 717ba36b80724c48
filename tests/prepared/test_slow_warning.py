"""`prepare` takes the slow `reference` unasked: one warning, with the reason and the command that mends it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import pytest
from problems import Case, make_raw

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, slow, triton
from torch_moe_ops.backends.registry import available
from torch_moe_ops.core import extension
from torch_moe_ops.prepared.prepare import prepare


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(slow, "_SAID", set())
    monkeypatch.delenv("MOEQ_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield


def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "cpu_extension_reason", lambda: "torch_moe_ops._C was not compiled (so)")


def _messages(**arguments: object) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert prepare(make_raw(Case()), **arguments).backend == "reference"  # type: ignore[arg-type]
    return [w for w in caught if "prepare:" in str(w.message)]


def test_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_kernels(monkeypatch)
    first, *more = _messages()
    assert not more and first.category is RuntimeWarning
    text = str(first.message)
    assert "'nvfp4' weights on cpu takes backend 'reference', pure torch and slow" in text
    assert "cpu: torch_moe_ops._C was not compiled (so); to mend it: MOEQ_CUDA=0 pip install " in text
    assert first.filename == __file__, "it names the line that called prepare"
    assert _messages() == [], "once, not for every layer"


@pytest.mark.parametrize("asked", ["argument", "environment"])
def test_reference_asked_for_by_name_says_nothing(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_kernels(monkeypatch)
    if asked == "environment":
        monkeypatch.setenv("MOEQ_BACKEND", "reference")
    assert _messages(**({"backend": "reference"} if asked == "argument" else {})) == []


def test_a_kernel_runs_it_and_nothing_is_said() -> None:
    pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare(make_raw(Case())).backend == "cpu"


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BACKENDS["triton"]
    absent = available(lambda: "the triton package must be importable, got none", triton.INSTALL)
    requires = tuple(absent if r.of_machine else r for r in real.requires)
    monkeypatch.setitem(BACKENDS, "triton", dataclasses.replace(real, requires=requires))


def _said_on(capability: tuple[int, int], scheme: str = "nvfp4", **fields: object) -> str:
    """What is said of a layer on such a GPU; "" for nothing."""
    sizes = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 256}
    problem = moe.Problem(scheme, device="cuda", capability=capability, **sizes, **fields)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slow.warn_of_reference(problem, stacklevel=1)
    return "".join(str(w.message) for w in caught)


def test_a_gpu_whose_kernels_are_not_installed(without_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "cuda_extension_reason", lambda: "torch_moe_ops._C_cuda was not compiled (so)")
    text = _said_on((9, 0))
    assert "on cuda (9, 0) takes" in text
    assert "cuda_sm90: torch_moe_ops._C_cuda was not compiled (so); to mend it: MOEQ_CUDA=1 pip install " in text
    assert "triton: the triton package must be importable, got none; to mend it: pip install 'triton>=3.6'" in text
    assert _said_on((9, 0), activation="swigluoai") == "", "the same is missing"
    assert "on cuda (8, 0) takes" in _said_on((8, 0)), "another device"


def test_a_gpu_that_no_kernel_fits() -> None:
    text = _said_on((7, 5))
    assert "no kernel runs it\nProblem(scheme='nvfp4'" in text
    assert "compute capability must be at least (8, 0), got (7, 5)" in text, "the whole table"
    assert _said_on((7, 5), local_expert_offset=2) == "", "another layer of the same kind"
    assert "act_format='nvfp4'" in _said_on((7, 5), act_format="nvfp4")
