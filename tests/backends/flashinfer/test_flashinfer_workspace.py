"""Working memory of the CUTLASS kernels: no call can replace, free or overwrite what a CUDA graph replays on.

Pools of the allocator are simulated: every torch.empty notes which one was in effect.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from problems import make_batch, make_raw

import torch_moe_ops as moe

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_cutlass_cases import BLACKWELL, NAME, NVFP4
from flashinfer_sim import seam


class Pools:
    """Which pool each workspace came from. Tensors are seen through weak references only."""

    def __init__(self) -> None:
        self.current = "default"
        self.made: list[tuple[weakref.ref[torch.Tensor], str]] = []

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def of(self, tensor: torch.Tensor) -> str:
        """The pool of a tensor that is still alive."""
        alive = {found.data_ptr(): pool for ref, pool in self.made if (found := ref()) is not None}
        return alive[tensor.data_ptr()]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    found, real = Pools(), torch.empty

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = real(*args, **kwargs)
        if tensor.dtype == torch.uint8 and tensor.ndim == 1:
            found.made.append((weakref.ref(tensor), found.current))
        return tensor

    monkeypatch.setattr(torch, "empty", noted)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bound arguments of every call, which keep their workspaces alive."""
    from flashinfer.fused_moe import core

    if not hasattr(core, "cutlass_fused_moe_workspace_size"):
        pytest.skip("this release takes no workspace")
    seam.allow_cpu(monkeypatch, NAME, BLACKWELL)
    return seam.install_cutlass(monkeypatch, BLACKWELL)


def run(w: moe.PreparedWeights, tokens: int) -> None:
    moe.fused_moe_routed(*make_batch(dataclasses.replace(NVFP4, tokens=tokens)), w)


SEQUENCES = {
    "captured after a warm-up on the same stream": ((("default", 5), ("graph", 5), ("default", 500), ("graph", 5))),
    "captured before any other call": ((("graph", 5), ("default", 5), ("default", 500))),
    "warmed up inside a graph's pool": ((("graph", 500), ("default", 5), ("other graph", 5), ("default", 600))),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_memory_is_of_the_pool_in_effect(name: str, pools: Pools, calls: list[dict[str, Any]]) -> None:
    """Else a graph would replay on memory that the default pool frees, or a call write into a graph's."""
    w = moe.prepare(make_raw(NVFP4), act_format="nvfp4", backend=NAME)
    for pool, tokens in SEQUENCES[name]:
        with pools.use(pool):
            run(w, tokens)
    assert [pools.of(a["workspace_buffer"]) for a in calls] == [pool for pool, _ in SEQUENCES[name]]


def test_no_two_calls_share_memory(pools: Pools, calls: list[dict[str, Any]]) -> None:
    w = moe.prepare(make_raw(NVFP4), act_format="nvfp4", backend=NAME)
    for tokens in (5, 3, 500, 5):
        run(w, tokens)
    assert len({a["workspace_buffer"].data_ptr() for a in calls}) == 4
    sizes = [a["workspace_buffer"].numel() for a in calls]
    assert sizes[0] == sizes[3] and sizes[2] > sizes[0], "5 tokens ask for as much as 8"


def test_nothing_outlives_a_call(pools: Pools, calls: list[dict[str, Any]]) -> None:
    w = moe.prepare(make_raw(NVFP4), act_format="nvfp4", backend=NAME)
    for tokens in (5, 500):
        run(w, tokens)
    calls.clear()
    gc.collect()
    assert pools.made and all(ref() is None for ref, _ in pools.made)
