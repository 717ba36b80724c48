"""Cases of expert parallelism, as of ep_cases.py: what is wrong on one rank, or in a direct call of an op."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ep_cases import BASE, F32, World, compare, expect, layer
from problems import make_batch, make_raw

import torch_moe_ops as moe


def errors_of_one_rank(world: World) -> None:
    """What is wrong on one rank alone is an error on all, and the group goes on."""
    last = world.size - 1
    raw, w = make_raw(BASE), layer(world, BASE).w

    def constructor(**options: Any) -> moe.ExpertParallel:
        return moe.ExpertParallel(world.group, **{"w": w, "max_tokens_per_rank": 4, **options})

    wrong: dict[str, Callable[[], Any]] = {
        "w must be PreparedWeights": lambda: constructor(w=raw),
        "max_tokens_per_rank must be at least 1": lambda: constructor(max_tokens_per_rank=0),
        "payload must be one of": lambda: constructor(payload="small"),
        "transport must be one of": lambda: constructor(transport="fast"),
        "slots must have a rank": lambda: constructor(placement=[]),
        "must have 2 ranks" if world.size == 2 else "must have 4 ranks": lambda: layer(
            world, BASE, placement=[range(8)]
        ),
    }
    for text, call in wrong.items():
        if world.rank == last:
            assert text in expect((TypeError, ValueError), call), text
        else:
            said = expect(ValueError, constructor)
            assert f"rank {last} could not make the layer" in said and text in said, said
    compare(world, layer(world, BASE), BASE, world.batch(BASE))


def input_scales(world: World) -> None:
    """Ranks that read each other's codes must quantize alike."""
    case = dataclasses.replace(BASE, act_format="nvfp4", input_scale="tensor")
    raw = make_raw(case)
    assert raw.a13_input_scale is not None
    other = dataclasses.replace(raw, a13_input_scale=raw.a13_input_scale * (1 + world.rank))

    def make(payload: str) -> moe.ExpertParallel:
        return moe.ExpertParallel.from_raw(world.group, other, 4, act_format="nvfp4", payload=payload)

    assert "a1_gscale must be the same on every rank" in expect(ValueError, lambda: make("quantized"))
    assert make("plain").payload.name == "plain"


def direct_calls(world: World) -> None:
    """Ops called without a layer: a world_size that is not the group's is an error, not memory of others."""
    x, ids, weights = (t[:2] for t in make_batch(BASE))
    name = world.group.group_name
    dispatch, combine = torch.ops.moeq.ep_dispatch, torch.ops.moeq.ep_combine
    for size in (1, world.size + 1):
        head = ("nccl", name, size, 2)
        given = (x, None, ids, weights, *head)
        returned = (x.new_zeros((2 * size, BASE.hidden)), ids.new_empty((0, size)), 2, *head, F32)
        for op, arguments in ((dispatch, given), (combine, returned)):
            said = expect(RuntimeError, partial(op, *arguments))
            assert f"world_size must be {world.size}" in said and "on this rank" in said, said
    said = expect(RuntimeError, lambda: dispatch(x, None, ids, weights, "p2p", name, world.size, 2))
    assert "group must have a layer ExpertParallel(..., transport='p2p')" in said, said
    said = expect(ValueError, lambda: layer(world, BASE, transport="p2p"))
    assert "transport 'p2p' cannot serve this layer: rank 0: the experts are on cpu" in said, said


ERRORS: dict[str, Callable[[World], None]] = {f.__name__: f for f in (errors_of_one_rank, input_scales, direct_calls)}
