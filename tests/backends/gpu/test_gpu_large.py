"""Offsets beyond 2^31 on a GPU."""

from __future__ import annotations

import dataclasses
import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu_layers import FORMATS, Format, Sizes, make_batch, make_raw, needs_cuda, prepare
from tolerances import BF16, relative_l2

import torch_moe_ops as moe

pytestmark = [pytest.mark.gpu, needs_cuda]

PAIR = Sizes(experts=2, top_k=1, hidden=4096, inter=2048)
# A format of every scheme: the offsets are the weights'.
BY_SCHEME = list({(f.backend, f.scheme): f for f in FORMATS}.values())
BY_ACTIVATION = list({(f.backend, f.act_format): f for f in FORMATS}.values())
_PATIENCE = 100.0  # seconds


@contextmanager
def reserved(needed: int) -> Iterator[None]:
    """Hold that many bytes of the device, waiting for other test processes to give theirs back."""
    deadline = time.monotonic() + _PATIENCE
    with Path(tempfile.gettempdir(), "moeq-tests-large.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        while torch.cuda.mem_get_info()[0] < needed and time.monotonic() < deadline:
            time.sleep(0.2)
        free = torch.cuda.mem_get_info()[0]
        if free < needed:
            pytest.skip(f"needs {needed >> 30} GiB of free device memory, got {free >> 30}")
        block = torch.empty(needed, dtype=torch.uint8, device="cuda")
        del block  # stays with this process's allocator
    try:
        yield
    finally:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("fmt", BY_SCHEME, ids=str)
def test_weights_of_more_than_2_31_elements(fmt: Format) -> None:
    """Two experts over and over: the last pair gives what the pair alone gives."""
    few = prepare(make_raw(fmt, PAIR), fmt)
    copies = 2**31 // few.w13.numel() + 1
    with reserved(2 * copies * few.w13.numel() * few.w13.element_size()):
        tensors = {name: t for name, t in few.tensors().items() if t.ndim and t.shape[0] == 2}
        many = dataclasses.replace(
            few,
            **{name: t.repeat(copies, *[1] * (t.ndim - 1)) for name, t in tensors.items()},
            num_experts=2 * copies,
            num_local_experts=2 * copies,
        )
        assert many.w13.numel() > 2**31
        for tokens in (1, 40):
            x, ids, weights = make_batch(PAIR, few.hidden_size, tokens)
            out = moe.fused_moe_routed(x, ids + 2 * (copies - 1), weights, many)
            assert relative_l2(out, moe.fused_moe_routed(x, ids, weights, few)) < BF16
            assert out.abs().max() > 0
        del many, tensors


@pytest.mark.parametrize("fmt", BY_ACTIVATION, ids=str)
def test_hidden_states_of_more_than_2_31_elements(fmt: Format) -> None:
    sizes = dataclasses.replace(PAIR, hidden=8192, inter=64)
    tokens = 2**31 // sizes.hidden + 100
    tail = slice(tokens - 200, None)
    w = prepare(make_raw(fmt, sizes), fmt)
    with reserved(11 * tokens * sizes.hidden):
        x = torch.zeros(tokens, sizes.hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.zeros(tokens, 1, device="cuda", dtype=torch.int32)
        weights = torch.ones(tokens, 1, device="cuda")
        x[tail], ids[tail], weights[tail] = make_batch(sizes, sizes.hidden, 200)
        out = moe.fused_moe_routed(x, ids, weights, w)
        assert relative_l2(out[tail], moe.fused_moe_routed(x[tail], ids[tail], weights[tail], w)) < BF16
        assert not out[: tokens - 200].any()
        del x, out


def test_router_logits_of_more_than_2_31_elements() -> None:
    tokens = 2**31 // 256 + 100
    with reserved(4 * tokens * 256):
        logits = torch.zeros(tokens, 256, device="cuda", dtype=torch.bfloat16)
        logits[-100:].normal_()
        ids, weights = torch.ops.moeq.route(logits, None, "renormalize", 8)
        want_ids, want = torch.ops.moeq.route(logits[-100:], None, "renormalize", 8)
        assert torch.equal(ids[-100:], want_ids) and torch.equal(weights[-100:], want)
        assert torch.equal(ids[-101], torch.arange(8, device="cuda", dtype=torch.int32))
        del logits
