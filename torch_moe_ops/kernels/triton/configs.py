"""Tile sizes by problem. Plain data: nothing is measured when a layer runs.

`python benchmarks/tune_triton.py` times the candidates on a GPU; what it found on an H200 is below.
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


# Tokens per expert up to which a row of the table holds, and the configuration.
_TABLE: dict[str, tuple[tuple[float, Config], ...]] = {
    "nvfp4": (
        (8, Config(16, 16, Tile(64, 256, 4, 4), Tile(64, 256, 4, 3))),
        (24, Config(32, 32, Tile(64, 256, 4, 3), Tile(64, 256, 4, 3))),
        (96, Config(64, 16, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))),
        (float("inf"), Config(128, 32, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))),
    ),
    "none": (
        (8, Config(16, 16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))),
        (24, Config(32, 32, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))),
        (96, Config(64, 16, Tile(128, 64, 8, 4), Tile(128, 64, 8, 4))),
        (float("inf"), Config(128, 32, Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))),
    ),
}


def select(scheme: str, num_slots: int, num_experts: int) -> Config:
    """The configuration for num_slots (token, expert) pairs over num_experts experts; shapes alone decide."""
    per_expert = num_slots / num_experts
    for bound, config in _TABLE[scheme]:
        if per_expert <= bound:
            return config
    raise AssertionError("the last bound is infinite")
