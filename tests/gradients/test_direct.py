"""Kernels launched without Triton's Python (triton_engine/direct.py): by what Triton's own launching function hands on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel

from torch_moe_ops.backends.triton_engine import direct, known

TENSORS = torch.zeros(4), torch.zeros(8, dtype=torch.int32)
ADDRESSES = [t.data_ptr() for t in TENSORS]
STREAM, FUNCTION, PACKED = 70, 71, (4, 1, 72)
CONSTANTS = (64, True)


class _Driver:
    """Of the one device, 0."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM + device


class _Kernel(CompiledKernel):
    def __del__(self) -> None:  # nothing is loaded
        pass


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu() -> Iterator[None]:
    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver()),
        mock.patch.object(direct, "RELEASES", (triton.__version__,)),
    ):
        yield


def _compiled(**fields: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    """A kernel as Triton compiles it, and what the C code behind its launching function is called with."""
    seen: list[tuple[Any, ...]] = []
    launcher = CudaLauncher.__new__(CudaLauncher)
    given = {"launch": lambda *args: seen.append(args), "num_ctas": 1, "gsan_enabled": False}
    given |= {"launch_cooperative_grid": 73, "launch_pdl": 74, "arg_annotations": 75, "kernel_signature": 76}
    given |= {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
    launcher.__dict__.update(given | fields)
    kernel = _Kernel.__new__(_Kernel)
    kernel.__dict__.update(module=1, function=FUNCTION, packed_metadata=PACKED, name="a kernel", src=None)
    kernel._run = launcher
    return kernel, seen


@pytest.mark.skipif(not triton.__version__.startswith(direct.RELEASES), reason="of a release that is left to Triton")
@pytest.mark.parametrize("grid", [(3,), (3, 5), (3, 5, 7)])
def test_the_c_code_gets_what_triton_gives_it(grid: tuple[int, ...]) -> None:
    """But for addresses instead of tensors, and for hooks that nobody has set."""
    compiled, seen = _compiled()
    compiled[(*grid, 1, 1)[:3]](*TENSORS, 0.5, 8, 9, *CONSTANTS)
    of_kernel = direct.direct_of(compiled)
    assert of_kernel is not None
    launch = of_kernel.bound(0, [*ADDRESSES, 0.5], CONSTANTS)
    assert launch is not None
    launch(grid, (8, 9))
    theirs, ours = ([a.data_ptr() if isinstance(a, Tensor) else a for a in args] for args in seen)
    runtime = triton.knobs.runtime
    at = theirs.index(PACKED) + 1  # what is told to hooks, and those
    assert theirs[at + 1 : at + 3] == [runtime.launch_enter_hook, runtime.launch_exit_hook]
    assert ours[at : at + 3] == [None] * 3
    theirs[at : at + 3] = ours[at : at + 3]
    assert ours == theirs


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_every_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(known, "FOUND", {})
    compiled, seen = _compiled()

    class Source:
        arg_names = ("x", "y", "n", "A", "B")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: compiled

    kernel, hooks = Source(), getattr(triton.knobs.runtime, name)
    once = known.Launch(A=64, B=True)
    for launch in (
        lambda: once(kernel, (3,), TENSORS, 8),
        lambda: known.Repeated(kernel, TENSORS, A=64, B=True)((3,), 8),
    ):
        launch()  # is looked up
        for calls in ([], [print], []):
            monkeypatch.setattr(hooks, "calls", calls)
            seen.clear()
            launch()
            assert [hooks in args for args in seen] == [bool(calls)]


def test_a_hook_that_is_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    of_kernel = direct.Direct(_compiled()[0])
    for hook, is_bound in ((None, True), (print, False)):
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
        assert (of_kernel.bound(0, ADDRESSES, CONSTANTS) is not None) == is_bound


@pytest.mark.parametrize("kind", ["global", "profile"])
def test_kernels_with_memory_of_their_own_are_left_to_triton(kind: str) -> None:
    assert direct.direct_of(_compiled()[0]) is not None
    assert direct.direct_of(_compiled(**{f"{kind}_scratch_size": 8})[0]) is None


def test_other_launching_functions_and_releases_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, _ = _compiled()
    monkeypatch.setattr(direct, "RELEASES", ("3.5.",))
    assert direct.direct_of(compiled) is None
    monkeypatch.setattr(direct, "RELEASES", (triton.__version__,))
    compiled._run = lambda *args: None
    assert direct.direct_of(compiled) is None
