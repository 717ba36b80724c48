"""What fuzz_problems.py never makes, on the kernels of this CPU: every form of weights, every instruction set, many tokens.

    python tests/programs/fuzz_cpu.py --count 2000 [--seed 0] [--first 0] [--seconds 600]

Scales of groups, rows, halves and matrices in every dtype, zero points in one projection or both, other scales in w2
than in w13; packed hidden states; weights on the input; adapters. Each result is compared with the oracle, and the
same call then has to give the same bits with fewer tokens, in another order, with other numbers of threads, from strided
tensors, in `out`, and from three dimensions. Problem i follows from the seed and i alone.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from fuzz_loop import between, crash, parser_of, try_problems
from fuzz_problems import SPECIAL, compare
from problems import Case
from raw_forms import Form, raw_of
from tolerances import layer_bound
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import ACT_FORMATS, FLOATS, SCHEMES

ISAS = ("amx", "amx_emulated", "avx512bf16", "avx512", "avx2", "portable")
INTEGERS = ("amx", "amx_emulated", "avx512vnni", "avxvnni", "avx512", "avx2", "portable")
TOKENS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 130, 300)


def kernels_here() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The instruction sets of this machine, and those for integers."""
    ops = torch.ops.moeq_C
    with _kept():
        return _supported(ops.use_cpu_isa, ISAS), _supported(ops.use_cpu_integer_isa, INTEGERS)


