"""Tile sizes by problem: what was tuned on such a device, else plain rules over shapes. No call measures anything.

`python -m torch_moe_ops tune` times the candidates and keeps the best (tuning/tuned.py). The rules hold what was found
on an H200 for Qwen3-30B-A3B, DeepSeek-V3, Mixtral-8x7B and gpt-oss (benchmarks/results/h200_triton_tiles.jsonl).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch_moe_ops.tuning import tuned

# The scheme to `select` of the `triton_fp8` backend, which multiplies e4m3 codes as they are.
FP8_PRODUCTS = "triton_fp8"


class Tile(NamedTuple):
    """One GEMM's tile: BLOCK_N weight rows by tokens, BLOCK_K of K a step."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    max_registers: int = 0  # a thread may use; 0: as many as the compiler likes
    split_k: int = 1  # parts of K, for programs enough where tokens are few; GEMM2 alone


class Config(NamedTuple):
    """Tokens a tile holds (both GEMMs share the schedule), tokens of a nearly empty one, and each GEMM's tile."""

    block_t: int
    tail_t: int
    gemm1: Tile
    gemm2: Tile


_DEEP = Tile(128, 256, 4, 3)
_NARROW = Tile(64, 256, 4, 3)
_SHALLOW = Tile(128, 128, 4, 4)
_WIDE = Tile(128, 64, 4, 4)
_TALL = Tile(256, 64, 8, 4)  # of plain weights


def _one_token(hidden: int, inter: int) -> Config:
    if inter >= 8192:
        return Config(16, 16, _DEEP, _DEEP._replace(split_k=4))
    gemm1 = _NARROW if hidden % 128 else _DEEP if hidden > 2048 else Tile(128, 256, 8, 3, 128)
    return Config(16, 16, gemm1, _NARROW._replace(split_k=2) if inter >= 2048 else _NARROW)


def _few_each(scheme: str, num_slots: int, hidden: int, inter: int) -> Config:
    """Up to about ten tokens an expert: weights are all that moves."""
    if hidden % 128:
        # Scales of 32 have to be shifted into place then, which takes registers that long steps have not left.
        first = _NARROW if scheme == "nvfp4" else _SHALLOW
        return Config(16, 16, first, first if inter % 128 else _DEEP)
    gemm1 = _DEEP if hidden > 2048 else Tile(128, 128, 8, 4) if num_slots <= 128 else _SHALLOW
    gemm2 = _DEEP if inter >= 2048 else _SHALLOW
    return Config(16, 16, gemm1, gemm2)


def _many_each(per_expert: float, hidden: int, inter: int) -> Config:
    """From about thirty tokens an expert on: products are what costs."""
    if per_expert <= 40:
        return Config(64, 32, _WIDE, _WIDE)
    if per_expert <= 100:
        return Config(64, 16, _WIDE if hidden >= 4096 else Tile(128, 128, 8, 3), _WIDE)
    gemm2 = _WIDE if inter <= 1024 else Tile(256, 128, 8, 3) if inter <= 4096 else Tile(128, 128, 4, 3)
    return Config(128, 32, _WIDE, gemm2)


def _select_4bit(scheme: str, tokens: int, num_slots: int, per_expert: float, hidden: int, inter: int) -> Config:
    if tokens == 1:
        return _one_token(hidden, inter)
    if per_expert <= 10:
        return _few_each(scheme, num_slots, hidden, inter)
    if per_expert <= 24:
        return Config(32, 16, _DEEP, _DEEP if inter >= 2048 else _SHALLOW)
    return _many_each(per_expert, hidden, inter)


def _select_plain(per_expert: float, hidden: int, inter: int) -> Config:
    """16-bit weights."""
    if per_expert <= 10:
        few = Tile(128, 128, 4, 4) if min(hidden, inter) >= 2048 else Tile(64, 128, 4, 4)
        return Config(16, 16, few, few)
    if per_expert <= 24:
        return Config(32, 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))
    if per_expert <= 40:
        return Config(64, 32, Tile(128, 64, 8, 4), Tile(128, 64, 8, 4))
    if per_expert <= 100:
        return Config(128, 64, _TALL, _TALL)
    return Config(128, 32, _TALL, _TALL)


def _select_8bit(per_expert: float, tiled: bool) -> Config:
    """6-bit and 8-bit weights. Steps of 128 along K: no group or tile of scales is longer.

    tiled: scales multiply sums, and take the registers of a second accumulator.
    """
    if per_expert <= 10:
        return Config(16, 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))
    if per_expert <= 24:
        return Config(32, 16, Tile(128, 128, 4, 4), Tile(128, 128, 4, 4))
    if tiled:
        return Config(64, 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))
    if per_expert <= 100:
        return Config(64, 32, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))
    return Config(128, 32, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))


def _select_fp8_products(tokens: int, per_expert: float) -> Config:
    """e4m3 codes as they are: nothing is decoded, but sums are added up in float32 every 128 of K."""
    wide = Tile(128, 128, 4, 4)
    if tokens == 1:
        return Config(16, 16, Tile(128, 128, 8, 4), Tile(64, 128, 4, 4, split_k=2))
    if per_expert <= 10:
        return Config(16, 16, wide, wide)
    if per_expert <= 40:
        return Config(32, 16, wide, wide)
    # Eight warps wait for each other at every step; twice as many programs of four do not.
    return Config(64, 32, wide, wide)


_BITS = {"nvfp4": 4, "mxfp4": 4, "mxint4": 4, "int4": 4, "none": 16}
_BITS |= dict.fromkeys(("mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "fp8", "fp8_block", "int8"), 8)


def rules(scheme: str, tokens: int, top_k: int, num_experts: int, hidden: int, inter: int) -> Config:
    """The configuration where nothing was tuned. Shapes alone decide."""
    per_expert = tokens * top_k / num_experts
    if scheme == FP8_PRODUCTS:
        return _select_fp8_products(tokens, per_expert)
    bits = _BITS[scheme]
    if bits == 16:
        return _select_plain(per_expert, hidden, inter)
    if bits == 8:
        return _select_8bit(per_expert, scheme == "fp8_block")
    return _select_4bit(scheme, tokens, tokens * top_k, per_expert, hidden, inter)


@lru_cache(maxsize=4096)
def _of_tuned(fields: tuple[tuple[int, ...], ...]) -> Config:
    (block_t, tail_t), gemm1, gemm2 = fields
    return Config(block_t, tail_t, Tile(*gemm1), Tile(*gemm2))


def select(
    scheme: str,
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inter: int,
    act_format: str = "none",
    own: bool = True,
) -> Config:
    """The configuration of a whole layer for a number of tokens (a rank of several: plan.tokens_alone).

    What was tuned on a device like the current one comes first, where there is something near this number of tokens;
    own: also what a user tuned, not only what comes with the library.
    """
    found = tuned.lookup(tuned.Key(scheme, act_format, num_experts, top_k, hidden, inter), tokens, own)
    return rules(scheme, tokens, top_k, num_experts, hidden, inter) if found is None else _of_tuned(found)
