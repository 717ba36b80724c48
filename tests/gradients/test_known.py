"""Launches whose kernel an earlier launch has found (triton_engine/known.py), with stand-ins for Triton's kernels."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_moe_ops.backends.triton_engine import known
from torch_moe_ops.backends.triton_engine.known import Launch, Repeated

SPACE = torch.zeros(64, dtype=torch.int32)
ALIGNED, NEXT = SPACE[:32], SPACE[1:33]
ALSO = torch.zeros(5, dtype=torch.int32)


class _Kernel:
    """Keeps how it is launched, and hands out what was found as Triton does. compiles: like one on a GPU."""

    arg_names = ("x", "y", "first", "A", "B")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles, self.seen = compiles, list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.seen.append(("looked up", grid, args[2:], constants))
            return _Compiled(self.seen) if self.compiles else None

        return launch

    def looked_up(self) -> int:
        return sum(how == "looked up" for how, *_ in self.seen)


class _Compiled:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.seen.append(("again", grid, args[2:]))


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "FOUND", {})
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(known, "_direct_of", lambda compiled: None)  # test_direct.py has what it makes of Triton's


def _again(kernel: _Kernel, tensors: tuple[Any, ...], number: int = 4, **constants: int) -> None:
    """A launch by another Repeated."""
    Repeated(kernel, tensors, {"num_warps": 8}, **({"B": 7, "A": 6} | constants))((3,), number)


def test_another_launch_goes_to_what_the_first_one_found() -> None:
    kernel, launch = _Kernel(), Launch(8, B=7, A=6)  # constants in any order
    launch(kernel, (3,), (ALIGNED, ALIGNED), 4)
    launch(kernel, (5, 2), (ALSO, ALIGNED), 4)
    assert kernel.seen == [
        ("looked up", (3,), (4,), {"A": 6, "B": 7, "num_warps": 8}),
        ("again", (5, 2, 1), (4, 6, 7)),
    ]


def test_so_does_each_launch_of_another_repeated() -> None:
    kernel = _Kernel()
    for _ in range(2):
        launch = Repeated(kernel, (ALIGNED, ALIGNED), {"num_warps": 8}, B=7, A=6)
        launch((3,), 0)
        launch((3,), 2)
        launch((2, 5), 4)
    looked_up = ("looked up", (3,), (0,), {"A": 6, "B": 7, "num_warps": 8})
    again = [("again", (*grid, 1), (number, 6, 7)) for grid, number in (((3, 1), 0), ((3, 1), 2), ((2, 5), 4))]
    assert kernel.seen == [looked_up, *again[1:], *again]


@pytest.mark.parametrize(
    "tensors", [(ALIGNED, NEXT), (NEXT, ALIGNED), (ALIGNED, ALIGNED.float()), (ALIGNED.bool(), ALIGNED)], ids=str
)
def test_other_tensors_are_looked_up(tensors: tuple[Tensor, ...]) -> None:
    kernel, launch = _Kernel(), Launch(A=6, B=7)
    for given in ((ALIGNED, ALIGNED), tensors, tensors, (ALIGNED, ALIGNED)):
        launch(kernel, (3,), given, 4)
        _again(kernel, given)
    assert kernel.looked_up() == 4


def test_other_devices_constants_and_kernels_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, tensors = _Kernel(), (ALIGNED, ALIGNED)
    launches = Launch(A=6, B=7), Launch(A=7, B=6)
    for launch in launches:
        launch(kernel, (3,), tensors, 4)
    _again(kernel, tensors)
    _again(kernel, tensors, B=6, A=7)
    assert kernel.looked_up() == 4
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launches[0](kernel, (3,), tensors, 4)
    _again(kernel, tensors)
    assert kernel.looked_up() == 6
    other = _Kernel()
    launches[0](other, (3,), tensors, 4)
    _again(other, tensors)
    assert (kernel.looked_up(), other.looked_up()) == (6, 2)


@pytest.mark.parametrize(("free", "times"), [(False, 3), (True, 1)])
def test_numbers_that_triton_specializes_are_compared(free: bool, times: int) -> None:
    kernel, launch = _Kernel(), Launch(free=free, A=6, B=7)
    for number in (1, 16, 17, 16):
        launch(kernel, (3,), (ALIGNED, ALIGNED), number)
    assert kernel.looked_up() == times
    assert [how[2][0] for how in kernel.seen] == [1, 16, 17, 16]


def test_floats_among_tensors_are_not_specialized() -> None:
    kernel = _Kernel()
    for number in (1.0, 0.5):
        _again(kernel, (ALIGNED, number))
    assert kernel.looked_up() == 1


def test_nothing_is_remembered_where_no_kernel_comes_back() -> None:
    kernel, launch = _Kernel(compiles=False), Launch(A=6, B=7)
    for _ in range(2):
        launch(kernel, (3,), (ALIGNED, ALIGNED), 4)
        _again(kernel, (ALIGNED, ALIGNED))
    assert kernel.looked_up() == 4 and not known.FOUND


def test_no_tensor_is_kept() -> None:
    kernel, tensor = _Kernel(), torch.zeros(32)
    Launch(A=6, B=7)(kernel, (3,), (tensor, tensor), 4)
    _again(kernel, (tensor, tensor))
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert len(known.FOUND) == 2 and gone() is None


def test_few_kernels_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_MOST", 3)
    kernel = _Kernel()
    for a in range(8):
        _again(kernel, (ALIGNED, ALIGNED), A=a)
        assert len(known.FOUND) <= 3
    assert kernel.looked_up() == 8