def _supported(choose: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    for name in names:
        try:
            choose(name)
        except RuntimeError:
            continue
        found.append(name)
    return tuple(found)


@contextmanager
def _kept() -> Iterator[None]:
    """Instructions and number of threads are afterwards what they were."""
    ops = torch.ops.moeq_C
    isa, threads = ops.cpu_isa(), torch.get_num_threads()
    try:
        yield
    finally:
        ops.use_cpu_isa(isa)
        ops.use_cpu_integer_isa("")
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Drawn:
    case: Case
    form: Form
    constants: dict[str, float]
    offset: int
    total: int
    ids: str
    on_input: bool
    packed: bool
    out_dtype: torch.dtype
    special: bool
    isa: str
    integers: str
    threads: int


def drawn(seed: int, index: int, isas: tuple[str, ...], integers: tuple[str, ...]) -> Drawn:
    g = random.Random(f"{seed}-{index}")
    scheme = SCHEMES[g.choice(list(SCHEMES))]
    act = g.choice(scheme.act_formats)
    activation = g.choice(list(ACTIVATIONS))
    form = Form.drawn(g, scheme.name)
    multiple = max(scheme.size_multiple, form.multiple)
    up = lambda size: -(-size // multiple) * multiple  # noqa: E731
    on_input = g.random() < 0.1
    case = Case(
        scheme=scheme.name, act_format=act, tokens=g.choice(TOKENS), experts=g.choice((1, 2, 3, 7, 16)),
        top_k=1 if on_input else g.choice((1, 1, 2, 3, 4, 8, 22)), hidden=up(g.choice((8, 24, 64, 72, 120, 200, 264, 520))),
        inter=up(g.choice((8, 16, 40, 64, 72, 104, 136, 232))), activation=activation, dtype=g.choice(FLOATS),
        bias=g.random() < 0.4, per_half=scheme.name == "nvfp4" and g.random() < 0.5,
        input_scale=g.choice(("none", "tensor", "expert")) if act in scheme.static_acts else "none",
        seed=g.randrange(1 << 20),
    )  # fmt: skip
    values = {"alpha": g.uniform(0.5, 2.5), "beta": g.uniform(0.1, 2.0), "limit": g.choice((0.5, 3.0, 7.0))}
    constants = {f"swiglu_{name}": values[name] for name in ACTIVATIONS[activation].takes if g.random() < 0.5}
    offset = g.choice((0, 0, 0, 1, 5, 2**31 - 40))
    return Drawn(
        case, form, constants, offset, offset + case.experts + g.choice((0, 0, 0, 3)), g.choice(("random", "distinct", "one", "foreign", "few")),
        on_input, act != "none" and g.random() < 0.4, g.choice((*FLOATS, torch.float32)), g.random() < 0.3, g.choice(isas),
        g.choice(integers), g.choice((1, 1, 2, 3)),
    )  # fmt: skip


@dataclass
class Batch:
    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor

    def rows(self, which: Any) -> Batch:
        return Batch(
            self.x[which], None if self.scale is None else self.scale[which], self.ids[which], self.weights[which]
        )


def batch_of(d: Drawn, w: moe.PreparedWeights) -> Batch:
    t = torch.Generator().manual_seed(d.case.seed + 1)
    g = random.Random(d.case.seed)
    tokens, k = d.case.tokens, d.case.top_k
    x = torch.randn(tokens, d.case.hidden, generator=t)
    if tokens and g.random() < 0.2:
        x[g.randrange(tokens)] = 0.0
    if d.special and tokens:
        x[g.randrange(tokens), g.randrange(d.case.hidden)] = g.choice(SPECIAL)
    x = x.to(d.case.dtype)
    ids = torch.randint(d.offset, min(d.total, 2**31 - 1), (tokens, k), generator=t, dtype=torch.int32)
    if d.ids == "distinct" and k <= d.case.experts:
        ids = (torch.rand(tokens, d.case.experts, generator=t).argsort(1)[:, :k] + d.offset).int()
    if d.ids == "one":
        ids[:] = d.offset
    if d.ids == "few":
        ids = d.offset + (ids - d.offset) % 2
    weights = torch.rand(ids.shape, generator=t) + 0.1
    weights[torch.rand(ids.shape, generator=t) < 0.05] = 0.0
    if d.ids == "foreign":
        foreign = torch.tensor([-1, d.total, 2**31 - 1, -(2**31)], dtype=torch.int32)
        holes = torch.rand(ids.shape, generator=t) < 0.3
        ids = torch.where(holes, foreign[torch.randint(4, ids.shape, generator=t)], ids)
        if not d.on_input:
            weights = torch.where(holes & (torch.rand(ids.shape, generator=t) < 0.5), math.nan, weights)
    if not d.packed or d.on_input:
        return Batch(x, None, ids, weights)
    quantized = _packed(x, w)
    return Batch(x, None, ids, weights) if quantized is None else Batch(*quantized, ids, weights)


def _packed(x: Tensor, w: moe.PreparedWeights) -> tuple[Tensor, Tensor] | None:
    act, gscale = w.act_format, w.a1_gscale
    if gscale is not None and gscale.ndim:
        return None
    if act == "nvfp4":
        return None if gscale is None else torch.ops.moeq.quantize_nvfp4(x, gscale)
    if act == "fp8":
        return torch.ops.moeq.quantize_fp8(x, gscale, SCHEMES[w.scheme].fp8_group)
    if act == "int8":
        return torch.ops.moeq.quantize_int8(x, gscale)
    if act in ("mxfp4", "mxfp8"):
        return getattr(torch.ops.moeq, f"quantize_{act}")(x)
    if act.startswith("mxfp6"):
        from torch_moe_ops.numerics import mx

        return mx.quantize_mx(x, ACT_FORMATS[act].name.removeprefix("mxfp6_"), "rceil")
    return None


def run(b: Batch, w: moe.PreparedWeights, out_dtype: torch.dtype, **options: Any) -> Tensor:
    return moe.fused_moe_routed(b.x, b.ids, b.weights, w, hidden_states_scale=b.scale, out_dtype=out_dtype, **options)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """But for those of NaN, whose sign follows the order in which a sum met its operands."""
    if a.is_floating_point() and a.element_size() > 1 and a.shape == b.shape:
        nan = a.isnan() & b.isnan()
        a, b = a.masked_fill(nan, 0.0), b.masked_fill(nan, 0.0)
    bits = [torch.stack(t.reshape(-1).unbind()) if t.numel() == 1 else t.reshape(-1) for t in (a, b)]
    bits = [t.contiguous().view(torch.uint8) for t in bits]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def variants(d: Drawn, b: Batch, w: moe.PreparedWeights, whole: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what was changed, the result, what it must be)."""
    g, tokens = random.Random(d.case.seed + 2), d.case.tokens
    for threads in {1, 2, 3} - {d.threads}:
        torch.set_num_threads(threads)
        yield f"{threads} threads", run(b, w, d.out_dtype), whole
    torch.set_num_threads(d.threads)
    if tokens:
        few = g.choice([n for n in (1, 2, 3, 5, 8, 15, 16, 17, 33) if n <= tokens])
        yield f"{few} tokens", run(b.rows(slice(0, few)), w, d.out_dtype), whole[:few]
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(d.case.seed))
        yield "another order", run(b.rows(order), w, d.out_dtype), whole[order]
    strided = Batch(between(b.x), None if b.scale is None else between(b.scale), between(b.ids), between(b.weights))
    yield "strided", run(strided, w, d.out_dtype), whole
    out = torch.full_like(whole, math.nan)
    yield "out", run(b, w, d.out_dtype, out=out), whole
    wide = Batch(b.x, b.scale, b.ids.long(), b.weights.double())
    yield "int64 ids", run(wide, w, d.out_dtype), whole
    with torch.inference_mode():
        yield "inference mode", run(b, w, d.out_dtype), whole


def solve(d: Drawn) -> tuple[float, str]:
    """(error over bound, infinite where bits differ; what was wrong)."""
    raw = raw_of(d.case, d.form)
    parallel = {"num_experts": d.total, "local_expert_offset": d.offset, "router_weight_on_input": d.on_input}
    w, reference = (
        moe.prepare(raw, act_format=d.case.act_format, backend=name, **parallel, **d.constants)
        for name in ("cpu", "reference")
    )
    restored = moe.restore(w)
    for name, t in raw.tensors().items():
        back = getattr(restored, name)
        if back is None or not same_bits(t, back):
            return math.inf, f"{name} after restore"
    b = batch_of(d, w)
    with _kept():
        torch.ops.moeq_C.use_cpu_isa(d.isa)
        torch.ops.moeq_C.use_cpu_integer_isa(d.integers)
        torch.set_num_threads(d.threads)
        out = run(b, w, d.out_dtype)
        for what, got, want in variants(d, b, w, out):
            if not same_bits(got, want):
                return math.inf, f"other bits: {what}"
    want = run(b, reference, torch.float32)
    ours = (b.ids.long() >= d.offset) & (b.ids.long() < d.offset + d.case.experts)
    values = int(ours.sum()) * raw.intermediate_size
    if d.ids in ("one", "few", "random"):
        values = max(1, int(ours.any(1).sum())) * raw.intermediate_size
    return compare(out, want, layer_bound("cpu", w.act_format, d.out_dtype, values, d.case.activation)), "error"


def attempt(d: Drawn) -> tuple[float, str]:
    """`solve` with the problem in its text; a crash is a miss like any other."""
    try:
        found, what = solve(d)
    except Exception as error:
        found, what = math.inf, crash(error)
    return found, f"{what}: {d}"


def main() -> int:
    a = parser_of(__doc__).parse_args()
    here = kernels_here()
    print(*here)
    return try_problems(a, lambda index: attempt(drawn(a.seed, index, *here)))


if __name__ == "__main__":
    sys.exit(main())
