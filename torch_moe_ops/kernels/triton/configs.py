"""Tile sizes by problem. Plain rules over shapes: nothing is measured when a layer runs.

`python benchmarks/tune_triton.py` times the candidates on a GPU; the rules hold what it found on an H200
for Qwen3-30B-A3B, DeepSeek-V3 and Mixtral-8x7B (benchmarks/results/h200_triton_tune.jsonl).
"""

from __future__ import annotations

from typing import NamedTuple


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
_DEEP_CAPPED = Tile(128, 256, 4, 3, 168)  # three programs on an SM
_SHALLOW = Tile(128, 128, 4, 4)
_WIDE = Tile(128, 64, 4, 4)


def _one_token(inter: int) -> Config:
    if inter >= 8192:
        return Config(16, 16, Tile(256, 256, 8, 3), _DEEP_CAPPED._replace(split_k=4))
    gemm2 = _DEEP_CAPPED._replace(split_k=2) if inter >= 2048 else Tile(64, 256, 4, 3)
    return Config(16, 16, Tile(128, 256, 8, 3, 128), gemm2)


def _few_each(num_slots: int, hidden: int, inter: int) -> Config:
    """Up to about ten tokens an expert: weights are all that moves."""
    gemm1 = _DEEP_CAPPED if hidden > 2048 else Tile(128, 128, 8, 4) if num_slots <= 128 else _SHALLOW
    gemm2 = _DEEP if inter >= 8192 else _DEEP_CAPPED if inter >= 2048 else _SHALLOW
    return Config(16, 16, gemm1, gemm2)


def _many_each(per_expert: float, hidden: int, inter: int) -> Config:
    """From about thirty tokens an expert on: products are what costs."""
    if per_expert <= 40:
        return Config(64, 32, _WIDE, _WIDE)
    if per_expert <= 100:
        return Config(64, 16, _WIDE if hidden >= 4096 else Tile(128, 128, 8, 3), _WIDE)
    gemm2 = _WIDE if inter <= 1024 else Tile(256, 128, 8, 3) if inter <= 4096 else Tile(128, 128, 4, 3)
    return Config(128, 32, _WIDE, gemm2)


def _select_4bit(tokens: int, num_slots: int, per_expert: float, hidden: int, inter: int) -> Config:
    if tokens == 1:
        return _one_token(inter)
    if per_expert <= 10:
        return _few_each(num_slots, hidden, inter)
    if per_expert <= 24:
        return Config(32, 16, _DEEP, _DEEP if inter >= 2048 else _SHALLOW)
    return _many_each(per_expert, hidden, inter)


def _select_plain(per_expert: float) -> Config:
    """16-bit weights."""
    if per_expert <= 10:
        return Config(16, 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))
    if per_expert <= 24:
        return Config(32, 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))
    if per_expert <= 100:
        return Config(64, 32, Tile(128, 64, 8, 4), Tile(128, 64, 8, 4))
    return Config(128, 32, Tile(256, 64, 8, 4), Tile(128, 64, 4, 3))


def select(scheme: str, tokens: int, top_k: int, num_experts: int, hidden: int, inter: int) -> Config:
    """The configuration for a number of tokens; num_experts are the local ones. Shapes alone decide."""
    per_expert = tokens * top_k / num_experts
    if scheme == "none":
        return _select_plain(per_expert)
    return _select_4bit(tokens, tokens * top_k, per_expert, hidden, inter)
