"""Cases of adapters beside experts on several ranks; as ep_cases.py has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from ep_cases import BASE, BF16, F32, MAX_TOKENS, World, distance, expect, layer, options_of
from lora_cases import factors_of
from problems import Case, make_raw
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torch_moe_ops as moe
from torch_moe_ops.transports.exchange import ALONE

CASE = dataclasses.replace(BASE, bias=True, foreign=True)


def _owners(case: Case) -> Tensor:
    """Adapter 0, 1, or none (-1, and a number that is nobody's)."""
    return (torch.arange(case.tokens) * 7 % 4 - 1).to(torch.int32)


def _compare(
    world: World, ep: moe.ExpertParallel, case: Case, lora: moe.Lora, owners: Tensor | None, tolerance: float = 1e-6,
    out_dtype: torch.dtype = F32, counts: list[int] | None = None,
) -> None:  # fmt: skip
    x, ids, weights = world.batch(case)
    mine = world.part(case.tokens, counts)
    own = {} if owners is None else {"lora_ids": owners[mine]}
    got = ep(x[mine], ids[mine], weights[mine], out_dtype, lora=ep.share_lora(lora), **own)
    w = moe.prepare(make_raw(case), **options_of(case))
    want = moe.fused_moe_routed(x, ids, weights, w, out_dtype=out_dtype, lora=lora, lora_ids=owners)
    plain = moe.fused_moe_routed(x, ids, weights, w, out_dtype=out_dtype)
    assert distance(got, want[mine]) <= tolerance, distance(got, want[mine])
    assert distance(plain, want) > 1e-2  # the adapters are seen


def adapters(world: World) -> None:
    """One for all tokens, and several; experts quantized or not, activations rounded or not, two placements."""
    turned = [experts[::-1] for experts in moe.ExpertPlacement.contiguous(BASE.experts, world.size).slots][::-1]
    replicas = [tuple(range(BASE.experts))] * world.size
    for scheme, act in (("nvfp4", "none"), ("nvfp4", "nvfp4"), ("fp8", "fp8"), ("none", "none")):
        case = dataclasses.replace(CASE, scheme=scheme, act_format=act, dtype=F32 if act == "none" else BF16)
        lora, owners = factors_of(make_raw(case), 2, 4, F32), _owners(case)
        for placement in (None, turned, moe.ExpertPlacement(tuple(replicas), "spread")):
            _compare(world, layer(world, case, placement=placement), case, lora, owners)
        single = dataclasses.replace(factors_of(make_raw(case), 1, 4, F32), scaling=0.7)
        _compare(world, layer(world, case), case, single, None)
    _compare(world, layer(world, case, capacity=MAX_TOKENS), case, lora, owners)
    _compare(world, layer(world, case), case, dataclasses.replace(lora, a13=None, b13=None), owners)
    _compare(world, layer(world, case), case, dataclasses.replace(lora, a2=None, b2=None), owners)


def adapters_of_few_tokens(world: World) -> None:
    """All tokens on one rank, and none anywhere."""
    case = dataclasses.replace(CASE, dtype=F32)
    lora, owners = factors_of(make_raw(case), 2, 4, F32), _owners(case)
    for capacity in (None, MAX_TOKENS):
        ep = layer(world, case, capacity=capacity)
        for rank in range(world.size):
            counts = [MAX_TOKENS if r == rank else 0 for r in range(world.size)]
            _compare(world, ep, case, lora, owners, counts=counts)
        own, none = ep.share_lora(lora), tuple(t[:0] for t in world.batch(case))
        assert ep(*none, lora=own, lora_ids=owners[:0]).shape == (0, case.hidden)


def adapters_after_rebalancing(world: World) -> None:
    """Replicas and shares taken anew: a share belongs to a placement."""
    case = dataclasses.replace(CASE, dtype=F32)
    lora, owners = factors_of(make_raw(case), 2, 4, F32), _owners(case)
    wide = 8 // world.size + 1
    for rule in ("nearest", "spread"):
        ring = [[(rank * wide + j) % 8 for j in range(wide)] for rank in range(world.size)]
        ep = layer(world, case, placement=moe.ExpertPlacement(ring, rule))
        for shift in (0, 3):
            ep.rebalance(moe.ExpertPlacement([[(e + shift) % 8 for e in experts][::-1] for experts in ring], rule))
            _compare(world, ep, case, lora, owners)


def adapters_of_a_router(world: World) -> None:
    """From router logits, in batches of sequences, in one graph."""
    case = dataclasses.replace(BASE, dtype=F32)
    lora, routing = factors_of(make_raw(case), 2, 4, F32), moe.Routing("renormalize", top_k=3)
    g = torch.Generator().manual_seed(world.rank)
    x, logits = torch.randn(2, 5, case.hidden, generator=g), torch.randn(2, 5, case.experts, generator=g)
    owners = torch.tensor([[0, 1, -1, 1, 0], [1, 1, 0, -1, 7]])
    ep, w = layer(world, case), moe.prepare(make_raw(case), **options_of(case))
    mine = ep.share_lora(lora)
    want = moe.fused_moe(x, logits, w, routing=routing, lora=lora, lora_ids=owners)

    def run(x: Tensor, logits: Tensor, owners: Tensor) -> Tensor:
        return ep.fused(x, logits, routing=routing, lora=mine, lora_ids=owners)

    assert distance(run(x, logits, owners), want) <= 1e-6
    graph = torch.compile(run, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert distance(graph(x, logits, owners), want) <= 1e-6


def adapters_refused(world: World) -> None:
    """Before anything is exchanged: the ranks can go on."""
    lora, ep = factors_of(make_raw(BASE), 2, 4, F32), layer(world, BASE)
    x, ids, weights = (t[:3] for t in world.batch(BASE))
    told: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "lora must be a Lora, got dict", lambda: ep.share_lora({})),  # type: ignore[arg-type]
        (ValueError, "lora.a13 must have shape [8, ., .], of all", lambda: ep.share_lora(_sliced(lora, slice(3)))),
        (ValueError, "lora.a2 must have size", lambda: ep.share_lora(dataclasses.replace(lora, b13=None, a2=lora.a13))),
        (ValueError, "lora must be given with lora_ids", lambda: ep(x, ids, weights, lora_ids=ids[:, 0])),
    ]  # fmt: skip
    for kind, text, call in told:
        said = expect(kind, call)
        assert text in said, said
    _refused_by_the_op(ep, x, ids, weights, lora)
    _compare(world, layer(world, CASE), CASE, factors_of(make_raw(CASE), 2, 4, F32), _owners(CASE), 1e-2)


