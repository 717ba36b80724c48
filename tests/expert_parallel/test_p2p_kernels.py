"""The kernels of transport "p2p" on one GPU: its ranks are streams, whose blocks wait for each other."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from torch_moe_ops.core.extension import has_cuda_extension

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_cuda_extension(), reason="needs the CUDA extension"),
]
LIMIT = 20.0  # seconds
FLAGS, WORDS = 0, 1 << 30  # how rows go: of the ops' argument `few`
COUNTS = {2: [3, 0], 3: [1, 4, 2], 5: [0, 4, 4, 1, 3], 8: [4, 3, 2, 1, 0, 1, 2, 3]}


class Ranks(NamedTuple):
    addresses: Tensor
    buffers: list[Tensor]
    streams: list[torch.cuda.Stream]

    @property
    def size(self) -> int:
        return len(self.streams)


def make_ranks(size: int) -> Ranks:
    buffers = [
        torch.zeros(torch.ops.moeq_C.ep_p2p_buffer_bytes(), dtype=torch.uint8, device="cuda") for _ in range(size)
    ]
    addresses = torch.tensor([b.data_ptr() for b in buffers])
    ranks = Ranks(addresses, buffers, [torch.cuda.Stream() for _ in range(size)])
    torch.cuda.synchronize()
    return ranks


def rows_of(counts: list[int], k: int, hidden: int, scale: int, seed: int) -> list[list[Tensor | None]]:
    """x, scale or None, ids and weights of each rank."""
    g = torch.Generator("cuda").manual_seed(seed)

    def integers(n: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(0, 120, (n, columns), device="cuda", generator=g).to(dtype)

    return [
        [
            integers(n, hidden, torch.bfloat16),
            integers(n, scale, torch.uint8) if scale else None,
            integers(n, k, torch.int32),
            integers(n, k, torch.float32),
        ]
        for n in counts
    ]


def dispatch(ranks: Ranks, given: list[list[Tensor | None]], most: int, few: int) -> list[list[Tensor | None]]:
    received = [
        [None if t is None else t.new_full((ranks.size * most, t.shape[1]), 77) for t in rows] for rows in given
    ]
    torch.cuda.synchronize()
    for rank, stream in enumerate(ranks.streams):
        order = (ranks.addresses, rank, most, LIMIT, few)
        with torch.cuda.stream(stream):
            torch.ops.moeq_C.ep_p2p_dispatch(*given[rank], *received[rank], *order)
    torch.cuda.synchronize()
    return received


def padded(tensors: list[Tensor], most: int, fill: int) -> Tensor:
    return torch.cat([torch.cat((t, t.new_full((most - t.shape[0], t.shape[1]), fill))) for t in tensors])


def check_dispatch(
    ranks: Ranks,
    counts: list[int],
    most: int,
    k: int,
    hidden: int,
    scale: int,
    seed: int,
    few: int,
) -> None:
    given = rows_of(counts, k, hidden, scale, seed)
    received = dispatch(ranks, given, most, few)
    for place, fill in enumerate((0, 0, -1, 0)):
        if given[0][place] is None:
            continue
        want = padded([rows[place] for rows in given], most, fill)  # type: ignore[misc]
        for rank in range(ranks.size):
            assert torch.equal(received[rank][place], want), (place, rank)  # type: ignore[arg-type]


def check_combine(
    ranks: Ranks,
    counts: list[int],
    most: int,
    hidden: int,
    partial: torch.dtype,
    out: torch.dtype,
    few: int,
) -> None:
    g = torch.Generator("cuda").manual_seed(most)
    parts = [torch.randn(ranks.size * most, hidden, device="cuda", generator=g).to(partial) for _ in counts]
    sums = [parts[0].new_empty((n, hidden), dtype=out) for n in counts]
    torch.cuda.synchronize()
    for rank, stream in enumerate(ranks.streams):
        with torch.cuda.stream(stream):
            torch.ops.moeq_C.ep_p2p_combine(parts[rank], sums[rank], ranks.addresses, rank, LIMIT, few)
    torch.cuda.synchronize()
    for rank, n in enumerate(counts):
        want = torch.zeros(n, hidden, device="cuda")
        for part in parts:
            want += part.unflatten(0, (ranks.size, most))[rank, :n].float()
        assert torch.equal(sums[rank], want.to(out)), rank


@pytest.mark.parametrize("few", [FLAGS, WORDS, 300], ids=["flags", "words", "either"])
@pytest.mark.parametrize("size", COUNTS)
def test_few_rows(size: int, few: int) -> None:
    """Rows of every alignment, other sizes from call to call, in turns with the combine."""
    ranks, counts = make_ranks(size), COUNTS[size]
    for seed, (most, k, hidden, scale) in enumerate([(4, 8, 64, 0), (5, 1, 24, 3), (4, 3, 512, 32), (7, 2, 8, 1)] * 3):
        check_dispatch(ranks, counts, most, k, hidden, scale, seed, few)
        for partial in (torch.float32, torch.bfloat16, torch.float16):
            check_combine(ranks, counts, most, hidden, partial, torch.bfloat16, few)
        check_combine(ranks, counts, most, hidden, torch.bfloat16, torch.float32, few)
        check_combine(ranks, counts, most, hidden, torch.float32, torch.float16, few)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).multi_processor_count < 128,
    reason="the blocks of two ranks must all run at the same time",
)
def test_many_steps() -> None:
    ranks = make_ranks(2)
    for most, hidden in ((2000, 4096), (1, 64), (3000, 2880), (129, 7168)):
        counts = [most, most // 2]
        check_dispatch(ranks, counts, most, 8, hidden, 0, most, FLAGS)
        check_combine(ranks, counts, most, hidden, torch.float32, torch.bfloat16, FLAGS)
        check_combine(ranks, counts, most, hidden, torch.bfloat16, torch.float32, FLAGS)


def test_words_of_many_blocks() -> None:
    """As many words as there is room for, and one vector more, which goes with flags."""
    ranks = make_ranks(2)
    for turn in range(4):
        check_combine(ranks, [64, 31], 64, 2048, torch.bfloat16, torch.float32, WORDS)
        check_combine(ranks, [1, 2], 2, 2048 * 32 + 8, torch.bfloat16, torch.bfloat16, WORDS)
        check_dispatch(ranks, [57, 60], 60, 8, 2048, 0, turn, WORDS)


def rounds_of(buffer: Tensor) -> Tensor:
    """Counters of both phases with flags, then of words."""
    return buffer[: 3 * 128 * 4].view(torch.int32)


def words_of(buffer: Tensor) -> Tensor:
    """[slot, rank, block, half, thread, word, (4 bytes, round)]: the last member of Buffer."""
    shape = (2, 8, 128, 2, 128, 2, 2)
    return buffer[-4 * math.prod(shape) :].view(torch.int32).view(shape)


def test_rounds_wrap() -> None:
    """Counters that pass 2^32, after rounds that have left a flag in every slot."""
    ranks = make_ranks(2)
    for buffer in ranks.buffers:
        rounds_of(buffer).fill_(-7)
        words_of(buffer).fill_(77)
    for seed in range(12):
        for few in (FLAGS, WORDS):
            check_dispatch(ranks, [2, 3], 3, 2, 64, 0, seed, few)
            check_combine(ranks, [2, 3], 3, 64, torch.float32, torch.float32, few)


def test_words_are_renewed() -> None:
    """Words of threads that have nothing to send do not outlive their round: it comes again after 2^32 others."""
    ranks = make_ranks(2)
    for buffer in ranks.buffers:
        rounds_of(buffer).fill_(65535 - 1)
        words_of(buffer).fill_(77)
    for seed in range(3):
        check_dispatch(ranks, [1, 1], 1, 2, 64, 0, seed, WORDS)
    for rank, buffer in enumerate(ranks.buffers):
        of_block = words_of(buffer)[:, 1 - rank, 0, ..., 1]
        assert (of_block[0] == 65536).all() and (of_block[1] == 65537).all()


def test_refusals() -> None:
    ranks = make_ranks(2)
    x, _, ids, weights = rows_of([2], 2, 64, 0, 0)[0]
    outs = [t.new_empty((6, t.shape[1])) for t in (x, ids, weights)]  # type: ignore[union-attr]

    def call(rank: int = 0, most: int = 3, limit: float = LIMIT, few: int = 0) -> None:
        order = (ranks.addresses, rank, most, limit, few)
        torch.ops.moeq_C.ep_p2p_dispatch(x, None, ids, weights, outs[0], None, outs[1], outs[2], *order)

    for text, options in (
        ("rank must be in 0 ... 1", {"rank": 2}),
        ("max_tokens must be in 2", {"most": 1}),
        ("x_out must have 8 rows", {"most": 4}),
        ("limit must be a positive", {"limit": 0.0}),
        ("few must be at least 0", {"few": -1}),
    ):
        with pytest.raises(RuntimeError, match=text):
            call(**options)  # type: ignore[arg-type]
