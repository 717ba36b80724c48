"""Tiles worth timing, by bits of a weight and tokens a tile."""

from __future__ import annotations

from torch_moe_ops.backends.triton_engine.configs import Tile

# BLOCK_N, BLOCK_K, warps, stages, register limit, parts of K (of GEMM2); the likeliest first
_Shapes = tuple[tuple[int, ...], ...]
_NARROW_4: _Shapes = (
    (128, 256, 4, 3, 168), (64, 256, 4, 3), (64, 256, 4, 3, 96), (128, 128, 4, 4), (128, 128, 4, 4, 96),
    (128, 128, 8, 4), (128, 256, 4, 3), (128, 256, 4, 3, 128), (128, 256, 8, 4), (128, 256, 8, 3, 128),
    (256, 256, 8, 3), (64, 256, 4, 3, 0, 2), (64, 256, 4, 3, 0, 4), (128, 256, 4, 3, 168, 2), (128, 256, 4, 3, 168, 4),
)  # fmt: skip
_WIDE_4: _Shapes = (
    (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (256, 64, 8, 4), (256, 128, 8, 3), (128, 64, 4, 6),
)  # fmt: skip
_NARROW_8: _Shapes = (
    (64, 128, 4, 4), (128, 128, 4, 4), (128, 128, 8, 4), (64, 128, 4, 6), (128, 128, 4, 3, 128), (64, 256, 4, 3),
    (128, 256, 8, 3), (64, 128, 4, 4, 0, 2), (64, 128, 4, 4, 0, 4),
)  # fmt: skip
_WIDE_8: _Shapes = (
    (128, 128, 8, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 4, 3), (256, 64, 8, 4), (256, 128, 8, 3),
)  # fmt: skip
_NARROW_16: _Shapes = (
    (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 4, 6), (128, 128, 4, 4),
    (128, 64, 8, 4), (128, 64, 8, 6), (128, 128, 8, 4), (64, 128, 4, 4, 0, 2), (64, 128, 4, 4, 0, 4),
)  # fmt: skip
_WIDE_16: _Shapes = (
    (128, 64, 8, 4), (128, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4),
    (128, 128, 8, 3), (64, 64, 4, 4), (256, 64, 4, 3),
)  # fmt: skip
_TILES: dict[int, tuple[_Shapes, _Shapes]] = {
    4: (_NARROW_4, _WIDE_4), 8: (_NARROW_8, _WIDE_8), 16: (_NARROW_16, _WIDE_16)
}  # fmt: skip
_BLOCKS = ((16, 16), (32, 16), (64, 16), (64, 32), (128, 32), (128, 64), (256, 64))
_NARROW_TOKENS = 32


def tiles(bits: int, block_t: int, gemm: int) -> list[Tile]:
    """For GEMM 1 or 2 and a number of tokens a tile. bits: 4, 8 (also for 6) or 16. Only GEMM2 can split K."""
    shapes = _TILES[bits][block_t > _NARROW_TOKENS]
    found = [Tile(*shape) for shape in shapes]
    return found if gemm == 2 else [tile for tile in found if tile.split_k == 1]


def blocks(tokens: int, top_k: int, num_experts: int) -> list[tuple[int, int]]:
    """(tokens of a tile, of a nearly empty one), worth timing for this many (token, expert) pairs an expert."""
    per_expert = tokens * top_k / num_experts
    if tokens == 1 or per_expert <= 6:
        return [(16, 16)]
    return [b for b in _BLOCKS if per_expert / 2.1 <= b[0] <= per_expert * 2.1] or [(128, 32), (128, 64), (256, 64)]
