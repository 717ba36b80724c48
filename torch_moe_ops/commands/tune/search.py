"""The order of trials: which configurations are timed, and which one is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch_moe_ops.backends.triton_engine.configs import Config
from torch_moe_ops.commands.tune.candidates import blocks, tiles

# Within this of the rules' own time the rules' configuration stays: so little does not repeat.
GAIN = 0.99


class Found(NamedTuple):
    """The best configuration, its time, and that of the configuration that the rules give."""

    us: float
    config: Config
    rules_us: float


def plan(rules: Config, bits: int, tokens: int, top_k: int, num_experts: int) -> list[Config]:
    """What a search times whatever it finds, for compiling ahead: every tile of both GEMMs once a block."""
    found = [rules]
    for block in blocks(tokens, top_k, num_experts):
        second = tiles(bits, block[0], 2)
        first = tiles(bits, block[0], 1)
        for i in range(max(len(first), len(second))):
            found.append(Config(*block, first[i % len(first)], second[i % len(second)]))
    return found


def trials(bits: int, block: tuple[int, int], best: Callable[[], Config]) -> Iterator[Config]:
    """GEMM2's tiles for the likeliest of GEMM1, then GEMM1's for the best so far. best: asked before each trial."""
    for tile in tiles(bits, block[0], 2):
        yield best()._replace(gemm2=tile)
    for tile in tiles(bits, block[0], 1):
        yield best()._replace(gemm1=tile)


def search(
    time: Callable[[Config], float],
    rules: Config,
    bits: int,
    sizes: tuple[int, int, int],
    expired: Callable[[], bool] = lambda: False,
) -> Found | None:
    """The configuration of the least time, by coordinate descent within each number of tokens a tile.

    Args:
        time: median microseconds of a forward, infinite where a configuration does not run or computes something else.
        rules: what would be used without tuning; timed first and again last, so that the GPU's clock does not decide.
        sizes: (tokens, top_k, num_experts).
        expired: asked before each trial; True ends the search, and then nothing is returned.
    """
    rules_us = time(rules)
    winners = [(rules_us, rules)]
    for block in blocks(*sizes):
        start = rules if (rules.block_t, rules.tail_t) == block else None
        first = Config(*block, tiles(bits, block[0], 1)[0], tiles(bits, block[0], 2)[0])
        best = (rules_us, start) if start is not None else (time(first), first)
        tried = {best[1]}
        for config in trials(bits, block, lambda: best[1]):  # noqa: B023 - used before the loop goes on
            if expired():
                return None
            if config not in tried:
                tried.add(config)
                best = min(best, (time(config), config))
        winners.append(best)
    us, config = min(winners)
    again = time(rules)
    rules_us = min(rules_us, again)
    if config == rules or not us < GAIN * rules_us:
        return Found(rules_us, rules, rules_us)
    return Found(us, config, rules_us)
