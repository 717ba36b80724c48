"""Which kernel of `cuda_sm90` for how many tokens: every kernel that may be best is timed, then bounds are laid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90 import choice as sm90_choice
from torch_moe_ops.commands.tune.layers import Layer, random_call, routings, with_inputs
from torch_moe_ops.commands.tune.replays import replay_us
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.tuning.tuned_kernels import DECODE_MAX_SLOTS, KERNELS, Switches
from torch_moe_ops.weights.raw_weights import RawWeights

MAX_DIFFERENCE = 2e-2  # of two kernels' results: rounding of activations to 4 bits may tell them apart by less
ROUNDS = 9
# Where a kernel for more tokens is so far ahead, one for fewer is not timed any more; narrow and wide are not before an
# expert has so many tokens.
HOPELESS = 1.3
WORTH_WHILE = {"narrow": 1, "wide": 20}
# What a switch must gain over all the numbers of tokens beyond it: noise must not make bounds.
SWITCH_GAIN = 0.05

Times = Mapping[int, Mapping[str, float]]  # tokens -> kernel -> microseconds


def in_tiles(layer: Layer, device: torch.device) -> ExpertsCall:
    """A random call of the layer with weights in the layout of `cuda_sm90`, without hidden states and routing."""
    call = random_call(layer, device)
    names = ("w13", "w2", "w13_scale", "w2_scale", "w13_zero_point", "w2_zero_point")
    tensors: dict[str, Any] = {name: getattr(call, name) for name in names}
    if call.scheme == "nvfp4":  # the call has them in its alphas
        ones = torch.ones((layer.raw.num_experts,), device=device)
        tensors |= {"w13_scale_2": ones.unsqueeze(1), "w2_scale_2": ones}
    tiles: dict[str, Any] = dict.fromkeys(names[4:]) | cuda_sm90.prepare(RawWeights(call.scheme, **tensors))
    return call._replace(**tiles)


def candidates(tokens: int, layer: Layer, times: Times) -> list[str]:
    """Kernels worth timing. times: of smaller numbers of tokens."""
    per_expert = tokens * layer.top_k / layer.raw.num_experts
    found = []
    for kernel in KERNELS:
        gone = any(_hopeless(kernel, row) for row in times.values())
        if kernel in WORTH_WHILE:
            gone = per_expert < WORTH_WHILE[kernel]
        if not gone and (kernel != "decode" or tokens * layer.top_k <= DECODE_MAX_SLOTS):
            found.append(kernel)
    return found


def _hopeless(kernel: str, row: Mapping[str, float]) -> bool:
    """Whether kernels for more tokens are so far ahead that it will not come back."""
    later = [us for name, us in row.items() if KERNELS.index(name) > KERNELS.index(kernel)]
    return kernel in row and row[kernel] > HOPELESS * min(later, default=math.inf)


def time_kernels(layer: Layer, weights: ExpertsCall, tokens: int, kernels: list[str]) -> dict[str, float]:
    """Median microseconds of a layer by each kernel, from CUDA graphs over several routings that take turns.

    Raises RuntimeError where two kernels compute different things.
    """
    count = routings(tokens)
    calls = [with_inputs(weights, layer, tokens, 1000 + i) for i in range(count)]
    outputs = [torch.empty_like(call.hidden_states) for call in calls]
    graphs, expected = {}, None
    for kernel in kernels:

        def run(number: int = KERNELS.index(kernel)) -> None:
            for call, out in zip(calls, outputs, strict=True):
                cuda_sm90.run_kernel(call, out, number)

        run()
        expected = _same(kernel, outputs[0], expected)
        graphs[kernel] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[kernel]):
            run()
    times: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    for _ in range(ROUNDS):
        for kernel, graph in graphs.items():
            times[kernel].append(replay_us(graph) / count)
    return {kernel: sorted(values)[ROUNDS // 2] for kernel, values in times.items()}


def _same(kernel: str, out: Tensor, expected: Tensor | None) -> Tensor:
    mine = out.double()
    if expected is None:
        return mine
    if not bool((mine - expected).norm() <= MAX_DIFFERENCE * expected.norm()):
        raise RuntimeError(f"kernel {kernel} computes something else than the first one")
    return expected


def rules_of(layer: Layer) -> Switches:
    """The kernels without tuning of one's own."""
    return sm90_choice.rules_for(layer.key, layer.raw.num_experts)


def switches_of(times: Times, rules: Switches) -> Switches:
    """The kernels of the least time over all numbers of tokens, where each switch costs SWITCH_GAIN of one of them.

    A bound lies where the logarithms of two kernels' times, drawn straight between two numbers of tokens, cross.
    rules: say what follows the last kernel, beyond the numbers of tokens that were timed.
    """
    path, rows = _best_path(times), sorted(times)
    switches: list[tuple[str, int | None]] = []
    for at, kernel in enumerate(path[:-1]):
        if path[at + 1] != kernel:
            switches.append((kernel, _bound(times, rows[at], rows[at + 1], kernel, path[at + 1])))
    order = KERNELS.index(path[-1])
    before = [most or 0 for name, most in rules if KERNELS.index(name) <= order]
    last = max(rows[-1], *before)
    later = [(name, most) for name, most in rules if KERNELS.index(name) > order and (most is None or most > last)]
    return (*switches, (path[-1], last if later else None), *later)


def _best_path(times: Times) -> tuple[str, ...]:
    best: dict[str, tuple[float, tuple[str, ...]]] = {"": (0.0, ())}
    for tokens in sorted(times):
        row, reached = times[tokens], dict[str, tuple[float, tuple[str, ...]]]()
        for kernel, us in row.items():
            loss = math.log(us / min(row.values()))
            ways = ((cost + SWITCH_GAIN * (last not in ("", kernel)), way) for last, (cost, way) in best.items())
            cost, way = min(ways)
            reached[kernel] = (cost + loss, (*way, kernel))
        best = reached
    return min(best.values())[1]


def _bound(times: Times, low: int, high: int, before: str, after: str) -> int:
    """The last number of tokens of `before`, in [low, high)."""

    def gap(tokens: int) -> float | None:
        row = times[tokens]
        return math.log(row[after] / row[before]) if before in row and after in row else None

    here, there = gap(low), gap(high)
    if here is None or there is None or here <= 0 or there >= 0:
        return low
    share = here / (here - there)
    return min(high - 1, round(low * (high / low) ** share))
