"""Problems for the C++ kernels: random weights, packed for the kernel and decoded for the emulation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import cpu_emulation as emulation
import pytest
import torch
from torch import Tensor

from torch_moe_ops.backends.cpu_panels import layout
from torch_moe_ops.core.call import KERNEL_FIELDS

ISAS = ("amx", "amx_emulated", "avx512bf16", "avx512", "avx2", "portable")


def supported(isa: str) -> bool:
    before = torch.ops.moeq_C.cpu_isa()
    try:
        torch.ops.moeq_C.use_cpu_isa(isa)
    except RuntimeError:
        return False
    torch.ops.moeq_C.use_cpu_isa(before)
    return True


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has; the one chosen at load is back afterwards."""
    if not supported(request.param):
        pytest.skip(f"this machine has no {request.param}")
    before = torch.ops.moeq_C.cpu_isa()
    torch.ops.moeq_C.use_cpu_isa(request.param)
    yield str(request.param)
    torch.ops.moeq_C.use_cpu_isa(before)


def integers_by(name: str) -> Iterator[str]:
    """The body of a fixture: integers are multiplied by these instructions; skips where the machine has none."""
    try:
        torch.ops.moeq_C.use_cpu_integer_isa(name)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield name
    torch.ops.moeq_C.use_cpu_integer_isa("")


class Weight:
    """Raw tensors of one weight, in checkpoint order, and what they mean: `values` float64 [E, N, K]."""

    def __init__(self, codes: Tensor, values: Tensor, scale: Tensor | None = None, zero: Tensor | None = None) -> None:
        self.codes, self.values, self.scale, self.zero = codes, values, scale, zero


