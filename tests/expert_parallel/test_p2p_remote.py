"""Experts that exchange rows by themselves, on one GPU: ranks are streams, each with a share and a heap of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from problems import Case, make_batch, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.core.call import FIELDS
from torch_moe_ops.core.extension import has_cuda_extension
from torch_moe_ops.expert_parallel.placement import ExpertPlacement
from torch_moe_ops.ops import ep_experts, run
from torch_moe_ops.transports import p2p
from torch_moe_ops.transports.symmetric import Buffers, Heap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(not has_cuda_extension(), reason="needs the CUDA extension"),
]
LIMIT = 60.0  # seconds
SIZE = 2  # ranks: blocks of both must run at the same time
_WEIGHTS = FIELDS[FIELDS.index("w13") : FIELDS.index("backend")]


class Ranks(NamedTuple):
    """What the ranks of a group have: places in memory, and each its share."""

    buffers: list[Buffers]
    heaps: list[Heap]
    shares: list[moe.PreparedWeights]
    streams: list[torch.cuda.Stream]
    placement: ExpertPlacement
    kept: list[Tensor]


def make_ranks(case: Case, most: int, partial: torch.dtype) -> Ranks:
    raw, placement = make_raw(case, "cuda"), ExpertPlacement.contiguous(case.experts, SIZE)
    options = {"act_format": case.act_format, "num_experts": case.experts, "backend": "cuda_sm90"}
    shares = [
        moe.prepare(placement.share(raw, r), local_expert_offset=placement.offset(r), **options) for r in range(SIZE)
    ]
    room = tuple(-(-size // 128) * 128 for size in p2p.room(case.hidden, most, SIZE, partial))
    memory = [torch.full((sum(room),), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(SIZE)]
    flags = [torch.zeros(torch.ops.moeq_C.ep_p2p_buffer_bytes(), dtype=torch.uint8, device="cuda") for _ in range(SIZE)]
    of_flags, of_heaps = (torch.tensor([t.data_ptr() for t in ts]) for ts in (flags, memory))
    buffers = [Buffers(of_flags, r, LIMIT, None, ()) for r in range(SIZE)]
    heaps = [Heap(of_heaps, torch.tensor(room[:3]), memory[r], room, ()) for r in range(SIZE)]
    torch.cuda.synchronize()
    return Ranks(buffers, heaps, shares, [torch.cuda.Stream() for _ in range(SIZE)], placement, flags)


def tables_of(ranks: Ranks) -> ep_experts.Tables:
    """Every expert lies at the place of its number."""
    each = torch.arange(ranks.placement.num_experts, dtype=torch.int32, device="cuda")
    return ep_experts.Tables(each, torch.ones_like(each), each, torch.zeros_like(each, dtype=torch.int64))


def call_of(ranks: Ranks, rank: int, rows: tuple[Tensor, Tensor, Tensor], most: int, partial: torch.dtype) -> Any:
    """As the op checks it."""
    w = ranks.shares[rank]
    given = dict(zip(("hidden_states", "topk_ids", "topk_weights"), rows, strict=True))
    given |= tables_of(ranks)._asdict()
    given |= {name: getattr(w, name) for name in (*_WEIGHTS, "backend", "scheme", "act_format", "activation")}
    given |= {name: getattr(w, name) for name in ("num_experts", "local_expert_offset", "router_weight_on_input")}
    given |= {"rank": rank, "transport": "p2p", "group": "none", "world_size": SIZE, "max_tokens": most}
    given |= {"slots_of_ranks": ranks.placement.slots_of_ranks, "partial_dtype": partial}
    given |= {"weight_policy": "exact", "out_dtype": torch.float32}
    given |= dict.fromkeys(("swiglu_alpha", "swiglu_beta", "swiglu_limit"))
    return ep_experts._checked((), given, True, False)


def exchanged(ranks: Ranks, rows: list[tuple[Tensor, Tensor, Tensor]], most: int, partial: torch.dtype) -> list[Tensor]:
    """What every rank gets."""
    remote = BACKENDS["cuda_sm90"].remote
    assert remote is not None
    found = [call_of(ranks, rank, rows[rank], most, partial) for rank in range(SIZE)]
    around = [p2p.Around(ranks.buffers[r], ranks.heaps[r], found[r].exchange, partial) for r in range(SIZE)]
    ready = [run.completed(one.call, one.plan, one.table, partial) for one in found]
    outs = [one.result() for one in found]
    staged = on_streams(ranks, lambda r: around[r].stage(ready[r], found[r].tables))
    on_streams(ranks, lambda r: remote.run(*staged[r][0]))
    on_streams(ranks, lambda r: around[r].add(staged[r][0].parts, staged[r][1], outs[r]))
    for one, (_, ids, _) in zip(found, rows, strict=True):
        assert torch.equal(one.tables.load, torch.bincount(ids[ids >= 0], minlength=one.tables.load.shape[0]))
    return outs


def on_streams(ranks: Ranks, part: Callable[[int], Any]) -> list[Any]:
    """A part of a call of each rank. All of it ends before the next part: who waits holds multiprocessors here."""
    torch.cuda.synchronize()
    made = []
    for rank, stream in enumerate(ranks.streams):
        with torch.cuda.stream(stream):
            made.append(part(rank))
    torch.cuda.synchronize()
    return made


def by_hand(ranks: Ranks, rows: list[tuple[Tensor, Tensor, Tensor]], most: int, partial: torch.dtype) -> list[Tensor]:
    """Every share on everybody's rows, and the sums in rank order."""
    padded = []
    for at, fill in enumerate((0, -1, 0)):
        parts = [rows[r][at] for r in range(SIZE)]
        padded.append(torch.cat([torch.cat((t, t.new_full((most - t.shape[0], t.shape[1]), fill))) for t in parts]))
    total = torch.zeros(SIZE * most, rows[0][0].shape[1], device="cuda")
    for w in ranks.shares:
        total += moe.fused_moe_routed(*padded, w, out_dtype=partial)
    return [total[r * most :][: rows[r][0].shape[0]] for r in range(SIZE)]


