"""Cases of expert parallelism: each is run by every rank of a group, and compares with one process that has it all.

A case is a function of the world. tests/programs/ep_ranks.py runs them, tests/expert_parallel asks for them by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from problems import Case, make_batch, make_raw
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torch_moe_ops as moe
from torch_moe_ops.config import FusedMoEParallelConfig
from torch_moe_ops.core.schemes import SCHEMES

F32, BF16 = torch.float32, torch.bfloat16
BASE = Case(experts=8, tokens=24, top_k=3)
MAX_TOKENS = 16  # of a rank
# GPU kernels are chosen by the number of experts and rows: a share may run on others than the whole, at their distance.
OTHER_KERNELS = 6e-3


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: str = "cpu"
    transport: str = "auto"

    @property
    def group(self) -> Any:
        return dist.group.WORLD

    @property
    def capacities(self) -> tuple[int | None, ...]:
        return (None,) if self.transport == "p2p" else (None, MAX_TOKENS)

    def near(self, tolerance: float) -> float:
        return tolerance if self.device == "cpu" else max(tolerance, OTHER_KERNELS)

    def batch(self, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        return make_batch(case, self.device)

    def part(self, tokens: int, counts: Iterable[int] | None = None) -> slice:
        """This rank's tokens: by default another number on every rank."""
        sizes = list(counts) if counts is not None else self.uneven(tokens)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def uneven(self, tokens: int) -> list[int]:
        weights = [r + 1 for r in range(self.size)]
        sizes = [tokens * w // sum(weights) for w in weights]
        return [*sizes[:-1], tokens - sum(sizes[:-1])]


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2; 0 where there is nothing to compare."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert not got.isnan().any()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def options_of(case: Case) -> dict[str, Any]:
    return {"act_format": case.act_format, "weight_policy": case.weight_policy}


def layer(world: World, case: Case, max_tokens: int = MAX_TOKENS, **options: Any) -> moe.ExpertParallel:
    options = {"transport": world.transport, **options_of(case), **options}
    return moe.ExpertParallel.from_raw(world.group, make_raw(case, world.device), max_tokens, **options)


def one_process(case: Case, x: Tensor, ids: Tensor, weights: Tensor, out_dtype: torch.dtype | None = F32) -> Tensor:
    w = moe.prepare(make_raw(case, x.device.type), **options_of(case))
    return moe.fused_moe_routed(x, ids, weights, w, out_dtype=out_dtype)


def compare(
    world: World,
    ep: moe.ExpertParallel,
    case: Case,
    batch: tuple[Tensor, Tensor, Tensor],
    counts: Iterable[int] | None = None,
    tolerance: float = 1e-6,
    out_dtype: torch.dtype = F32,
) -> Tensor:
    mine = world.part(batch[0].shape[0], counts)
    got = ep(*(t[mine] for t in batch), out_dtype)
    assert got.dtype == out_dtype
    want = one_process(case, *batch, out_dtype)[mine]
    assert distance(got, want) <= world.near(tolerance), distance(got, want)
    return got


def every_scheme() -> list[Case]:
    """Every activation format of every scheme, with and without calibrated scales."""
    found = []
    for scheme in SCHEMES.values():
        base = dataclasses.replace(BASE, scheme=scheme.name, hidden=96, inter=64, bias=True)
        for act in scheme.act_formats:
            found.append(dataclasses.replace(base, act_format=act))
            if act in scheme.static_acts:
                found += [dataclasses.replace(base, act_format=act, input_scale=s) for s in ("tensor", "expert")]
    return found


def schemes(world: World) -> None:
    quantized = 0
    for case in every_scheme():
        batch = world.batch(case)
        ep, plain = layer(world, case), layer(world, case, payload="plain")
        got = compare(world, ep, case, batch)
        mine = world.part(case.tokens)
        assert torch.equal(got, plain(*(t[mine] for t in batch), F32)), case  # what is sent changes nothing
        quantized += ep.payload.name == "quantized"
        compare(world, ep, case, batch, tolerance=2e-4, out_dtype=BF16)
        low = layer(world, case, partial_dtype=BF16)
        compare(world, low, case, batch, tolerance=4e-3, out_dtype=BF16)
    assert quantized >= 6, quantized


def hidden_dtypes(world: World) -> None:
    for dtype in (torch.float16, F32):
        case = dataclasses.replace(BASE, dtype=dtype)
        compare(world, layer(world, case), case, world.batch(case))


def uneven_tokens(world: World) -> None:
    ep = layer(world, BASE, max_tokens=24)
    batch = world.batch(BASE)
    counts = [0] * world.size
    for rank in range(world.size):
        compare(world, ep, BASE, batch, [24 if r == rank else 0 for r in range(world.size)])  # all on one rank
    assert compare(world, ep, BASE, tuple(t[:0] for t in batch), counts).shape == (0, BASE.hidden)
    counts[-1] = 1
    compare(world, ep, BASE, tuple(t[:1] for t in batch), counts)


def all_to_one_rank(world: World) -> None:
    """Every token wants experts of the last rank, which has two of eight, or more."""
    x, ids, weights = world.batch(BASE)
    ids = (ids % 2 + 6).to(torch.int32)
    for ep in (layer(world, BASE, capacity=c) for c in world.capacities):
        compare(world, ep, BASE, (x, ids, weights))


def shared_experts(world: World) -> None:
    """Each rank has them, and its tokens go to its own: no other rank reads their shared columns."""
    device, batch = world.device, world.batch(BASE)
    shared = make_raw(dataclasses.replace(BASE, experts=1, inter=2 * BASE.inter, seed=5), device)
    raw = moe.with_shared_experts(make_raw(BASE, device), shared)
    logits, gate = (torch.randn(BASE.tokens, n, generator=torch.Generator().manual_seed(n)).to(device) for n in (8, 1))
    routing = moe.Routing("renormalize", BASE.top_k)
    want = moe.fused_moe(batch[0], logits, moe.prepare(raw), routing=routing, shared_expert_weights=gate, out_dtype=F32)
    mine = world.part(BASE.tokens)
    eps = [
        moe.ExpertParallel.from_raw(world.group, raw, MAX_TOKENS, transport=world.transport, capacity=c)
        for c in world.capacities
    ]
    w = eps[0].w
    assert w.num_shared_experts == 2 and w.num_local_experts == len(eps[0].placement.slots[world.rank])
    for ep in (*eps, moe.ExpertParallel(world.group, w, MAX_TOKENS)):
        nearest = ep.placement.tables(world.rank)
        own = range(w.local_expert_offset, w.local_expert_offset + w.num_local_experts)
        assert {int(nearest["slots"][nearest["first"][e]]) for e in (8, 9)} == set(own[-2:])
        got = ep.fused(batch[0][mine], logits[mine], routing=routing, shared_expert_weights=gate[mine], out_dtype=F32)
        assert distance(got, want[mine]) <= world.near(1e-6)
    for columns in (9, 10):
        wrong = torch.zeros(1, columns, device=device)
        said = expect(RuntimeError, lambda wrong=wrong: eps[0].fused(batch[0][:1], wrong, routing=routing))
        assert "router_logits must have 8 columns" in said
    plain = layer(world, BASE)
    for columns in (7, 9):
        wrong = torch.zeros(1, columns, device=device)
        said = expect(RuntimeError, lambda wrong=wrong: plain.fused(batch[0][:1], wrong, routing=routing))
        assert "router_logits must have 8 columns" in said
    said = expect(ValueError, lambda: moe.ExpertPlacement.contiguous(10, world.size).share(raw, world.rank))
    assert "must end with the shared experts [8, 9]" in said
    slots = [tuple(range(10)) if rank == 0 else (0, 9, 8) for rank in range(world.size)]
    said = expect(ValueError, lambda: moe.ExpertParallel.from_raw(world.group, raw, MAX_TOKENS, placement=slots))
    assert "must end with the shared experts [8, 9]" in said


def odd_ids(world: World) -> None:
    """Duplicates in a row, ids of nobody, int64 ids beyond int32."""
    case = dataclasses.replace(BASE, foreign=True)
    x, ids, weights = world.batch(case)
    ids[::3, 1] = ids[::3, 0]
    for ep in (layer(world, case, capacity=c) for c in world.capacities):
        compare(world, ep, case, (x, ids, weights))
        wide = ids.long()
        wide[1] = 2**40
        narrow = ids.clone()
        narrow[1] = -1
        mine = world.part(case.tokens)
        assert torch.equal(ep(x[mine], wide[mine], weights[mine]), ep(x[mine], narrow[mine], weights[mine]))
    for ep in (layer(world, case, capacity=c) for c in world.capacities):
        compare(world, ep, case, (x, torch.full_like(ids, -7), weights))


def capacities(world: World) -> None:
    """Rows only where they are needed: the same bits; one too many: an error everywhere, and the group goes on."""
    batch = world.batch(BASE)
    mine = world.part(BASE.tokens)
    everything = layer(world, BASE)
    want = compare(world, everything, BASE, batch)
    enough = layer(world, BASE, capacity=MAX_TOKENS)
    assert torch.equal(enough(*(t[mine] for t in batch), F32), want)
    sizes, ranks = world.uneven(BASE.tokens), [everything.placement.rank_of(e) for e in range(BASE.experts)]
    wanted = 0
    for r in range(world.size):
        ids = batch[1][World(r, world.size).part(BASE.tokens)].tolist()
        wanted = max(wanted, *(sum(any(ranks[e] == to for e in row) for row in ids) for to in range(world.size)))
    assert 1 < wanted <= max(sizes)
    exact = layer(world, BASE, capacity=wanted)
    assert torch.equal(exact(*(t[mine] for t in batch), F32), want)
    short = layer(world, BASE, capacity=wanted - 1)
    message = expect(RuntimeError, lambda: short(*(t[mine] for t in batch), F32))
    assert f"capacity must be at least the {wanted} rows" in message, message
    few = [1 if r == 0 else 0 for r in range(world.size)]
    compare(world, short, BASE, tuple(t[:1] for t in batch), few)
    compare(world, everything, BASE, batch)


def expect(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind}")


def replicas(world: World) -> None:
    experts = list(range(BASE.experts))
    per_rank = BASE.experts // world.size
    shuffled = [experts[r :: world.size][::-1] for r in range(world.size)]
    everywhere = [[0, *(e for e in part if e)] for part in shuffled]  # expert 0 on every rank
    ring = [[(r * per_rank + j) % BASE.experts for j in range(per_rank + 2)] for r in range(world.size)]
    batch = world.batch(BASE)
    for slots in (shuffled, everywhere, ring):
        for rule in ("nearest", "spread"):
            for capacity in world.capacities:
                placement = moe.ExpertPlacement(slots, rule)
                ep = layer(world, BASE, placement=placement, capacity=capacity)
                compare(world, ep, BASE, batch)
                mine = batch[1][world.part(BASE.tokens)]
                assert ep.load.tolist() == torch.bincount(mine.flatten(), minlength=BASE.experts).tolist()
                assert ep.total_load().tolist() == torch.bincount(batch[1].flatten(), minlength=BASE.experts).tolist()


def rebalancing(world: World) -> None:
    """Weights move, addresses do not; every scheme's tensors, and replicas."""
    counts = [BASE.experts // world.size + 1] * world.size
    for scheme in ("nvfp4", "fp8_block", "int4", "none"):
        case = dataclasses.replace(BASE, scheme=scheme, act_format="none", hidden=96, inter=64, bias=True)
        batch = world.batch(case)
        ring = [[(sum(counts[:r]) - r + j) % case.experts for j in range(n)] for r, n in enumerate(counts)]
        ep = layer(world, case, placement=ring)
        before = {name: t.data_ptr() for name, t in ep.w.tensors().items()}
        tables = [t.data_ptr() for t in (ep._first, ep._count, ep._slots)]
        want = compare(world, ep, case, batch)
        for shift in (1, 3):
            moved = [[(e + shift) % case.experts for e in experts][::-1] for experts in ring]
            ep.rebalance(moved)
            assert ep.placement == moe.ExpertPlacement(moved)
            assert distance(compare(world, ep, case, batch), want) <= 1e-6
        ep.rebalance(ring)
        assert torch.equal(compare(world, ep, case, batch), want)
        assert {name: t.data_ptr() for name, t in ep.w.tensors().items()} == before
        assert [t.data_ptr() for t in (ep._first, ep._count, ep._slots)] == tables
    assert "slots_of_ranks must be" in expect(
        ValueError, lambda: ep.rebalance([[*ring[0], 7], *ring[1:]][: world.size])
    )
    other = [experts[::-1] for experts in ring] if world.rank else ring
    assert "placement must be the same on every rank" in expect(ValueError, lambda: ep.rebalance(other))
    compare(world, ep, case, batch)


def fused(world: World) -> None:
    """Router and experts; batches of sequences; a bound for one call."""
    x, _, _ = world.batch(BASE)
    logits = torch.randn(BASE.tokens, BASE.experts, generator=torch.Generator().manual_seed(5)).to(world.device)
    routing = moe.Routing("renormalize", top_k=3)
    mine = world.part(BASE.tokens)
    ep = layer(world, BASE)
    want = moe.fused_moe(x, logits, moe.prepare(make_raw(BASE, world.device), act_format="none"), routing=routing)[mine]
    got = ep.fused(x[mine], logits[mine], routing=routing)
    assert got.dtype == BF16 and distance(got, want) <= world.near(2e-4)
    sequences = ep.fused(x[mine][None], logits[mine][None], routing=routing)
    assert torch.equal(sequences, got[None])
    most = max(world.uneven(BASE.tokens))
    assert torch.equal(ep.fused(x[mine], logits[mine], routing=routing, max_tokens=most), got)


def ascending_order(world: World) -> None:
    """Partial rows in bfloat16, added in float32 from the first rank to the last, rounded once: bit for bit."""
    batch, mine = world.batch(BASE), world.part(BASE.tokens)
    for dtype in (F32, BF16):
        ep = layer(world, BASE, partial_dtype=dtype)
        total = torch.zeros(BASE.tokens, BASE.hidden)
        for rank, experts in enumerate(ep.placement.slots):
            share = ep.placement.share(make_raw(BASE), rank)
            w = moe.prepare(share, act_format="none", num_experts=BASE.experts, local_expert_offset=experts[0])
            total += moe.fused_moe_routed(*batch, w, out_dtype=dtype)
        assert torch.equal(ep(*(t[mine] for t in batch), BF16), total[mine].to(BF16))


def two_layers(world: World) -> None:
    """Two layers in turns on one group, twice: the same bits."""
    cases = [dataclasses.replace(BASE, seed=s) for s in (0, 7)]
    layers = [layer(world, case) for case in cases]
    first = [compare(world, ep, case, world.batch(case)) for ep, case in zip(layers, cases, strict=True)]
    again = [compare(world, ep, case, world.batch(case)) for ep, case in zip(layers, cases, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def refusals(world: World) -> None:
    """Errors that come before anything is exchanged, on every rank where the others would wait."""
    w = layer(world, BASE).w
    make: Callable[..., Any] = lambda **o: moe.ExpertParallel(world.group, w, **{"max_tokens_per_rank": 4, **o})  # noqa: E731
    assert "transport must be one of ['auto', 'p2p', 'nccl']" in expect(ValueError, lambda: make(transport="x"))
    assert "max_tokens_per_rank must be the same" in expect(
        ValueError, lambda: make(max_tokens_per_rank=4 + world.rank)
    )
    assert "capacity must be None or in" in expect(ValueError, lambda: make(capacity=5))
    assert "partial_dtype must be one of" in expect(ValueError, lambda: make(partial_dtype=torch.float16))
    assert "payload must be 'auto' or 'plain'" in expect(ValueError, lambda: make(payload="quantized"))
    assert "on the ranks, got" in expect(ValueError, lambda: make(placement=[[0]] * world.size))
    whole = moe.prepare(make_raw(BASE), act_format="none")
    text = expect(ValueError, lambda: moe.ExpertParallel(world.group, whole, 4))
    assert "w must be prepared with num_experts=8" in text, text
    assert "w must be PreparedWeights" in expect(TypeError, lambda: moe.ExpertParallel(world.group, make_raw(BASE), 4))
    assert "group must be a ProcessGroup" in expect(TypeError, lambda: moe.ExpertParallel("world", w, 4))
    ep = make()
    x, ids, weights = (t[:5] for t in world.batch(BASE))
    assert "max_tokens = 4 rows" in expect(RuntimeError, lambda: ep(x, ids, weights))
    assert "max_tokens must be in 1 ... 4" in expect(ValueError, lambda: ep(x[:1], ids[:1], weights[:1], max_tokens=5))
    assert "hidden_states must be [..., 64]" in expect(ValueError, lambda: ep(x[:, :32], ids, weights))
    leaf = x[:2].float().requires_grad_()
    assert "moeq::ep_combine" in expect(RuntimeError, lambda: ep(leaf, ids[:2], weights[:2]).sum().backward())


def explained(world: World) -> None:
    case = dataclasses.replace(BASE, act_format="nvfp4", input_scale="tensor")
    text = str(moe.explain(layer(world, case)))
    assert f"expert parallel: rank {world.rank} of {world.size}, gloo on cpu" in text
    assert "transport: nccl" in text and "chosen as the first that serves the group" in text
    assert "not p2p: rank 0: the experts are on cpu" in text
    assert "payload: quantized, 36 bytes a row" in text and "-> cpu" in text
    asked = str(moe.explain(layer(world, case, transport="nccl", payload="plain", capacity=3)))
    assert "as asked" in asked and "more than 3 rows" in asked and "payload: plain, 128 bytes" in asked


def config_driven(world: World) -> None:
    parallel = FusedMoEParallelConfig.from_distributed(dp_group=world.group, enable_expert_parallel=True)
    w = moe.prepare(make_raw(BASE), act_format="none", parallel=parallel)
    ep = moe.ExpertParallel.from_config(parallel, w, MAX_TOKENS)
    assert ep.requested == "nccl"
    compare(world, ep, BASE, world.batch(BASE))
    other = dataclasses.replace(parallel, all2all_backend="deepep_v2")
    assert moe.ExpertParallel.from_config(other, w, MAX_TOKENS).requested == "auto"
    alone = FusedMoEParallelConfig.make_no_parallel()
    assert "use_ep must be True" in expect(ValueError, lambda: moe.ExpertParallel.from_config(alone, w, 4))
    turned = FusedMoEParallelConfig.make(
        1, 1, world.size, 1, enable_expert_parallel=True, dp_rank=world.size - 1 - world.rank
    )
    assert "group must be the one of" in expect(ValueError, lambda: moe.ExpertParallel.from_config(turned, w, 4))


def tensor_parallel(world: World) -> None:
    """EP x TP: the ranks of "tp" have the same tokens and parts of the same experts."""
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("ep", "tp"))
    outer = World(mesh.get_local_rank("ep"), world.size // 2)
    for scheme, act in (("nvfp4", "none"), ("fp8_block", "none"), ("mxfp4", "none"), ("none", "none")):
        case = dataclasses.replace(BASE, scheme=scheme, act_format=act, hidden=256, inter=256, bias=True)
        batch = world.batch(case)
        for capacity in (None, MAX_TOKENS):
            ep = moe.ExpertParallel.from_raw(mesh, make_raw(case), MAX_TOKENS, act_format=act, capacity=capacity)
            assert ep.w.intermediate_size == 128
            compare(outer, ep, case, batch)
            compare(outer, ep, case, batch, tolerance=2e-4, out_dtype=BF16)
        assert "x 2 tensor parallel ones" in str(moe.explain(ep))
    assert "must have one dimension" in expect(
        ValueError,
        lambda: moe.ExpertParallel(init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("a", "b")), ep.w, 4),
    )


def meshes(world: World) -> None:
    """A mesh of one dimension is its group."""
    mesh = init_device_mesh("cpu", (world.size,))
    compare(world, moe.ExpertParallel.from_raw(mesh, make_raw(BASE), 16, act_format="none"), BASE, world.batch(BASE))


def compiled(world: World) -> None:
    """One graph with Inductor for any number of tokens; the counter and a new placement take effect in it."""
    ep = layer(world, dataclasses.replace(BASE, act_format="nvfp4", input_scale="tensor"))
    case = dataclasses.replace(BASE, act_format="nvfp4", input_scale="tensor")
    routing = moe.Routing("renormalize", top_k=3)

    def model(x: Tensor, logits: Tensor) -> Tensor:
        return ep.fused(x * 0.5, logits, routing=routing, out_dtype=F32) + 1

    graph = torch.compile(model, fullgraph=True, dynamic=True)
    w = moe.prepare(make_raw(case), act_format="nvfp4")
    x, _, _ = world.batch(case)
    logits = torch.randn(case.tokens, case.experts, generator=torch.Generator().manual_seed(5))
    want = moe.fused_moe(x * 0.5, logits, w, routing=routing, out_dtype=F32) + 1
    with torch.no_grad():
        for counts in (world.uneven(24), [24 // world.size] * world.size, world.uneven(24)[::-1]):
            mine = world.part(24, counts)
            before = ep.load.sum()
            assert distance(graph(x[mine], logits[mine]), want[mine]) <= 1e-6
            assert int(ep.load.sum() - before) == 3 * counts[world.rank]
        ep.rebalance([experts[::-1] for experts in ep.placement.slots][::-1] if world.size == 2 else _turned(ep))
        assert distance(graph(x[mine], logits[mine]), want[mine]) <= 1e-6
    limited = layer(world, BASE, capacity=MAX_TOKENS)
    traced = torch.compile(lambda a, b, c: limited(a, b, c), backend="eager", fullgraph=True)
    assert "capacity must be None" in expect(Exception, lambda: traced(*(t[mine] for t in world.batch(BASE))))


def _turned(ep: moe.ExpertParallel) -> list[tuple[int, ...]]:
    return [*ep.placement.slots[1:], ep.placement.slots[0]]


QUICK = (
    uneven_tokens,
    all_to_one_rank,
    odd_ids,
    shared_experts,
    capacities,
    replicas,
    rebalancing,
    fused,
    ascending_order,
)
QUICK += (refusals,)
SLOW = (schemes, hidden_dtypes, two_layers, explained, config_driven, meshes, compiled)
ON_GPUS = (uneven_tokens, all_to_one_rank, odd_ids, replicas, rebalancing, fused, two_layers)
CASES: dict[str, Callable[[World], None]] = {f.__name__: f for f in (*QUICK, *SLOW, tensor_parallel)}
