"""Launches that differ in numbers alone (triton_engine/repeated.py), with stand-ins for Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_moe_ops.backends.triton_engine.repeated import Repeated


class _Kernel:
    """Keeps what it is launched with. compiles: it hands out the kernel that was found, as it does on a GPU."""

    arg_names = ("x", "y", "first", "count", "A", "B")

    def __init__(self, compiles: bool) -> None:
        self.compiles, self.seen = compiles, list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.seen.append(("looked up", grid, args, constants))
            return {(3, 1, 1): self._again, (4, 5, 1): self._again} if self.compiles else None

        return launch

    def _again(self, *args: Any) -> None:
        self.seen.append(("again", args))


def test_the_first_launch_is_looked_up() -> None:
    kernel = _Kernel(compiles=True)
    launch = Repeated(kernel, ("x", "y"), {"num_warps": 8}, B=7, A=6)  # constants in any order
    launch((3,), 0, 2)
    launch((3,), 2, 2)
    launch((4, 5), 4, 1)
    assert kernel.seen == [
        ("looked up", (3,), ("x", "y", 0, 2), {"A": 6, "B": 7, "num_warps": 8}),
        ("again", ("x", "y", 2, 2, 6, 7)),
        ("again", ("x", "y", 4, 1, 6, 7)),
    ]


def test_every_launch_is_looked_up_where_none_hands_out_a_kernel() -> None:
    kernel = _Kernel(compiles=False)
    launch = Repeated(kernel, ("x", "y"), None, A=6, B=7)
    for first in (0, 2):
        launch((3,), first, 2)
    assert [how for how, *_ in kernel.seen] == ["looked up"] * 2