CASES = {
    "nvfp4": (Case(experts=16, top_k=4, hidden=512, inter=256), 100),
    "odd top_k": (Case(experts=15, top_k=3, hidden=256, inter=192), 77),
    "mxfp4": (Case(scheme="mxfp4", experts=8, top_k=2, hidden=256, inter=128), 130),
    "fp8 weights": (Case(scheme="fp8", experts=8, top_k=2, hidden=256, inter=128), 70),
    "blocks of fp8 weights": (Case(scheme="fp8_block", experts=8, top_k=2, hidden=256, inter=128), 70),
    "W4A4": (
        Case(act_format="nvfp4", input_scale="tensor", experts=16, top_k=4, hidden=512, inter=256),
        100,
    ),
    "W4A4, a scale of each token": (Case(act_format="nvfp4", experts=8, top_k=2, hidden=256, inter=128), 64),
    "W4A8": (Case(act_format="fp8", experts=8, top_k=2, hidden=512, inter=256), 64),
    "slots for a cluster": (Case(experts=16, top_k=8, hidden=64, inter=64), 1500),
}


@pytest.mark.parametrize("partial", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str, partial: torch.dtype) -> None:
    """As the shares on gathered rows, whatever the numbers of tokens and of rows that stand for none."""
    case, most = CASES[name]
    ranks = make_ranks(case, most, partial)
    for turn, (here, there) in enumerate(((most, most), (most, 3), (0, most - 1), (most // 2, 0))):
        rows = []
        for rank, count in enumerate((here, there)):
            batch = make_batch(dataclasses.replace(case, tokens=max(count, 1), seed=9 * turn + rank), "cuda")
            rows.append((batch[0][:count], batch[1][:count].int(), batch[2][:count].float()))
        rows[0][1][: here // 3, 0] = -1  # of nobody
        rows[0][1][: here // 4] = 0  # all of one rank, and duplicates
        for size in (most, max(here, there)):
            got, want = exchanged(ranks, rows, size, partial), by_hand(ranks, rows, size, partial)
            for rank in range(SIZE):
                assert torch.equal(got[rank], want[rank]), (turn, size, rank)


def test_refusals() -> None:
    case = Case(experts=8, top_k=2, hidden=256, inter=128)
    ranks = make_ranks(case, 8, torch.bfloat16)
    x, ids, weights = make_batch(dataclasses.replace(case, tokens=8), "cuda")
    heap, own = ranks.heaps[0], ranks.buffers[0]
    around, places = [own.addresses, heap.addresses, heap.sizes, 0], torch.empty_like(ids)
    parts = heap.part(3, torch.bfloat16, (16, 256))
    stage, add = torch.ops.moeq_C.ep_p2p_stage, torch.ops.moeq_C.ep_p2p_sum
    ends, out = torch.tensor([4, 8]), torch.empty(8, 256, device="cuda")
    for text, call in (
        ("max_tokens must be in 8", lambda: stage(x, ids, weights, places, *around, 7, LIMIT)),
        ("tokens must have room", lambda: stage(x, ids, weights, places, *around, 9, LIMIT)),
        ("ids, places and weights must be", lambda: stage(x, ids.long(), weights, places, *around, 8, LIMIT)),
        ("heaps must be", lambda: stage(x, ids, weights, places, around[0], around[1][:1], *around[2:], 8, LIMIT)),
        ("sizes must be", lambda: stage(x, ids, weights, places, *around[:2], heap.sizes[:2], 0, 8, LIMIT)),
        ("parts must be those", lambda: add(parts[2:], ids, out, ends, *around, LIMIT)),
        ("out must be", lambda: add(parts, ids, torch.empty(9, 256, device="cuda"), ends, *around, LIMIT)),
        ("ends must be", lambda: add(parts, ids, out, ends[:1], *around, LIMIT)),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
