"""Random layers, with adapters and without, and their gradients against autograd in float64.

    python tests/programs/fuzz_gradients.py --on cpu --count 1000 [--seed 0] [--first 0] [--seconds 600]
    TRITON_INTERPRET=1 python tests/programs/fuzz_gradients.py --on triton --count 100

On "triton" the passes of a GPU run in Triton's interpreter, with the layouts that its kernels decode; on "cpu" those of
torch. Odd sizes, every activation, adapters of few ranks and of many, foreign and repeated ids, tokens and experts that
have nothing, strided arguments; windows of hidden states, experts and rows a few at a time, and as in a graph that is
captured. Problem i follows from the seed and i alone. The oracle shares nothing with the passes but the decoded weights
and the formulas of the forward pass.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from fuzz_loop import between, crash, parser_of, try_problems
from lora_cases import factors_of
from problems import Case
from raw_forms import Form, raw_of
from torch import Tensor
from triton_passes import INT4_SCALES

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.activations import ACTIVATIONS, apply_activation, resolve_constants
from torch_moe_ops.core.schemes import FLOATS, SCHEMES
from torch_moe_ops.gradients import chunks, layer_pass, lora, on_gpu, products, weights

BOUND = 2.5e-2  # of few numbers: rounding to bfloat16, of weights and intermediates
# A value that rounding moves across a clamp has another gradient; so many of them there are at the tightest limit.
BOUND_OF_CLAMPS = 8e-2
ROW_BOUND = 8  # times the bound, of a row alone
EXACT, OF_EXACT_CLAMPS = 5e-5, 5e-3  # in float32
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "triton": {
        "triton": tuple(SCHEMES),
        "cuda_sm90": ("nvfp4", "mxfp4", "fp8", "fp8_block", "mxfp8"),
        "cuda_sm90_int4": ("int4", "mxint4"),
    },
    "cpu": {"cpu": tuple(SCHEMES), "reference": tuple(SCHEMES)},
}
# Of layouts of Hopper, which do not take every one.
FORMS = {"int4": tuple((str(group), (dtype,) * 2, (zero,) * 2) for dtype, zero, group in INT4_SCALES)}
HIDDEN, INTER = (8, 64, 88, 136, 288, 320), (8, 16, 40, 64, 88, 116, 176)


@dataclass(frozen=True)
class Drawn:
    """A problem: a layer and what it is asked."""

    case: Case
    form: Form
    backend: str
    constants: dict[str, float]
    offset: int
    total: int
    ids: str
    adapters: int  # 0: none
    rank: int
    only: str  # which projections have adapters
    lora_ids: str
    on_input: bool
    windows: int
    at_once: int
    few_rows: int
    strided: bool
    nan_row: bool
    factor_dtype: torch.dtype
    merged: bool
    captured: bool
    pieces: bool


def drawn(on: str, seed: int, index: int) -> Drawn:
    g = random.Random(f"{on}-{seed}-{index}")
    backend = g.choice(list(LAYOUTS[on]))
    scheme = g.choice(LAYOUTS[on][backend])
    activation = g.choice(list(ACTIVATIONS))
    form = Form.drawn(g, scheme) if on == "cpu" or backend == "triton" else Form(*g.choice(FORMS.get(scheme, ((),))))
    multiple = max(SCHEMES[scheme].size_multiple, form.multiple)
    of_hidden = max(64, multiple) if backend.startswith("cuda_sm90") else multiple
    if scheme in ("fp8", "fp8_block", "mxfp8") and backend == "cuda_sm90":
        of_hidden = 128
    on_input = g.random() < 0.15
    top_k = 1 if on_input else g.choice((1, 1, 2, 2, 3, 8, 22))
    case = Case(
        scheme=scheme, tokens=g.choice((1, 2, 3, 5, 9, 17, 70)), experts=g.choice((1, 2, 3, 5)), top_k=top_k,
        hidden=_up(g.choice(HIDDEN), of_hidden), inter=_up(g.choice(INTER), multiple), activation=activation,
        dtype=_dtype(g, backend), bias=g.random() < 0.4,
        per_half=scheme == "nvfp4" and g.random() < 0.4, seed=g.randrange(1 << 20),
    )  # fmt: skip
    constants = {
        "alpha": g.uniform(0.5, 2.5),
        "beta": g.uniform(0.1, 2.0),
        "limit": g.choice((0.5, 3.0, 7.0) if case.dtype == torch.float32 else (3.0, 7.0)),
    }
    taken = [name for name in ACTIVATIONS[activation].takes if g.random() < 0.5]
    offset = g.choice((0, 0, 1, 5))
    adapters = g.choice((0, 0, 1, 1, 2, 3, 5))
    return Drawn(
        case, form, backend, {f"swiglu_{name}": constants[name] for name in taken}, offset,
        offset + case.experts + g.choice((0, 0, 3)), g.choice(("random", "distinct", "one", "foreign", "nobody")),
        adapters, g.choice((1, 2, 3, 5, 8, 16, 24, 40)), g.choice(("both", "both", "13", "2")),
        "none" if adapters == 1 and g.random() < 0.6 else g.choice(("random", "all -1", "one")), on_input,
        g.choice((0, 2, 3, 4)), g.choice((0, 1, 2)), g.choice((0, 100)), g.random() < 0.3, g.random() < 0.15,
        g.choice((torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)), g.random() < 0.1, g.random() < 0.2,
        g.random() < 0.5,
    )  # fmt: skip


def _dtype(g: random.Random, backend: str) -> torch.dtype:
    if backend.startswith("cuda_sm90"):
        return torch.bfloat16
    return g.choice(FLOATS[:2] if backend == "triton" else FLOATS)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@contextmanager
def passes(d: Drawn) -> Iterator[None]:
    """With the passes of a GPU on this CPU where the layout is one of a GPU, and in pieces as the problem says."""

    def product_dtype(rows: Tensor) -> torch.dtype:
        if rows.dtype in (torch.float64, torch.float32):
            return rows.dtype
        return torch.bfloat16

    def zeros(call: Any, out: Tensor) -> None:
        out.zero_()

    with ExitStack() as stack:

        def patch(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        if d.captured:
            real = layer_pass.sort_pairs
            patch(layer_pass, "sort_pairs", lambda *of: real(*of)._replace(host_ends=None))
        if d.pieces:
            patch(layer_pass, "PIECE_ELEMENTS", 5 * d.case.hidden)
            patch(weights, "CHUNK_ELEMENTS", 6 * d.case.hidden * d.case.inter)
        if d.backend in LAYOUTS["cpu"]:
            yield
            return
        for module in (layer_pass, lora, products):
            patch(module, "product_dtype", product_dtype)
        home = replace(BACKENDS[d.backend], requires=(), run=zeros, rows_by_slot=None)
        stack.enter_context(mock.patch.dict(BACKENDS, {d.backend: home}))
        if d.windows:
            patch(chunks, "SHARE_OF_WEIGHTS", 1 << 30)
            patch(chunks, "WINDOWS", d.windows)
        if d.at_once:
            patch(chunks, "at_once_on_gpu", lambda *of: d.at_once)
        for name in ("FEW_ROWS", "FEW_ROWS_BY_SLOT"):
            patch(on_gpu, name, d.few_rows)
        yield


@dataclass
class Batch:
    x: Tensor
    ids: Tensor
    weights: Tensor
    lora_ids: Tensor | None
    grad: Tensor


def batch_of(d: Drawn) -> Batch:
    t = torch.Generator().manual_seed(d.case.seed + 1)
    tokens, k = d.case.tokens, d.case.top_k
    x = torch.randn(tokens, d.case.hidden, generator=t).to(d.case.dtype)
    ids = torch.randint(0, d.total, (tokens, k), generator=t, dtype=torch.int32)
    if d.ids == "distinct" and k <= d.total:
        ids = torch.rand(tokens, d.total, generator=t).argsort(1)[:, :k].int()
    if d.ids == "one":
        ids[:] = d.offset
    if d.ids == "nobody":
        ids[:] = -1
    weights = torch.rand(tokens, k, generator=t) + 0.1
    weights[torch.rand(tokens, k, generator=t) < 0.05] = 0.0
    if d.ids == "foreign":
        values = torch.tensor([-1, d.total, 2**31 - 1, -(2**31)], dtype=torch.int32)
        holes = torch.rand(ids.shape, generator=t) < 0.4
        ids = torch.where(holes, values[torch.randint(4, ids.shape, generator=t)], ids)
        if not d.on_input:
            weights = torch.where(holes, math.nan, weights)
    lora_ids = None
    if d.adapters and d.lora_ids != "none":
        lora_ids = torch.randint(-1, d.adapters + 1, (tokens,), generator=t, dtype=torch.int32)
        if d.lora_ids != "random":
            lora_ids[:] = -1 if d.lora_ids == "all -1" else d.adapters - 1
    grad = torch.randn(tokens, d.case.hidden, generator=t).to(d.case.dtype)
    return Batch(x, ids, weights, lora_ids, grad)


def lora_of(d: Drawn, raw: moe.RawWeights) -> moe.Lora | None:
    if not d.adapters:
        return None
    found = factors_of(raw, d.adapters, d.rank, d.factor_dtype)
    drop = {"both": (), "13": ("a2", "b2"), "2": ("a13", "b13")}[d.only]
    return replace(found, **dict.fromkeys(drop))


def oracle(d: Drawn, raw: moe.RawWeights, b: Batch, lora: moe.Lora | None) -> dict[str, Tensor]:
    """The output and gradients by autograd in float64, expert by expert."""
    wide = lambda t: None if t is None else t.detach().double().requires_grad_()  # noqa: E731
    names = ("a13", "b13", "a2", "b2")
    leaves: dict[str, Any] = {"x": wide(b.x), "weights": wide(b.weights)}
    leaves |= {"w13_bias": wide(raw.w13_bias), "w2_bias": wide(raw.w2_bias)}
    leaves |= {name: wide(getattr(lora, name)) if lora is not None else None for name in names}
    w13, w2 = (w.double() for w in moe.dequantize_experts(raw))
    scaling = torch.as_tensor(1.0 if lora is None else lora.scaling, dtype=torch.float32).double().reshape(-1)
    constants = resolve_constants(
        d.case.activation, *(d.constants.get(f"swiglu_{n}") for n in ("alpha", "beta", "limit"))
    )
    out, sizes = torch.zeros(b.x.shape, dtype=torch.float64), torch.zeros(b.ids.shape, dtype=torch.float64)
    for e in range(d.case.experts):
        token, slot = (b.ids == e + d.offset).nonzero(as_tuple=True)
        if not len(token):
            continue
        weight = leaves["weights"][token, slot][:, None]
        rows = leaves["x"][token] * weight if d.on_input else leaves["x"][token]

        def addend(a: Tensor | None, b_: Tensor | None, rows: Tensor, token: Tensor = token, e: int = e) -> Any:
            if a is None or b_ is None:
                return 0.0
            low = (rows @ a[e].T).unflatten(1, (len(scaling), -1)) * scaling[:, None]
            if b.lora_ids is not None:
                low = low * (b.lora_ids[token][:, None] == torch.arange(len(scaling)))[:, :, None]
            return low.flatten(1) @ b_[e].T

        def merged(value: Any) -> Any:
            """The addend of an adapter that the weights hold already: nothing, and its gradient to the factors alone."""
            return value - value.detach() if d.merged and isinstance(value, Tensor) else value

        z = rows @ w13[e].T + merged(addend(leaves["a13"], leaves["b13"], rows.detach() if d.merged else rows))
        if leaves["w13_bias"] is not None:
            z = z + leaves["w13_bias"][e]
        gate, up = z.chunk(2, 1) if raw.is_gated else (None, z)
        h = apply_activation(d.case.activation, gate, up, *constants)
        y = h @ w2[e].T + merged(addend(leaves["a2"], leaves["b2"], h.detach() if d.merged else h))
        if leaves["w2_bias"] is not None:
            y = y + leaves["w2_bias"][e]
        size = y.detach().norm(dim=1) * b.grad[token].double().norm(dim=1) / math.sqrt(d.case.hidden)
        sizes[token, slot] = size / weight.detach()[:, 0].clamp_min(0.1) if d.on_input else size
        out = out.index_add(0, token, y if d.on_input else y * weight)
    given = {name: t for name, t in leaves.items() if t is not None}
    grads = (
        torch.autograd.grad(out, list(given.values()), b.grad.double(), allow_unused=True)
        if out.requires_grad
        else [None] * len(given)
    )
    found = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(given.items(), grads, strict=True)}
    return {"output": out.detach(), "sizes": sizes, **found}


def found_of(d: Drawn, raw: moe.RawWeights, b: Batch, lora: moe.Lora | None) -> dict[str, Tensor]:
    """What the library makes of it."""
    own = between if d.strided else (lambda t: t.detach().clone())
    leaf = lambda t: None if t is None else own(t).requires_grad_()  # noqa: E731
    parallel = {"num_experts": d.total, "local_expert_offset": d.offset, "router_weight_on_input": d.on_input}
    w = moe.prepare(raw, act_format="none", backend=d.backend, **parallel, **d.constants)
    w = replace(w, w13_bias=leaf(w.w13_bias), w2_bias=leaf(w.w2_bias))
    leaves: dict[str, Any] = {"x": leaf(b.x), "weights": leaf(b.weights)}
    options: dict[str, Any] = {}
    if lora is not None:
        factors = {n: leaf(t) for n in ("a13", "b13", "a2", "b2") if (t := getattr(lora, n)) is not None}
        leaves |= factors
        options = {"lora": replace(lora, **factors), "lora_merged": d.merged}
        options["lora_ids"] = None if b.lora_ids is None else own(b.lora_ids)
    out = moe.fused_moe_routed(leaves["x"], own(b.ids), leaves["weights"], w, **options)
    out.backward(own(b.grad))
    found = {name: t.grad for name, t in leaves.items()}
    halves = 2 if raw.is_gated else 1
    if w.w13_bias is not None:
        grad = w.w13_bias.grad.unflatten(1, (halves, -1))
        assert b.x.isnan().any() or not grad[:, :, raw.intermediate_size :].any(), "padding of a bias has a gradient"
        found["w13_bias"] = grad[:, :, : raw.intermediate_size].flatten(1)
    if w.w2_bias is not None:
        found["w2_bias"] = w.w2_bias.grad
    if d.backend in LAYOUTS["cpu"] or (lora is not None and not d.merged):
        found["output"] = out.detach()
    return found


def ratio(got: Tensor, want: Tensor, bound: float, sizes: Tensor | None = None) -> float:
    """Error over bound, of the whole and of its worst row. sizes: of sums that may cancel, what they come to if not."""
    if got.shape != want.shape:
        return math.inf
    if want.abs().max() > torch.finfo(got.dtype).max / 2:  # what the dtype cannot hold
        return 0.0
    if not torch.isfinite(got).all():
        return math.inf
    error, size = (got.double() - want).flatten(1), (want if sizes is None else want.abs() + sizes).flatten(1)
    whole = float(size.norm())
    if whole == 0:
        return math.inf if got.any() else 0.0
    floor = 2e-2 * whole / math.sqrt(len(size))
    rows = error.norm(dim=1) / (size.norm(dim=1) + floor) / (ROW_BOUND * bound)
    return max(float(error.norm()) / whole / bound, float(rows.max()))


def solve(on: str, seed: int, index: int) -> tuple[float, str]:
    """(the worst ratio of error to bound, what the problem is)."""
    d = drawn(on, seed, index)
    if d.merged and (d.adapters != 1 or d.lora_ids != "none"):
        d = replace(d, merged=False)
    raw, b = raw_of(d.case, d.form), batch_of(d)
    lora_ = lora_of(d, raw)
    clamps = (
        resolve_constants(d.case.activation, *(d.constants.get(f"swiglu_{n}") for n in ("alpha", "beta", "limit")))[2]
        < 7
    )
    with passes(d):
        found = found_of(d, raw, b, lora_)
        again = found_of(replace(d, strided=False), raw, b, lora_) if d.strided else found
        found_nan = None
        if d.nan_row:
            poisoned = replace(b, x=b.x.clone())
            poisoned.x[0] = math.nan
            found_nan = found_of(d, raw, poisoned, lora_)
    want = oracle(d, raw, b, lora_)
    worst, where = 0.0, ""
    for name, got in found.items():
        bounds = (EXACT, OF_EXACT_CLAMPS) if d.case.dtype == torch.float32 else (BOUND, BOUND_OF_CLAMPS)
        bound = bounds[clamps]
        if name in ("a13", "b13", "a2", "b2"):  # rounded once to their dtype
            bound += {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 0.0}[d.factor_dtype]
            bound *= 10 if d.rank <= 2 else 1  # a sum for each rank, which may cancel
        of_it = ratio(got, want[name], bound, want["sizes"] if name == "weights" else None)
        if not torch.allclose(got, again[name], rtol=0, atol=0, equal_nan=True):
            of_it, name = math.inf, f"{name} (not the same bits again)"
        if not of_it <= worst:
            worst, where = of_it, name
    if found_nan is not None:
        for name in {"x", "weights", "output"} & found.keys():
            if not torch.allclose(found_nan[name][1:], found[name][1:], rtol=0, atol=0, equal_nan=True):
                worst, where = math.inf, f"{name} beside a token of NaN"
    return worst, f"{where}: {d}"


def attempt(on: str, seed: int, index: int) -> tuple[float, str]:
    """`solve`; a crash is a miss like any other."""
    try:
        return solve(on, seed, index)
    except Exception as error:
        return math.inf, f"{crash(error)}: {drawn(on, seed, index)}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--on", choices=list(LAYOUTS), required=True)
    a = parser.parse_args()
    torch.set_num_threads(1)
    return try_problems(a, lambda index: attempt(a.on, a.seed, index))


if __name__ == "__main__":
    sys.exit(main())
