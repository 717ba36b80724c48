"""The layers of one piece of the sweep: `auto`, every other backend of the library that fits, and other libraries."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterable
from typing import Any

import moe_layers
import torch
from moe_peers import common, runner
from sweep_cells import AUTO, PEERS

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.measured.distance import too_far

LEFT_OUT = ("reference", "cpu")  # not for speed on a GPU


def choice(fmt: str, weights: common.Weights) -> dict[str, Any]:
    """What `prepare` takes in each accuracy class, and the class of every backend that fits and is near enough."""
    act = moe_layers.FORMATS[fmt][1]
    raw = moe_layers.raw_weights(fmt, weights, moe_layers.ACTIVATIONS[weights.shape.act], None)
    of = {kind: moe.explain(raw, act_format=act, accuracy=kind) for kind in ("standard", "strict")}
    fitting = [BACKENDS[name] for name, why in of["standard"].against.items() if not why and name not in LEFT_OUT]
    problem = of["standard"].problem
    near = [b for b in fitting if b.needs_no_measurement or too_far(b.name, problem) is None]
    return {"takes": {kind: found.chosen for kind, found in of.items()}, "classes": {b.name: b.accuracy for b in near}}


def our_entries(fmt: str, sink: common.Sink) -> list[runner.Entry]:
    """`auto` as a user gets it, and the backends that it did not take, each by its own name."""

    def build(fmt: str, weights: common.Weights, context: Any) -> list[Any]:
        found = choice(fmt, weights)
        sink.emit(event="choice", shape=weights.shape.name, fmt=fmt, **found)
        names = [AUTO, *(name for name in BACKENDS if name not in (*LEFT_OUT, found["takes"]["standard"]))]
        entries = moe_layers.entries(names, [fmt])
        return [layer for entry in entries for layer in _layers(entry, weights, context, sink)]

    return [runner.Entry(AUTO, fmt, build)]


def _layers(entry: runner.Entry, weights: common.Weights, context: Any, sink: common.Sink) -> list[Any]:
    try:
        return entry.build(entry.fmt, weights, context)
    except common.Unsupported:
        return []
    except torch.OutOfMemoryError as error:  # the others go on
        sink.emit(event="error", layer=f"{entry.name}/{entry.fmt}", shape=weights.shape.name, err=repr(error)[:300])
        return []


def peers_of(fmt: str, wanted: Iterable[str]) -> str:
    """As runner.peer_entries takes them."""
    return ",".join(f"{name}:{fmt}" for name in PEERS.get(fmt, ()) if name in wanted)


def first_calls(layers: list[Any], shape: common.Shape, ms: Iterable[int], threads: int, seconds: float) -> float:
    """Call every layer once with each number of tokens, several at once, since most of a first call is compilation.

    Failures are left to the timing, which reports them. Returns the seconds it took.
    """
    begin = time.monotonic()

    def call(layer: Any, m: int) -> None:
        if time.monotonic() - begin < seconds:
            with torch.inference_mode(), contextlib.suppress(Exception):
                layer(*layer.prepare(common.make_inputs(shape, m, 1000)))

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(call, layer, m) for m in ms for layer in layers]:
            job.result()
    runner.device_alive()  # waits
    return time.monotonic() - begin
