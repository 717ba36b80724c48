"""Two layers in a row whose inputs are made by kernels of the same graph: what is run, and how it is judged.

A cell is a format of a backend, a number of tokens, a form of call and the kernel in front of each layer. Its graph is
captured once and replayed with new data; everything between the first source and the last output is made inside, so
that a layer that reads an input before the kernel in front has stored it computes with the replay before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from gpu_layers import Format, Sizes, as_reference, make_raw, prepare
from tolerances import layer_bound, relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.routing.reference import route_reference

LAYER = Sizes(experts=16, top_k=4, hidden=512, inter=256)
# Where a number of tokens has a kernel because there are many experts: `cuda_sm90` gathers rows of up to two pairs each.
MANY_EXPERTS = {14: 32}
ROUTING = moe.Routing("default", LAYER.top_k, routed_scaling_factor=3.0, renormalize=True)  # outputs of size 1
REPLAYS = 12


class Inputs(NamedTuple):
    """What a layer is called with, and the logits that its ids and weights came from."""

    x: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Layer:
    """Prepared weights, the same ones for the oracle, and the matrices that make its inputs."""

    w: moe.PreparedWeights
    reference: moe.PreparedWeights
    gate: Tensor  # [hidden, experts]
    mix: Tensor  # [hidden, hidden]

    def __call__(self, form: str, inputs: Inputs) -> Tensor:
        if form == "monolithic":
            return moe.fused_moe(inputs.x, inputs.logits, self.w, routing=ROUTING)
        return moe.fused_moe_routed(inputs.x, inputs.ids, inputs.weights, self.w)

    def routed(self, x: Tensor) -> Inputs:
        """Inputs by the router's GEMM and `moeq::route`, which is the last kernel."""
        logits = x @ self.gate
        return Inputs(x, logits, *moe.route(logits, ROUTING))


@dataclass(frozen=True)
class Pair:
    """Two layers of one format, and one of another backend."""

    first: Layer
    second: Layer
    other: Layer

    def run(self, source: Tensor, form: str, front: str) -> tuple[tuple[Inputs, Tensor], tuple[Inputs, Tensor]]:
        """Both layers on `source` [tokens, hidden]: what each was called with, and what it returned."""
        if front == "layer":
            inputs = self.first.routed(source)
            ahead = self.second.routed(source)
            out = self.first(form, inputs)
            behind = ahead._replace(x=out)
            return (inputs, out), (behind, self.second(form, behind))
        inputs = self._made(self.first, source, form, front)
        out = self.first(form, inputs)
        behind = self._made(self.second, out, form, front)
        return (inputs, out), (behind, self.second(form, behind))

    def _made(self, layer: Layer, x: Tensor, form: str, front: str) -> Inputs:
        """A layer's inputs of x, with the kernel `front` launched last."""
        if front == "gemm" and form == "monolithic":
            mixed = x @ layer.mix
            return layer.routed(mixed)._replace(logits=mixed @ layer.gate)
        made = layer.routed(x)
        if front == "gemm":
            return made._replace(x=x @ layer.mix)
        if front == "other":
            return made._replace(x=self.other("routed", made))
        if front == "copy":
            order = ("x", "logits") if form == "monolithic" else ("x", "weights", "ids")
            return made._replace(**{name: getattr(made, name).clone() for name in order})
        return _early(made) if front == "early" else made


