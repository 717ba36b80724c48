"""Cases of partial rows that travel in 8 bits; as ep_cases.py has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from ep_cases import BASE, BF16, F32, MAX_TOKENS, World, distance, expect, layer
from problems import make_raw
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torch_moe_ops as moe
from torch_moe_ops.transports import nccl

E4M3 = torch.float8_e4m3fn
WIDE = dataclasses.replace(BASE, hidden=320, inter=64, foreign=True)  # two groups of 128 values and one of 64
Batch = tuple[Tensor, Tensor, Tensor]


def rounded(rows: Tensor) -> Tensor:
    """What of partial rows arrives, by the formula of docs/numerics.md, a group at a time."""
    groups = []
    for group in rows.split(128, -1):
        amax = group.abs().amax(-1, keepdim=True)
        scale = torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), amax / 448, torch.nan))
        groups.append((group / scale).clamp(-448, 448).to(E4M3).to(F32) * scale)
    return torch.cat(groups, -1)


def bound(rows: Tensor) -> Tensor:
    """The most by which that moves each value: half a step of e4m3."""
    amax = torch.cat([g.abs().amax(-1, keepdim=True).expand_as(g) for g in rows.split(128, -1)], -1)
    return torch.maximum(rows.abs() / 16, amax / 448 / 1024) * (1 + 2**-18)


def parts_of(world: World, ep: moe.ExpertParallel, raw: moe.RawWeights, batch: Batch, sizes: Iterable[int]) -> Tensor:
    """[world_size, tokens, hidden_size] float32: each rank's partial rows, computed in this process alone."""
    x, ids, weights = batch
    placed = []
    for owner, mine in enumerate(ids.split(list(sizes))):
        tables, load = ep.placement.tables(owner).values(), torch.zeros_like(ep.load)
        placed.append(torch.ops.moeq.ep_place(mine, *tables, load, owner))
    places, parts = torch.cat(placed), []
    for rank in range(world.size):
        slots = {"num_experts": ep.placement.num_slots, "local_expert_offset": ep.placement.offset(rank)}
        w = moe.prepare(ep.placement.share(raw, rank), act_format=ep.w.act_format, **slots)
        parts.append(moe.fused_moe_routed(x, places, weights, w, out_dtype=F32))
    return torch.stack(parts)


def added(parts: Tensor) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def check(
    world: World, raw: moe.RawWeights, batch: Batch, counts: Iterable[int] | None = None, **options: Any
) -> moe.ExpertParallel:
    """Bit for bit what one process makes by the same roundings, and within the stated bound of the exact sum."""
    options = {"act_format": "none", **options}
    ep = moe.ExpertParallel.from_raw(world.group, raw, 24, partial_dtype=E4M3, **options)
    sizes = world.uneven(batch[0].shape[0]) if counts is None else list(counts)
    mine = world.part(batch[0].shape[0], sizes)
    parts = parts_of(world, ep, raw, batch, sizes)[:, mine]
    for dtype in (F32, BF16):
        got = ep(*(t[mine] for t in batch), dtype)
        assert torch.equal(got, added(rounded(parts)).to(dtype))
        if dtype == F32:
            off = (got.double() - parts.double().sum(0)).abs()
            assert (off <= bound(parts).double().sum(0) + parts.abs().sum(0) * 2.0**-22).all()
            assert not parts.any() or 1e-3 < distance(got, added(parts)) < 0.05
    return ep


def e4m3_rows(world: World) -> None:
    """Ids of nobody, duplicates, several schemes; a hidden size below a group and one of two and a half."""
    for scheme in ("none", "nvfp4", "fp8_block"):
        for case in (dataclasses.replace(WIDE, scheme=scheme), dataclasses.replace(BASE, scheme=scheme)):
            x, ids, weights = world.batch(case)
            ids[::3, 1] = ids[::3, 0]
            check(world, make_raw(case), (x, ids, weights))
    check(world, make_raw(WIDE), (torch.randn(24, WIDE.hidden).bfloat16(), torch.full_like(ids, -7), weights))
    quantized = dataclasses.replace(WIDE, scheme="nvfp4", act_format="nvfp4", input_scale="tensor")
    check(world, make_raw(quantized), world.batch(quantized), act_format="nvfp4", payload="quantized")


def e4m3_uneven_tokens(world: World) -> None:
    batch = world.batch(WIDE)
    for rank in range(world.size):
        check(world, make_raw(WIDE), batch, [24 if r == rank else 0 for r in range(world.size)])
    check(world, make_raw(WIDE), tuple(t[:0] for t in batch), [0] * world.size)  # type: ignore[arg-type]


