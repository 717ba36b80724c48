"""One layer in one format: how far our backends, the peers and the emulated peers are from the oracle."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import moe_layers
import peer_numerics
import torch
from moe_peers import common, runner
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.activations import is_gated

Line = dict[str, Any]

# Layers of models with the sizes of their experts. Distances do not depend on how many experts there are, so that a
# layer gets EXPERTS of them (at least twice its top_k), which is what makes the run short.
LAYERS = {
    s.name: s
    for s in (
        common.Shape("qwen3_30b", 128, 8, 2048, 768),
        common.Shape("dsv3", 256, 8, 7168, 2048),
        common.Shape("mixtral", 8, 2, 4096, 14336),
        common.Shape("glm46", 160, 8, 5120, 1536),
        common.Shape("qwen3_next", 512, 10, 2048, 512),
        common.Shape("llama4_scout", 16, 1, 5120, 8192),
    )
}
EXPERTS = 16
# Tokens of a call and the calls whose distances are averaged: of few tokens each differs from the next.
BATCHES = {1: 32, 2: 24, 8: 12, 64: 4, 512: 2}
MORE = 4  # calls of another number of tokens
# Forms of INT4 that no adapter of moe_peers takes.
_NO_PEER = tuple(fmt for fmt in common.INT4_FORMS if fmt not in ("int4", "int4g32"))
# What an approximating backend has to be near to, by format; `humming` and `deepgemm` compile for every size.
PEERS = {
    "fp8": ("vllm_triton", "deepgemm"),
    "fp8row": ("vllm_triton",),
    "fp8half": ("vllm_triton",),
    "int4": ("marlin", "humming"),
    "int4g32": ("marlin",),
    "mxint4": ("marlin", "humming"),
    **dict.fromkeys(_NO_PEER, ()),
    "nvfp4": ("marlin", "humming"),
    "mxfp4": ("marlin", "humming"),
    "bf16": ("vllm_triton",),
    "nvfp4-a8": (),
    "int4-a8": ("humming",),
    "int4g32-a8": ("humming",),
    **{f"{fmt}-a8": () for fmt in _NO_PEER},
    "mxfp4-a8row": (),
    "fp8-a16": (),
    "fp8row-a16": (),
    "fp8half-a16": (),
    "mxfp8-a16": (),
}
FORMATS = tuple(PEERS)
COMPILED_FOR = {"deepgemm": ("qwen3_30b", "dsv3"), "humming": ("qwen3_30b",)}
# Formats that are measured on the first layers only: those whose fast kernels are exact, or have no peer, and kinds of
# scales that are close to another one's.
FEW_LAYERS = {
    "nvfp4": 2,
    "mxfp4": 2,
    "bf16": 2,
    "nvfp4-a8": 2,
    "mxfp4-a8row": 2,
    **dict.fromkeys(("fp8-a16", "fp8row-a16", "fp8half-a16", "mxfp8-a16"), 2),
    "fp8half": 3,
    "int4g32": 3,
    **dict.fromkeys(_NO_PEER, 3),
    **{f"{fmt}-a8": 3 for fmt in common.INT4_FORMS},
}
PEERS_RUN = "silu"  # the activation of the peers, without a limit; beside others they are emulated
_NOT_OURS = ("reference", "flashinfer_trtllm", "flashinfer_cutlass")


class Case(NamedTuple):
    fmt: str
    layer: str

    @property
    def shape(self) -> common.Shape:
        shape = LAYERS[self.layer]
        return dataclasses.replace(shape, E=min(shape.E, max(EXPERTS, 2 * shape.k)))

    def shape_with(self, activation: str) -> common.Shape:
        """With one half of w13 where the activation has no gate."""
        return dataclasses.replace(self.shape, act="silu" if is_gated(activation) else "relu2")


def cases(formats: list[str], layers: list[str]) -> list[Case]:
    """Layer by layer, so that a run that is cut off has measured every format on the first ones."""
    return [
        Case(fmt, name)
        for i, name in enumerate(layers)
        for fmt in formats
        if i < FEW_LAYERS.get(fmt, len(layers)) and common.why_not(fmt, LAYERS[name]) is None
    ]


class Contestant(NamedTuple):
    """kind: "ours", "peer" or "emulated"; build: -> (inputs -> output)."""

    who: str
    kind: str
    build: Callable[[], Callable[[common.Inputs], Tensor]]
    note: Line = {}  # noqa: RUF012  read only


def measure(
    case: Case,
    peers_dir: Path,
    device: str,
    activation: str = PEERS_RUN,
    ours: tuple[str, ...] = (),
    *,
    limit: float | None = None,
    more_tokens: tuple[int, ...] = (),
) -> Iterator[Line]:
    """A line a contestant and number of tokens, or one that says why there is none. Ours come first.

    ours: backends of the library; none: all that fit.
    limit: the layer's swiglu_limit, which lines name then; None: the activation's own. GEMM1's results of these layers
        have a standard deviation of about 0.5, so that a limit of 0.25 clamps most of an up half, one of 10 nothing.
    more_tokens: numbers of tokens beside those of BATCHES.

    Raises ValueError where the oracle does not take the layer.
    """
    common.set_device(device)
    torch.manual_seed(0)
    weights = common.Weights.random(case.fmt, case.shape_with(activation))
    raw = dataclasses.replace(moe_layers.raw_weights(case.fmt, weights, activation, None), swiglu_limit=limit)
    problem = moe.explain(raw, act_format=moe_layers.FORMATS[case.fmt][1], device=device).problem
    about = {
        "format": case.fmt, "scheme": problem.scheme, "act_format": problem.act_format,
        "weight_scales": problem.weight_scales, "activation": activation, "layer": case.layer, "experts": case.shape.E,
        "top_k": case.shape.k, "hidden": case.shape.H, "inter": case.shape.I,
    }  # fmt: skip
    about |= {} if limit is None else {"limit": limit}
    calls = BATCHES | dict.fromkeys(more_tokens, MORE)
    batches = {m: [common.make_inputs(case.shape, m, 1000 * m + i) for i in range(n)] for m, n in calls.items()}
    wanted = {policy: _oracle(raw, problem, policy, batches, device) for policy in _policies(case.fmt)}
    for one in _contestants(case, weights, raw, problem, peers_dir):
        if one.kind == "ours" and ours and one.who not in ours:
            continue
        head = about | {"who": one.who, "kind": one.kind} | one.note
        policy = one.note.get("weight_policy", "exact")
        try:
            run = one.build()
            for m, inputs in batches.items():
                outputs = [run(i) for i in inputs]
                yield {"event": "distance", **head, "tokens": m, **_summary(outputs, wanted[policy][m])}
        except Exception as error:  # one contestant's failure must not end the others
            yield {"event": "missing", **head, "why": without_folders(f"{type(error).__name__}: {error}")}
            traceback.print_exc()


def without_folders(text: str) -> str:
    """The beginning of one line, without the folders of this machine."""
    return re.sub(r"(?:/[\w.@+-]+)+/(?=[\w.@+-])", "", " ".join(text.split()))[:300]


def _policies(fmt: str) -> tuple[str, ...]:
    return ("packed", "folded") if fmt in ("nvfp4-a8", "mxfp4-a8row") else ("exact",)


def _oracle(
    raw: moe.RawWeights, problem: moe.Problem, policy: str, batches: dict[int, list[common.Inputs]], device: str
) -> dict[int, list[Tensor]]:
    """float32 results of the reference, which makes every rounding of the contract; one call for all tokens."""
    w = moe.prepare(raw, act_format=problem.act_format, backend="reference", device=device, weight_policy=policy)
    flat = [i for inputs in batches.values() for i in inputs]
    joined = [torch.cat([getattr(i, name) for i in flat]) for name in ("x", "ids", "weights")]
    out = moe.fused_moe_routed(*joined, w, out_dtype=torch.float32)
    parts = iter(out.split([i.x.shape[0] for i in flat]))
    return {m: [next(parts) for _ in inputs] for m, inputs in batches.items()}


def _contestants(
    case: Case, weights: common.Weights, raw: moe.RawWeights, problem: moe.Problem, peers_dir: Path
) -> Iterator[Contestant]:
    for policy in _policies(case.fmt):
        for name, backend in BACKENDS.items():
            posed = dataclasses.replace(problem, weight_policy=policy)
            if name in _NOT_OURS or not backend.fits_anywhere(posed) or backend.reasons(posed):
                continue
            settings = {"act_format": problem.act_format, "weight_policy": policy, "device": problem.device}
            yield Contestant(name, "ours", lambda n=name, s=settings: _ours(raw, n, s), {"weight_policy": policy})  # type: ignore[misc]
    if case.fmt in peer_numerics.OF_FORMAT:
        numerics, activation = peer_numerics.OF_FORMAT[case.fmt], problem.activation
        limit = raw.swiglu_limit
        yield Contestant(
            numerics.name,
            "emulated",
            lambda: lambda inputs: peer_numerics.emulated(weights, inputs, numerics, activation, limit),
        )
    for name in PEERS[case.fmt] if problem.activation == PEERS_RUN and raw.swiglu_limit is None else ():
        if case.layer in COMPILED_FOR.get(name, LAYERS):
            yield Contestant(name, "peer", lambda n=name: _peer(n, case.fmt, weights, peers_dir))  # type: ignore[misc]


def _ours(raw: moe.RawWeights, backend: str, settings: dict[str, Any]) -> Callable[[common.Inputs], Tensor]:
    w = moe.prepare(raw, backend=backend, **settings)
    return lambda i: moe.fused_moe_routed(i.x, i.ids, i.weights, w)


def _peer(name: str, fmt: str, weights: common.Weights, peers_dir: Path) -> Callable[[common.Inputs], Tensor]:
    import bench_peers

    context = runner.Context(peers_dir, options={"humming": "indexed"})
    layer = bench_peers.registry()[name].build(fmt, weights, context)[0]
    if not layer.checkable:
        raise common.Unsupported("its weights are random in a layout of its own: there is nothing to compare with")
    return lambda i: layer(*layer.prepare(i))[:, : weights.shape.H]


def _summary(outputs: list[Tensor], wanted: list[Tensor]) -> Line:
    """Means over the calls of the relative L2 distance of a whole result and of that of its worst row."""
    whole, rows = [], []
    for out, want in zip(outputs, wanted, strict=True):
        if not torch.isfinite(out).all():
            raise ValueError("the result must be finite")
        error, norm = (out.double() - want.double()).norm(dim=1), want.double().norm(dim=1)
        whole.append(float(error.norm() / norm.norm()))
        rows.append(float((error / norm).max()))
    mean = {"l2": sum(whole) / len(whole), "row": sum(rows) / len(rows), "row_max": max(rows)}
    return {"calls": len(outputs)} | {name: float(f"{value:.3e}") for name, value in mean.items()}