def _early(made: Inputs) -> Inputs:
    """The same inputs, all of them stored by one kernel that triggers its dependents before."""
    sizes = [-(-t.nbytes // 256) * 256 for t in made]
    target = torch.empty(sum(sizes), dtype=torch.uint8, device=made.x.device)
    source = torch.empty_like(target)

    def views(flat: Tensor) -> list[Tensor]:
        pieces = flat.split(sizes)
        return [piece[: t.nbytes].view(t.dtype).view(t.shape) for piece, t in zip(pieces, made, strict=True)]

    for view, t in zip(views(source), made, strict=True):
        view.copy_(t)
    if target.device.type == "cuda":
        from early_producer import produce_early  # needs Triton

        produce_early((target.view(torch.int32), source.view(torch.int32)))
    else:
        target.copy_(source)
    return Inputs(*views(target))


def sizes_for(tokens: int) -> Sizes:
    return dataclasses.replace(LAYER, experts=MANY_EXPERTS.get(tokens, LAYER.experts))


def _layer(fmt: Format, sizes: Sizes, device: str, seed: int) -> Layer:
    raw = make_raw(fmt, dataclasses.replace(sizes, seed=seed), device)
    w = prepare(raw, fmt, device)
    g = torch.Generator().manual_seed(seed)
    gate = torch.randn(w.hidden_size, sizes.experts, generator=g) * (2 * w.hidden_size**-0.5)
    mix = torch.randn(w.hidden_size, w.hidden_size, generator=g) * w.hidden_size**-0.5
    return Layer(w, as_reference(raw, fmt, device), *(t.to(device, sizes.dtype) for t in (gate, mix)))


@lru_cache(maxsize=1)
def make_pair(fmt: Format, sizes: Sizes = LAYER, device: str = "cuda") -> Pair:
    """Layers of one format on a device; the test is skipped where the backend is not there."""
    plain, packed = Format("auto", "none", "none", "none", "exact"), Format("auto", "nvfp4", "none", "none", "exact")
    other = packed if fmt.scheme == "none" else plain
    return Pair(*(_layer(f, sizes, device, seed) for f, seed in ((fmt, 7), (fmt, 8), (other, 9))))


def new_source(pair: Pair, tokens: int, seed: int) -> Tensor:
    w = pair.first.w
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, w.hidden_size, generator=g).to(w.w13.device, pair.first.gate.dtype)


def captured(run: Callable[[], object], device: str) -> Callable[[], object]:
    """The graph of run(), or on a CPU run() itself: a call that fills what the first call returned is not to be had
    there, so that it returns what it computed."""
    if device == "cpu":
        return run
    for _ in range(2):  # compiles, and makes what a stream keeps
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()

    def replay() -> object:
        graph.replay()
        return made

    return replay


class Seen(NamedTuple):
    """One layer in one replay: copies of what it was called with and of what it returned, twice on the same data."""

    inputs: Inputs
    out: Tensor
    again: Tensor
    eager: Tensor  # of the same inputs, when every kernel in front was done


def replay_pair(pair: Pair, tokens: int, form: str, front: str, replays: int = REPLAYS) -> list[list[Seen]]:
    """[layer][replay] of one cell."""
    device = pair.first.w.w13.device.type
    source = new_source(pair, tokens, 0)
    replay = captured(lambda: pair.run(source, form, front), device)
    kept = []
    for seed in range(1, replays + 1):
        source.copy_(new_source(pair, tokens, seed))
        once = [(Inputs(*(t.clone() for t in inputs)), out.clone()) for inputs, out in replay()]  # type: ignore[attr-defined]
        kept.append((once, [out.clone() for _, out in replay()]))  # type: ignore[attr-defined]
    seen: list[list[Seen]] = [[], []]
    for once, twice in kept:
        for at, ((inputs, out), again) in enumerate(zip(once, twice, strict=True)):
            if device == "cuda":
                torch.cuda.synchronize()
            layer = (pair.first, pair.second)[at]
            seen[at].append(Seen(inputs, out, again, layer(form, inputs)))
    return seen


@dataclass(frozen=True)
class Verdict:
    """Of one cell: of `replays` replays, those within the bound in both layers, and those that are equal bit for bit
    to a second one on the same data, and to an eager call on inputs that were complete."""

    replays: int
    right: int
    repeated: int
    like_eager: int
    worst: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.right == self.repeated == self.like_eager == self.replays


def judge(pair: Pair, fmt: Format, form: str, seen: list[list[Seen]]) -> Verdict:
    """Each replay against the oracle, which routes the logits that the graph made and takes the graph's own hidden
    states: a wrong input of the second layer is not held against it twice."""
    replays = len(seen[0])
    right, repeated, eager = ([True] * replays for _ in range(3))
    worst, bound = 0.0, float("inf")  # those of the result that comes nearest to its bound
    for layer, of_layer in zip((pair.first, pair.second), seen, strict=True):
        wanted = expected(layer, form, [s.inputs for s in of_layer])
        for i, (s, want) in enumerate(zip(of_layer, wanted, strict=True)):
            error = relative_l2(s.out, want)
            error = error if error == error else float("inf")
            allowed = layer_bound(pair.first.w.backend, fmt.act_format, s.out.dtype, _values(pair, s, want))
            if error / allowed >= worst / bound:
                worst, bound = error, allowed
            right[i] &= error < allowed
            repeated[i] &= torch.equal(s.out, s.again)
            eager[i] &= torch.equal(s.out, s.eager)
    return Verdict(replays, sum(right), sum(repeated), sum(eager), worst, bound)


def _values(pair: Pair, seen: Seen, want: Tensor) -> int:
    """Values of the intermediate behind a result: of as many tokens as it has, or as have weight in it. Three layers behind
    each other leave a result whose largest token may be all of it, as far as a distance can tell."""
    of_tokens = want.double().pow(2).sum(1)
    weighty = float(of_tokens.sum() ** 2 / of_tokens.pow(2).sum().clamp(min=1e-300))
    return max(1, int(weighty * seen.inputs.ids.shape[1] * pair.first.w.intermediate_size))


def expected(layer: Layer, form: str, batches: list[Inputs]) -> list[Tensor]:
    """What the oracle makes of each: in one call, since it takes long for its experts, not for their tokens."""
    x, logits = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("x", "logits"))
    ids, weights = route_reference(
        logits, ROUTING.bias, ROUTING.method, ROUTING.top_k, 0, 0, ROUTING.routed_scaling_factor, ROUTING.renormalize
    )
    if form == "routed":
        given = torch.cat([batch.ids for batch in batches])
        assert torch.equal(ids, given), "moeq::route chose other experts than its reference"
        weights = torch.cat([batch.weights for batch in batches])
    joined = moe.fused_moe_routed(x, ids, weights, layer.reference)
    return list(joined.split([batch.x.shape[0] for batch in batches]))
