"""Expert parallelism on the GPUs of one host: one process a GPU, and what became of each check on rank 0.

    torchrun --standalone --nproc-per-node 2 tests/programs/ep_gpus.py TRANSPORT [OUT.json [CHECK ...]]

TRANSPORT: nccl or p2p. Every rank has all experts as well, and compares with what they give. Takes about a minute on two
H200s. Exit status 1: a check has failed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "support")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cuda_graphs import captured  # noqa: E402
from ep_cases import OTHER_KERNELS, World, distance, expect  # noqa: E402
from problems import Case, make_batch, make_raw  # noqa: E402
from torch import Tensor  # noqa: E402

import torch_moe_ops as moe  # noqa: E402

REPLAYS = 1000
MAX_TOKENS = 128  # rows of which go by the kernels for many
TRANSPORT = sys.argv[1]
SIZES = {"experts": 16, "top_k": 4, "hidden": 1024, "inter": 512, "tokens": 96}
LAYERS = {
    "nvfp4 W4A16": Case(scheme="nvfp4", **SIZES),
    "nvfp4 W4A4": Case(scheme="nvfp4", act_format="nvfp4", input_scale="tensor", **SIZES),
    "fp8_block W8A8": Case(scheme="fp8_block", act_format="fp8", **SIZES),
    "bfloat16": Case(scheme="none", **SIZES),
}
Batch = tuple[Tensor, Tensor, Tensor]


def batch_of(case: Case, world: World, seed: int = 0) -> tuple[Batch, slice]:
    x, ids, weights = make_batch(dataclasses.replace(case, seed=seed), "cuda")
    return (x, ids, weights), world.part(case.tokens)


def layer(case: Case, **options: object) -> moe.ExpertParallel:
    raw = make_raw(case, "cuda")
    options = {"max_tokens_per_rank": MAX_TOKENS, "transport": TRANSPORT, **options}
    return moe.ExpertParallel.from_raw(dist.group.WORLD, raw, act_format=case.act_format, **options)


def by_hand(case: Case, ep: moe.ExpertParallel, batch: Batch, world: World, dtype: torch.dtype) -> Tensor:
    """What the ranks compute together, on this GPU alone: the same kernels on the same rows, summed in rank order."""
    parts = [World(r, world.size).part(case.tokens) for r in range(world.size)]
    rows = []
    for t, fill in zip(batch, (0, -1, 0), strict=True):
        padded = t.new_full((world.size, MAX_TOKENS, t.shape[1]), fill)
        for rank, part in enumerate(parts):
            padded[rank, : part.stop - part.start] = t[part]
        rows.append(padded.flatten(0, 1))
    total = torch.zeros(rows[0].shape, device="cuda")
    for rank in range(world.size):
        share, offset = ep.placement.share(make_raw(case, "cuda"), rank), ep.placement.offset(rank)
        w = moe.prepare(share, act_format=case.act_format, num_experts=case.experts, local_expert_offset=offset)
        total += moe.fused_moe_routed(*rows, w, out_dtype=dtype)
    mine = parts[world.rank]
    return total.unflatten(0, (world.size, -1))[world.rank, : mine.stop - mine.start]


def agreement(world: World) -> dict[str, object]:
    """Eager calls of every layer, with every payload and both dtypes of partial rows."""
    found = {}
    for name, case in LAYERS.items():
        batch, mine = batch_of(case, world)
        whole = moe.prepare(make_raw(case, "cuda"), act_format=case.act_format)
        want = moe.fused_moe_routed(*batch, whole, out_dtype=torch.float32)[mine]
        payloads = ("plain", "quantized") if case.act_format != "none" else ("plain",)
        for payload in payloads:
            for dtype in (torch.float32, torch.bfloat16):
                ep = layer(case, partial_dtype=dtype, payload=payload)
                got = ep(*(t[mine] for t in batch), torch.float32)
                hand = by_hand(case, ep, batch, world, dtype)
                apart = (distance(got, want), distance(got, hand), bool(torch.equal(got, hand)))
                assert apart[0] <= OTHER_KERNELS, (name, payload, dtype, apart)
                assert apart[1] <= 1e-6, (name, payload, dtype, apart)
                found[f"{name}, {payload}, {dtype}, {ep.w.backend}"] = apart
    return found


def edges(world: World) -> dict[str, object]:
    """No tokens on a rank, none at all, ids of nobody, a bound for one call, a capacity and its overflow."""
    case = LAYERS["nvfp4 W4A16"]
    (x, ids, weights), _ = batch_of(case, world)
    whole = moe.prepare(make_raw(case, "cuda"), act_format="none")
    want = moe.fused_moe_routed(x, ids, weights, whole, out_dtype=torch.float32)
    ep = layer(case)
    for owner in range(world.size):
        n = 33 if owner == world.rank else 0
        assert distance(ep(x[:n], ids[:n], weights[:n], torch.float32), want[:n]) <= OTHER_KERNELS
    assert ep(x[:0], ids[:0], weights[:0]).shape == (0, case.hidden)
    assert not ep(x[:3], torch.full_like(ids[:3], -1), weights[:3]).any()
    first = ep(x[:3], ids[:3], weights[:3])
    assert distance(ep(x[:3], ids[:3], weights[:3], max_tokens=4), first) <= OTHER_KERNELS
    limited = layer(case, capacity=3, transport="nccl")
    assert distance(limited(x[:3], ids[:3], weights[:3], torch.float32), want[:3]) <= OTHER_KERNELS
    text = expect(RuntimeError, lambda: limited(x[:40], ids[:40] * 0, weights[:40]))
    assert "capacity must be at least the 40 rows" in text, text
    assert torch.equal(ep(x[:3], ids[:3], weights[:3]), first)
    return {}


def graphs(world: World) -> dict[str, object]:
    """Two layers in one CUDA graph, replayed: new inputs, new routings, the same bits every time; then rebalanced."""
    case = LAYERS["nvfp4 W4A16"]
    first, second = layer(case), layer(LAYERS["bfloat16"], partial_dtype=torch.bfloat16)
    batches = [batch_of(case, world, seed) for seed in range(4)]
    mine = batches[0][1]
    static = [t[mine].clone() for t in batches[0][0]]

    def call() -> Tensor:
        return second(first(*static), *static[1:])

    graph, out = captured(call)
    wants = []
    for batch, _ in batches:
        for held, new in zip(static, batch, strict=True):
            held.copy_(new[mine])
        wants.append(call().clone())
    assert len({float(want.double().sum()) for want in wants}) == len(wants)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    counted = first.load.sum()
    for turn in range(REPLAYS):
        batch, want = batches[turn % 4][0], wants[turn % 4]
        for held, new in zip(static, batch, strict=True):
            held.copy_(new[mine])
        graph.replay()
        wrong += (out != want).any()
    assert int(wrong) == 0, f"{int(wrong)} of {REPLAYS} replays differ"
    assert int(first.load.sum() - counted) == REPLAYS * static[1].numel()
    first.rebalance([experts[::-1] for experts in first.placement.slots][::-1])
    graph.replay()
    moved = distance(out, wants[(REPLAYS - 1) % 4])
    assert moved <= OTHER_KERNELS, moved
    return {"replays": REPLAYS, "after rebalancing": moved}


def compiled(world: World) -> dict[str, object]:
    """Inductor, in one graph, and Inductor in CUDA graphs of its own."""
    case = LAYERS["nvfp4 W4A16"]
    ep = layer(case)
    batch, mine = batch_of(case, world)
    own = [t[mine] for t in batch]
    want = ep(own[0] * 0.5, *own[1:], torch.float32) + 1
    found = {}
    for mode in (None, "reduce-overhead"):
        model = torch.compile(lambda x, i, w: ep(x * 0.5, i, w, torch.float32) + 1, fullgraph=True, mode=mode)
        for _ in range(4):
            found[str(mode)] = distance(model(*own).clone(), want)
            assert found[str(mode)] <= 1e-6, found
    return found


def transports(world: World) -> dict[str, object]:
    """Both transports give the same bits: of large and small calls, in both dtypes, in turns; and what "auto" takes."""
    found = {"auto": str(moe.explain(layer(LAYERS["bfloat16"], transport="auto")))}
    for name, case in LAYERS.items():
        batch, mine = batch_of(case, world)
        own = [t[mine] for t in batch]
        for dtype in (torch.float32, torch.bfloat16):
            layers = [layer(case, transport=t, partial_dtype=dtype) for t in ("nccl", TRANSPORT)]
            for most in (MAX_TOKENS, max(world.uneven(case.tokens))):
                want, got = (ep(*own, max_tokens=most) for ep in layers)
                assert torch.equal(want, got), (name, dtype, most, distance(got, want))
    return found


def large(world: World) -> dict[str, object]:
    """Many steps of many blocks, other numbers of rows from call to call: the ops alone, against what rows there are."""
    name, found = dist.group.WORLD.group_name, 0
    layer(LAYERS["bfloat16"])
    for turn, (rows, hidden) in enumerate(
        [(3000, 7168), (1, 64), (513, 2880), (2, 7168), (4096, 2048), (130, 4096)] * 3
    ):
        g = torch.Generator("cuda").manual_seed(turn)
        x = torch.randn(world.size, rows, hidden, device="cuda", generator=g).bfloat16()
        ids = torch.randint(0, 99, (world.size, rows, 3), device="cuda", generator=g, dtype=torch.int32)
        weights = torch.rand(world.size, rows, 3, device="cuda", generator=g)
        counts = [(rows + 7 * r + turn) % (rows + 1) for r in range(world.size)]
        mine = (t[world.rank, : counts[world.rank]] for t in (x, ids, weights))
        mine_x, mine_ids, mine_weights = mine
        head = (TRANSPORT, name, world.size, rows)
        got_x, _, got_ids, got_weights, positions = torch.ops.moeq.ep_dispatch(
            mine_x, None, mine_ids, mine_weights, *head
        )
        for r, count in enumerate(counts):
            x[r, count:], ids[r, count:], weights[r, count:] = 0, -1, 0
        assert torch.equal(got_x, x.flatten(0, 1)) and torch.equal(got_ids, ids.flatten(0, 1)), (turn, rows, hidden)
        assert torch.equal(got_weights, weights.flatten(0, 1)), (turn, rows, hidden)
        partial = got_x * (world.rank + 1)
        summed = torch.ops.moeq.ep_combine(partial, positions, counts[world.rank], *head, torch.float32)
        want = torch.zeros(counts[world.rank], hidden, device="cuda")
        for r in range(world.size):
            want += (x[world.rank, : counts[world.rank]] * (r + 1)).float()
        assert torch.equal(summed, want), (turn, rows, hidden)
        found += 1
    return {"calls": found}


def groups(world: World) -> dict[str, object]:
    """Layers of two groups of the same ranks, in turns."""
    case = LAYERS["nvfp4 W4A16"]
    (batch, mine), raw = batch_of(case, world), make_raw(case, "cuda")
    made = [dist.group.WORLD, dist.new_group(list(range(world.size)))]
    options = {"transport": TRANSPORT, "act_format": "none"}
    layers = [moe.ExpertParallel.from_raw(group, raw, MAX_TOKENS, **options) for group in made]
    outs = [ep(*(t[mine] for t in batch)) for _ in range(5) for ep in layers]
    assert all(torch.equal(out, outs[0]) for out in outs)
    return {}


CHECKS = {f.__name__: f for f in (agreement, edges, transports, large, groups, graphs, compiled)}


def main() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    world = World(dist.get_rank(), dist.get_world_size())
    outcomes: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "ranks": world.size, "torch": torch.__version__}
    failed = False
    with torch.inference_mode():
        for check in [CHECKS[name] for name in sys.argv[3:]] or CHECKS.values():
            try:
                outcomes[check.__name__] = check(world) | {"passed": True}
            except Exception:
                outcomes[check.__name__] = traceback.format_exc()
                failed = True
                break  # the ranks are no longer in step
    text = json.dumps(outcomes, indent=1)
    if world.rank == 0 or failed:
        print(f"rank {world.rank}: {text}", flush=True)
    if world.rank == 0 and len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(text + "\n")
    if failed:
        os._exit(1)  # the others may be waiting: torchrun ends them
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