def e4m3_shared_experts_and_replicas(world: World) -> None:
    shared = make_raw(dataclasses.replace(WIDE, experts=1, inter=2 * WIDE.inter, seed=5))
    raw, (x, ids, weights) = moe.with_shared_experts(make_raw(WIDE), shared), world.batch(WIDE)
    columns = torch.tensor([8, 9], dtype=ids.dtype).expand(24, 2)
    batch = (x, torch.cat((ids, columns), 1), torch.cat((weights, torch.ones(24, 2)), 1))
    assert check(world, raw, batch).w.num_shared_experts == 2
    experts = tuple(range(WIDE.experts))
    for rule in ("nearest", "spread"):
        check(world, make_raw(WIDE), world.batch(WIDE), placement=moe.ExpertPlacement((experts,) * world.size, rule))


def e4m3_capacity(world: World) -> None:
    """Rows only where they are needed: a rank that has nothing of a token adds zeros, as it does without."""
    batch, mine = world.batch(WIDE), world.part(WIDE.tokens)
    raw = make_raw(WIDE)
    limited, everything = (check(world, raw, batch, capacity=c) for c in (MAX_TOKENS, None))
    assert torch.equal(limited(*(t[mine] for t in batch)), everything(*(t[mine] for t in batch)))


def e4m3_not_finite(world: World) -> None:
    """A token with NaN or an infinity has NaN in all of its result; no other token's changes by a bit."""
    x, ids, weights = world.batch(BASE)
    mine, ep = world.part(BASE.tokens), layer(world, BASE, partial_dtype=E4M3)
    want = ep(x[mine], ids[mine], weights[mine])
    assert want.isfinite().all()
    spoilt = x.clone()
    spoilt[::4, 3], spoilt[2::4, 60] = torch.nan, torch.inf
    rows = torch.arange(BASE.tokens)[mine] % 2 == 0
    got = ep(spoilt[mine], ids[mine], weights[mine])
    assert got[rows].isnan().all() and torch.equal(got[~rows], want[~rows])
    assert rows.any() and not rows.all()


def e4m3_traced(world: World) -> None:
    """In one graph, and what crosses the wire: bytes of codes and scales, whatever the number of tokens."""
    batch, mine = world.batch(WIDE), world.part(WIDE.tokens)
    ep = layer(world, WIDE, partial_dtype=E4M3)
    own, sent = tuple(t[mine] for t in batch), []
    plain = nccl.all_to_all

    def counting(group: str, tensors: list[Tensor]) -> list[Tensor]:
        sent.append(sum(t.numel() * t.element_size() for t in tensors))
        return plain(group, tensors)

    with mock.patch.object(nccl, "all_to_all", counting):
        want = ep(*own)
    assert sent == [world.size * MAX_TOKENS * (320 + 3 * 4)], sent
    graph = torch.compile(lambda *rows: ep(*rows) + 1, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(graph(*own), want + 1)
        assert torch.equal(graph(*(t[:1] for t in own)), want[:1] + 1)


def e4m3_told(world: World) -> None:
    """explain says what travels; what cannot be is refused on every rank."""
    text = str(moe.explain(layer(world, WIDE, partial_dtype=E4M3)))
    said = "all-to-all of partial rows, float8_e4m3fn with a float32 scale for 128 values, 332 bytes a row"
    assert said in text, text
    assert "all-to-all of partial rows, float32, 1280 bytes a row" in str(moe.explain(layer(world, WIDE)))
    refused = expect(ValueError, lambda: layer(world, WIDE, partial_dtype=torch.float8_e5m2))
    assert "partial_dtype must be one of ['torch.float32', 'torch.bfloat16', 'torch.float8_e4m3fn']" in refused
    other = E4M3 if world.rank else BF16
    refused = expect(ValueError, lambda: layer(world, WIDE, partial_dtype=other))
    assert "partial_dtype must be the same on every rank" in refused


def e4m3_of_divided_experts(world: World) -> None:
    """EP x TP: 8 bits over the ranks of "ep", float32 over those of "tp"."""
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("ep", "tp"))
    outer = World(mesh.get_local_rank("ep"), world.size // 2)
    case = dataclasses.replace(BASE, hidden=320, inter=256, dtype=F32)
    batch, mine = outer.batch(case), outer.part(case.tokens)
    for capacity in outer.capacities:
        options = {"act_format": "none", "capacity": capacity}
        ep, low = (
            moe.ExpertParallel.from_raw(mesh, make_raw(case), MAX_TOKENS, partial_dtype=dtype, **options)
            for dtype in (F32, E4M3)
        )
        want, got = (one(*(t[mine] for t in batch)) for one in (ep, low))
        assert 1e-3 < distance(got, want) < 0.05, distance(got, want)


PARTIAL_ROWS: dict[str, Callable[[World], None]] = {
    f.__name__: f
    for f in (
        e4m3_rows,
        e4m3_uneven_tokens,
        e4m3_shared_experts_and_replicas,
        e4m3_capacity,
        e4m3_not_finite,
        e4m3_traced,
        e4m3_told,
    )
}
PARTIAL_ROWS_DIVIDED: dict[str, Callable[[World], None]] = {"e4m3_of_divided_experts": e4m3_of_divided_experts}
