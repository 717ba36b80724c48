"""Compiles the Triton kernels that a benchmark will run, in several processes, before it times anything."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import time
from typing import Any

import torch
from moe_layers import ACTIVATIONS, FORMATS, GPT_OSS
from moe_peers import common

from torch_moe_ops.backends.triton import FORMATS as TRITON_FORMATS
from torch_moe_ops.backends.triton_engine.configs import select
from torch_moe_ops.commands.tune import layers, measure


def layers_of(shape: common.Shape, fmt: str) -> list[layers.Layer]:
    """The layers that moe_layers.entries makes of a shape and format; none where Triton does not run it."""
    scheme, act = FORMATS[fmt]
    if act not in TRITON_FORMATS.get(scheme, ()) or common.why_not(fmt, shape) or not shape.gated:
        return []
    found = layers.of_shape(f"{shape.E}:{shape.k}:{shape.H}:{shape.I}", scheme, act)
    raw, sizes = found.raw, ((shape.E, shape.n1), (shape.E, shape.H))
    kinds: list[tuple[str, dict[str, Any]]] = [(ACTIVATIONS[shape.act], {})]
    if shape.name == GPT_OSS:
        biases = {f: torch.empty(s, device="meta") for f, s in zip(("w13_bias", "w2_bias"), sizes, strict=True)}
        kinds.insert(0, ("swigluoai", biases))
    return [found._replace(raw=dataclasses.replace(raw, activation=name, **biases)) for name, biases in kinds]


def warm(jobs: list[tuple[common.Shape, list[int]]], fmts: list[str], seconds: float) -> float:
    """Fill Triton's cache for shapes and numbers of tokens. Returns the seconds; nothing starts after `seconds`."""
    begin = time.time()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(measure.default_workers(), mp_context=context) as pool:
        wanted = [(layer, ms) for fmt in fmts for shape, ms in jobs for layer in layers_of(shape, fmt)]
        for layer, ms in wanted:
            key = layer.key
            sizes = (key.top_k, key.num_experts, key.hidden_size, key.intermediate_size)
            for m in ms:
                config = select(key.scheme, m, *sizes, key.act_format)
                pool.submit(measure.compile_one, layer, m, [config], begin + seconds)
    return time.time() - begin