class Problem:
    """One layer of `scheme`. options: weight_dtype, scale_dtype, group, zero_points, element; others go to Layer."""

    def __init__(self, scheme: str, experts: int, hidden: int, inter: int, seed: int = 0, **fields: object) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.scheme, self.hidden, self.inter, self.experts = scheme, hidden, inter, experts
        names = ("weight_dtype", "scale_dtype", "group", "zero_points", "element", "channel")
        self.options = {name: fields.pop(name) for name in names if name in fields}
        self.gated = not str(fields.get("activation", "silu")).endswith("_no_mul")
        self.packed: dict[str, Tensor] = {}
        values = {}
        for name, rows, k, gated in (
            ("w13", 2 * inter if self.gated else inter, hidden, self.gated),
            ("w2", hidden, inter, False),
        ):
            weight = self.make(rows, k, gated)
            values[name] = weight.values
            self.packed[name] = layout.pack_weight(scheme, weight.codes, gated)
            if weight.scale is not None:
                self.packed[f"{name}_scale"] = layout.pack_scale(scheme, weight.scale, gated)
            if weight.zero is not None:
                self.packed[f"{name}_zero_point"] = layout.pack_scale(scheme, weight.zero, gated)
        self.layer = emulation.Layer(values["w13"], values["w2"], **fields)  # type: ignore[arg-type]

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def make(self, rows: int, k: int, gated: bool) -> Weight:
        family = {"none": self.plain, "nvfp4": self.nvfp4, "mxfp4": self.mxfp4, "mxfp8": self.mx8, "mxfp6": self.mx8}
        if self.scheme in family:
            return family[self.scheme](rows, k)
        if self.scheme in ("fp8", "fp8_block"):
            return self.fp8(rows, k, gated)
        return self.integer(rows, k)

    def plain(self, rows: int, k: int) -> Weight:
        w = (self.randn(self.experts, rows, k) / math.sqrt(k)).to(self.options["weight_dtype"])  # type: ignore[call-overload]
        return Weight(w, w.double())

    def nvfp4(self, rows: int, k: int) -> Weight:
        codes = self.integers(0, 256, self.experts, rows, k // 2).to(torch.uint8)
        scale = (self.rand(self.experts, rows, k // 16) * 2).exp2().to(torch.float8_e4m3fn)
        scale[:, 0] = 2.0**-9  # a subnormal row
        scale[:, -1] = 0.0
        values = emulation.decode_e2m1(codes) * scale.float().repeat_interleave(16, -1)
        return Weight(codes, values.double(), scale)

    def e8m0(self, rows: int, k: int) -> Tensor:
        return self.integers(118, 125, self.experts, rows, k // 32).to(torch.uint8)

    def mxfp4(self, rows: int, k: int) -> Weight:
        codes = self.integers(0, 256, self.experts, rows, k // 2).to(torch.uint8)
        scale = self.e8m0(rows, k)
        factor = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
        return Weight(codes, emulation.decode_e2m1(codes).double() * factor, scale)

    def mx8(self, rows: int, k: int) -> Weight:
        scale = self.e8m0(rows, k)
        factor = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
        if self.scheme == "mxfp8":
            values = self.randn(self.experts, rows, k).mul(4).to(torch.float8_e4m3fn)
            return Weight(values, values.double() * factor, scale)
        element = str(self.options["element"])
        table = torch.tensor(emulation.MX_ELEMENTS[f"mxfp6_{element}"][1])
        codes = self.integers(0, 64, self.experts, rows, k).to(torch.uint8)
        values = torch.where(codes >= 32, -table[(codes & 31).long()], table[(codes & 31).long()])
        return Weight(layout.fp6_to_e4m3(codes, element), values.double() * factor, scale)

    def fp8(self, rows: int, k: int, gated: bool) -> Weight:
        codes = self.randn(self.experts, rows, k).to(torch.float8_e4m3fn)
        if self.scheme == "fp8":
            if not self.options.get("channel", True):
                return Weight(codes, codes.double())
            scale = 0.1 + self.rand(self.experts, rows, 1)
            return Weight(codes, codes.double() * scale.double(), scale)
        halves = 2 if gated else 1
        tiles = -(-rows // halves // 128)
        scale = 0.1 + self.rand(self.experts, halves * tiles, -(-k // 128))
        whole = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)[..., :k]
        parts = [part[:, : rows // halves] for part in whole.split(tiles * 128, 1)]
        return Weight(codes, codes.double() * torch.cat(parts, 1), scale)

    def integer(self, rows: int, k: int) -> Weight:
        group = int(self.options.get("group", 0)) or k  # type: ignore[call-overload]
        dtype = self.options.get("scale_dtype", torch.bfloat16)
        scale = ((0.5 + self.rand(self.experts, rows, k // group)) / 8).to(dtype)  # type: ignore[call-overload]
        zero = None
        if self.scheme == "int8":
            codes = stored = self.integers(-128, 128, self.experts, rows, k).to(torch.int8)
            scale = scale / 16
            center: Tensor | int = 0
            if self.options.get("zero_points"):
                center = zero = self.integers(-128, 128, self.experts, rows, k // group).to(torch.int8)
        else:
            codes = self.integers(0, 16, self.experts, rows, k).to(torch.uint8)
            center = 8
            if self.options.get("zero_points"):
                center = zero = self.integers(0, 17, self.experts, rows, k // group).to(torch.uint8)
            stored = codes ^ 8 if self.scheme == "mxint4" else codes
            stored = stored[..., ::2] | stored[..., 1::2] << 4
        if isinstance(center, Tensor):
            center = center.double().repeat_interleave(group, -1)
        values = (codes.double() - center) * scale.double().repeat_interleave(group, -1)
        return Weight(stored, values, scale, zero)

    def alphas(self, *columns: int) -> Tensor:
        return (0.5 + self.rand(self.experts, *columns)) / (4 * math.sqrt(self.hidden))

    def tokens(self, count: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x = self.randn(count, self.hidden).to(dtype)
        ids = self.integers(0, self.experts, count, top_k).int()
        return x, ids + self.layer.offset, self.rand(count, top_k)

    def run(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        out_dtype: torch.dtype = torch.float32,
        scale: Tensor | None = None,
    ) -> Tensor:
        layer = self.layer
        out = torch.full((x.shape[0], self.hidden), 7.0, dtype=out_dtype)
        given = {
            **self.packed,
            "hidden_states": x,
            "hidden_states_scale": scale,
            "topk_ids": ids,
            "topk_weights": weights,
            "activation": layer.activation,
            **dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), layer.constants, strict=True)),
            "local_expert_offset": layer.offset,
            "router_weight_on_input": layer.weight_on_input,
        }
        for name in ("g1_alphas", "w13_bias", "g2_alphas", "w2_bias", "a1_gscale", "a2_gscale"):
            given[name] = getattr(layer, name)
        arguments = [given.get(name) for name in KERNEL_FIELDS]
        torch.ops.moeq_C.experts(out, *arguments, scheme=self.scheme, act_format=layer.act_format)
        return out


def assert_threads_do_not_show(problem: Problem, arguments: tuple[Tensor, Tensor, Tensor], want: Tensor) -> None:
    """The bits of `want` with one thread and with three."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(problem.run(*arguments), want)
    finally:
        torch.set_num_threads(before)


def assert_instructions_do_not_show(problem: Problem, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
    """The bits by the instructions that were chosen are those by portable code, which is chosen from here on."""
    got = problem.run(*arguments)
    torch.ops.moeq_C.use_cpu_integer_isa("portable")
    assert torch.equal(got, problem.run(*arguments))


def assert_batch_and_threads_do_not_show(problem: Problem) -> None:
    """A token's bits are the same with fewer tokens behind it, in another order, and with other numbers of threads."""
    x, ids, weights = problem.tokens(41, 2, torch.bfloat16)
    whole = problem.run(x, ids, weights)
    for count in (1, 2, 3, 8, 17):
        assert torch.equal(problem.run(x[:count], ids[:count], weights[:count]), whole[:count])
    order = torch.randperm(41, generator=problem.generator)
    assert torch.equal(problem.run(x[order], ids[order], weights[order]), whole[order])
    assert_threads_do_not_show(problem, (x, ids, weights), whole)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def assert_close_by_rows(got: Tensor, want: Tensor, tight: float, loose: float) -> None:
    """Most rows agree to `tight`; in a few, one code of the intermediate fell on the other side of a tie."""
    errors = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
    assert int((errors > tight).sum()) <= max(1, len(errors) // 5), errors
    assert float(errors.max()) < loose, errors


def nvfp4(hidden: int, inter: int, seed: int = 0, experts: int = 5, **fields: object) -> Problem:
    problem = Problem("nvfp4", experts, hidden, inter, seed, **fields)
    problem.layer.g1_alphas = problem.alphas()
    problem.layer.g2_alphas = problem.alphas()
    return problem
