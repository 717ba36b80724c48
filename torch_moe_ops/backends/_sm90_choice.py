"""Which kernel of `cuda_sm90` a number of tokens gets: what was measured for such a layer, else rules over shapes."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from torch_moe_ops import tuned
from torch_moe_ops.backends._sm90_layout import TILE
from torch_moe_ops.tuned_kernels import DECODE_MAX_SLOTS, FORGET, KERNELS, Switches, key_of, lookup

# Measured on an H200 (docs/hopper.md, section 5). An expert's w2 of so many values is read at the rate of memory by
# the decode kernel even where an expert has several tokens.
DECODE_TOKENS, LARGE_MATRIX = 14, 12_000_000
# Tokens an expert has in the mean; two blocks a multiprocessor must find enough work to share it evenly.
SLIM_MEAN, NARROW_MEAN, SLIM_BLOCKS, BLOCK_ROWS = 24, 80, 800, 4 * TILE


class Choice(NamedTuple):
    """Kernels by their numbers, the most tokens that each but the last one takes, and who says so."""

    kernels: tuple[int, ...]
    bounds: tuple[int, ...]
    source: str

    def kernel(self, tokens: int) -> int:
        return self.kernels[bisect_left(self.bounds, tokens)]


def decode_max_tokens(num_experts: int, top_k: int, matrix: int) -> int:
    """Up to this many tokens the decode kernel runs by the rules. num_experts: local ones; matrix: values of a w2."""
    most = DECODE_TOKENS
    if matrix >= LARGE_MATRIX:
        most = max(most, 7 * num_experts // (4 * top_k))
    return min(most, DECODE_MAX_SLOTS // top_k)


def rules(num_experts: int, top_k: int, hidden: int, inter: int) -> Switches:
    """Kernels where no table has the layer. Shapes alone decide."""
    decode = decode_max_tokens(num_experts, top_k, hidden * inter)
    return _ascending((("decode", decode), *prefill_rules(num_experts, top_k, hidden)))


def prefill_rules(num_experts: int, top_k: int, hidden: int) -> Switches:
    """Shapes of the prefill kernel, from one token on."""
    slim, narrow = SLIM_MEAN * num_experts // top_k, NARROW_MEAN * num_experts // top_k
    busy = -(-SLIM_BLOCKS // -(-hidden // BLOCK_ROWS))  # experts that are that much work
    few = -(-busy // top_k) - 1 if busy <= num_experts else slim  # tokens that do not hit as many
    return _ascending((("narrow", min(few, slim)), ("slim", slim), ("narrow", narrow), ("wide", None)))


def _ascending(steps: tuple[tuple[str, int | None], ...]) -> Switches:
    """Without the kernels that no number of tokens is left for; neighbours of one name become one."""
    kept: list[tuple[str, int | None]] = []
    for name, most in steps:
        if most is not None and most <= (kept[-1][1] or 0 if kept else 0):
            continue
        if kept and kept[-1][0] == name:
            kept.pop()
        kept.append((name, most))
    return tuple(kept)


def switches_of(
    device: str, scheme: str, act_format: str, num_experts: int, top_k: int, hidden: int, inter: int
) -> tuple[Switches, str]:
    """A layer's kernels on a kind of device ("": any), and where they come from. inter: padded or not."""
    key = key_of(scheme, act_format, num_experts, top_k, hidden, inter)
    return lookup(device, key) or (rules(num_experts, top_k, hidden, key.intermediate_size), "rules")


@lru_cache(maxsize=4096)
def choice_of(
    device_index: int, scheme: str, act_format: str, num_experts: int, top_k: int, hidden: int, inter: int
) -> Choice:
    """`switches_of` a layer on a CUDA device, as calls use it: worked out once."""
    device = tuned.name_of_device(device_index)
    switches, source = switches_of(device, scheme, act_format, num_experts, top_k, hidden, inter)
    names, bounds = zip(*switches, strict=True)
    return Choice(tuple(KERNELS.index(name) for name in names), tuple(bounds[:-1]), source)


FORGET.append(choice_of.cache_clear)
