"""Which kernel of `cuda_sm90` a number of tokens gets: what was measured for such a layer, else rules over shapes."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from torch_moe_ops.backends.sm90 import byte_formats
from torch_moe_ops.backends.sm90.layout import TILE
from torch_moe_ops.core.kernel_facts import Sm90Few
from torch_moe_ops.tuning import tuned
from torch_moe_ops.tuning.tuned import Key
from torch_moe_ops.tuning.tuned_kernels import DECODE_MAX_SLOTS, FORGET, KERNELS, Switches, key_of, lookup

# Measured on an H200 (benchmarks/results/hopper_notebook.md, section 5). An expert's w2 of so many values is read at
# the rate of memory by the decode kernel even where an expert has several tokens: in the mean up to 7 / 4.
DECODE_TOKENS, LARGE_MATRIX = 14, 12_000_000
# Of W4A16 and beside fp8, a decode kernel gathers an expert's rows where they are multiplied (`may_gather`): it is the
# best one up to so many pairs an expert, and so many values of w2 for all of a rank's pairs, both in the mean (section
# 13 there). Sizes that surely fit into an SM's memory and, times slots, into its exchange.
GATHERED_MEAN, GATHERED_WORK = 2, 405_000_000
GATHERED_SIZES, GATHERED_VALUES, GATHERED_EXPERTS = 16_000, 1 << 22, 512
# Tokens an expert of any rank has in the mean; two blocks a multiprocessor must find enough work to share it evenly.
SLIM_MEAN, NARROW_MEAN, SLIM_BLOCKS, BLOCK_ROWS = 24, 80, 384, 4 * TILE


class Choice(NamedTuple):
    """Kernels by their numbers, the most tokens that each but the last one takes, and who says so.

    gathered: up to so many tokens rows are gathered, where the decode kernel without grid barriers has no room for all.
    """

    kernels: tuple[int, ...]
    bounds: tuple[int, ...]
    source: str
    gathered: int = 0

    def kernel(self, tokens: int) -> int:
        if 0 < tokens <= self.gathered:
            return Sm90Few.GATHERED_KERNEL
        return self.kernels[bisect_left(self.bounds, tokens)]


def decode_max_tokens(num_local_experts: int, top_k: int, matrix: int) -> int:
    """Up to this many tokens the decode kernel runs by the rules. matrix: values of a w2.

    A rank with some of the experts has fewer slots of as many tokens, but no more tokens that the kernel is best for:
    measured with 4 and 8 ranks, it falls behind at 24 to 32.
    """
    most = DECODE_TOKENS
    if matrix >= LARGE_MATRIX:
        most = max(most, 7 * num_local_experts // (4 * top_k))
    return min(most, DECODE_MAX_SLOTS // top_k)


def may_gather(scheme: str, act_format: str, activation: str, has_bias: bool, weight_on_input: bool) -> bool:
    """Whether the decode kernel without grid barriers takes more than very few tokens: as in decode_few_plan.cu."""
    plain = activation in ("silu", "swigluoai") and not has_bias and not weight_on_input
    return plain and act_format in ("none", "fp8") and scheme in ("nvfp4", "mxfp4", "int4", "mxint4")


def gathered_max_tokens(
    num_experts: int, top_k: int, hidden: int, inter: int, num_local_experts: int, rounds: bool = False
) -> int:
    """Up to this many tokens that kernel is the best one; 0: of no number that others do not take. num_experts: of all
    ranks; rounds: the intermediate is rounded where it is multiplied, and exchanged in float32, two words a value."""
    hidden, inter = (-(-size // TILE) * TILE for size in (hidden, inter))
    if hidden + inter > GATHERED_SIZES or num_local_experts > GATHERED_EXPERTS:
        return 0
    work = GATHERED_WORK * num_experts // (hidden * inter * num_local_experts)
    slots = min(
        Sm90Few.GATHERED_SLOTS,
        GATHERED_VALUES // (2 * hidden + (4 if rounds else 1) * inter),
        GATHERED_MEAN * num_experts,
        work,
    )
    tokens = min(Sm90Few.GATHERED_TOKENS, slots // top_k)
    return tokens if tokens > Sm90Few.MAX_TOKENS else 0


def rules(num_experts: int, top_k: int, hidden: int, inter: int, num_local_experts: int | None = None) -> Switches:
    """Kernels where no table has the layer. Shapes alone decide; num_local_experts: None where all are local."""
    decode = decode_max_tokens(num_local_experts or num_experts, top_k, hidden * inter)
    return _ascending((("decode", decode), *prefill_rules(num_experts, top_k, hidden, num_local_experts)))


def byte_rules(num_experts: int, top_k: int, hidden: int, num_local_experts: int | None = None) -> Switches:
    """`rules` for weights of 8 bits: the kernel for very few tokens, and prefill's shapes."""
    few = min(Sm90Few.MAX_TOKENS, Sm90Few.MAX_SLOTS // top_k)
    return _ascending((("decode", few), *prefill_rules(num_experts, top_k, hidden, num_local_experts)))


def rules_for(key: Key, num_experts: int) -> Switches:
    """What a layer of `num_experts` gets where nothing was measured. key: `key_of` a rank's own experts."""
    if key.scheme in byte_formats.SCHEMES:
        return byte_rules(num_experts, key.top_k, key.hidden_size, key.num_experts)
    return rules(num_experts, key.top_k, key.hidden_size, key.intermediate_size, key.num_experts)


def prefill_rules(num_experts: int, top_k: int, hidden: int, num_local_experts: int | None = None) -> Switches:
    """Shapes of the prefill kernel, from one token on."""
    local = num_local_experts or num_experts
    slim, narrow = SLIM_MEAN * num_experts // top_k, NARROW_MEAN * num_experts // top_k
    busy = -(-SLIM_BLOCKS // -(-hidden // BLOCK_ROWS))  # experts that are that much work
    few = -(-busy * num_experts // (top_k * local)) - 1 if busy <= local else slim  # tokens that do not hit as many
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


def of_rank(switches: Switches, num_local_experts: int, num_experts: int) -> Switches:
    """A whole layer's kernels for a rank with as many experts, of num_experts: at as many tokens an expert.

    But for decode, see `decode_max_tokens`.
    """
    if num_local_experts >= num_experts:
        return switches
    scaled = (
        (name, most if most is None or name == "decode" else most * num_experts // num_local_experts)
        for name, most in switches
    )
    return _ascending(tuple(scaled))


def switches_of(device: str, key: Key, num_experts: int) -> tuple[Switches, str]:
    """A rank's kernels on a kind of device ("": any), and where they come from. key: `key_of` its own experts.

    Tables have whole layers. That of this rank's experts is the nearest: the same slots are spread over the same
    experts where num_experts / key.num_experts ranks have that many times the tokens.
    """
    found = lookup(device, key)
    if found is None:
        return rules_for(key, num_experts), "rules"
    return of_rank(found[0], key.num_experts, num_experts), found[1]


def gathered_of(key: Key, num_experts: int) -> int:
    """`gathered_max_tokens` of a rank's own experts. Tables do not say it: they know kernels of all tokens alone."""
    sizes = (key.top_k, key.hidden_size, key.intermediate_size, key.num_experts)
    return gathered_max_tokens(num_experts, *sizes, rounds=key.act_format != "none")


@lru_cache(maxsize=4096)
def choice_of(
    device_index: int,
    scheme: str,
    act_format: str,
    num_local_experts: int,
    top_k: int,
    hidden: int,
    inter: int,
    num_experts: int,
    gathers: bool = False,
) -> Choice:
    """`switches_of` a layer on a CUDA device, as calls use it: worked out once. inter: padded or not; gathers:
    `may_gather`."""
    key = key_of(scheme, act_format, num_local_experts, top_k, hidden, inter)
    switches, source = switches_of(tuned.name_of_device(device_index), key, num_experts)
    names, bounds = zip(*switches, strict=True)
    gathered = gathered_of(key, num_experts) if gathers else 0
    return Choice(tuple(KERNELS.index(name) for name in names), tuple(bounds[:-1]), source, gathered)


FORGET.append(choice_of.cache_clear)