def _refused_by_the_op(ep: moe.ExpertParallel, x: Tensor, ids: Tensor, weights: Tensor, lora: moe.Lora) -> None:
    """Which runs between the two exchanges, where an error of one rank would leave the others in the second one."""
    mine, owners = ep.share_lora(lora), ids[:, 0]
    wrong: dict[str, tuple[Any, Tensor | None]] = {
        "lora_ids must have shape (3,)": (mine, owners[:2]),
        "lora_ids must have dtype torch.int32 or torch.int64, got torch.float32": (mine, owners.float()),
        "lora_ids must be given for 2 adapters": (mine, None),
        f"lora_a13 must have shape [{ep.w.num_local_experts}, ranks": (lora, owners),  # not this rank's share
        "lora_b2 must be given with lora_a2": (dataclasses.replace(mine, b2=None), owners),
        "lora_a13 must be given, or lora_a2": (moe.Lora(), None),
        "lora_scaling must have dtype torch.float32": (
            dataclasses.replace(mine, scaling=mine.scaling.double()),
            owners,
        ),
        "lora_a2 must be on cpu": (dataclasses.replace(mine, a2=mine.a2.to("meta")), owners),
    }
    for text, (given, of_tokens) in wrong.items():
        said = expect(RuntimeError, lambda given=given, own=of_tokens: ep(x, ids, weights, lora=given, lora_ids=own))
        assert text in said and said.endswith(ALONE), said


def _sliced(lora: moe.Lora, experts: slice) -> moe.Lora:
    return dataclasses.replace(lora, **{name: getattr(lora, name)[experts] for name in ("a13", "b13", "a2", "b2")})


def adapters_of_divided_experts(world: World) -> None:
    """EP x TP."""
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("ep", "tp"))
    outer = World(mesh.get_local_rank("ep"), world.size // 2)
    for scheme in ("nvfp4", "none"):
        case = dataclasses.replace(BASE, scheme=scheme, hidden=128, inter=256, bias=True, dtype=F32)
        ep = moe.ExpertParallel.from_raw(mesh, make_raw(case), MAX_TOKENS, act_format="none")
        assert ep.w.intermediate_size == 128
        _compare(outer, ep, case, factors_of(make_raw(case), 2, 4, F32), _owners(case))


ADAPTERS: dict[str, Callable[[World], None]] = {
    f.__name__: f
    for f in (adapters, adapters_of_few_tokens, adapters_after_rebalancing, adapters_of_a_router, adapters_refused)
}
DIVIDED: dict[str, Callable[[World], None]] = {"adapters_of_divided_experts": adapters_of_divided_experts}
