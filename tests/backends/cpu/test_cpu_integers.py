"""Integer weights times int8 activations: exact sums, and the same bits by whatever instructions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
import cpu_emulation as emulation
import cpu_problems
from cpu_cases import BF16, CASES, F32, build
from cpu_problems import (
    Problem,
    assert_batch_and_threads_do_not_show,
    assert_instructions_do_not_show,
    distance,
    integers_by,
)
from host_library import host_library

import torch_moe_ops as moe
from torch_moe_ops.backends.cpu_panels import layout

isa = cpu_problems.isa  # the fixture

INTEGERS = tuple(
    name
    for name, case in CASES.items()
    if case["act_format"] == "int8" and case["scheme"] in ("int4", "mxint4", "int8")
)


@pytest.fixture(params=["amx", "amx_emulated", "avx512vnni", "avx512", "avxvnni", "avx2", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way to multiply integers that this machine has."""
    yield from integers_by(request.param)


def group_sums(codes: Tensor, weights: Tensor, group: int) -> Tensor:
    """[rows, N, groups] of int8 codes [rows, K] and weights less their offsets [N, K], exactly."""
    products = codes.long()[:, None] * weights.long()[None]
    return products.unflatten(-1, (-1, group)).sum(-1)


def linear(x: Tensor, problem: Problem, name: str, alpha: Tensor) -> Tensor:
    """Rows of expert 0 through w13 or w2, in float32, every rounding in the order that the kernels state."""
    amax = x.abs().amax(-1)
    s = torch.where(amax == 0, torch.ones(()), amax / 127.0)
    codes = (x / s[:, None]).round().clamp(-127, 127)
    rows, k = getattr(problem.layer, name).shape[1:]
    scale = layout.unpack_scale(problem.scheme, problem.packed[f"{name}_scale"], rows, k // 32, False)[0].float()
    whole = getattr(problem.layer, name)[0] / scale.double().repeat_interleave(32, -1)
    sums = group_sums(codes, whole.round(), 32)
    acc = torch.zeros(x.shape[0], rows)
    for group in range(k // 32):
        acc = acc + scale[:, group] * sums[..., group].float()
    return acc * (alpha * s)[:, None]


@pytest.mark.parametrize("case", ["int4-int8", "int4-int8-zero", "mxint4-int8"])
def test_bits_are_those_of_the_stated_order(isa: str, case: str) -> None:
    problem = build(case, 192, 320, activation="identity_no_mul")
    layer = problem.layer
    layer.g1_alphas = layer.g2_alphas = torch.full((4,), 0.25)
    x, _, _ = problem.tokens(9, 1, F32)
    ids, weights = torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1)
    want = linear(linear(x, problem, "w13", torch.tensor(0.25)), problem, "w2", torch.tensor(0.25))
    assert torch.equal(problem.run(x, ids, weights), want)


@pytest.mark.parametrize("case", INTEGERS)
def test_every_instruction_set_has_the_same_bits(instructions: str, case: str) -> None:
    problem = build(case, 208, 320) if "group" not in CASES[case] else build(case, 192, 320)
    assert_instructions_do_not_show(problem, problem.tokens(23, 2, BF16))


@pytest.mark.parametrize("tokens", [8, 15, 33, 150])
@pytest.mark.parametrize("case", ["int4-int8-g64-f16", "int4-int8-zero", "int8-zero-row"])
def test_any_number_of_rows_of_an_expert(instructions: str, case: str, tokens: int) -> None:
    """Blocks of 16 rows, two of them, and calls of 128; K of 592 and 144 are no multiples of what a tile holds."""
    problem = build(case, 576 if "group" in CASES[case] else 592, 192 if "group" in CASES[case] else 144)
    x, _, _ = problem.tokens(tokens, 1, BF16)
    arguments = (x, torch.full((tokens, 1), 2, dtype=torch.int32), torch.ones(tokens, 1))
    assert_instructions_do_not_show(problem, arguments)


@pytest.mark.parametrize("case", INTEGERS)
def test_bitwise_independent_of_batch_and_threads(instructions: str, case: str) -> None:
    assert_batch_and_threads_do_not_show(build(case, 192, 128))


@pytest.mark.parametrize("case", ["int4-int8-row-f32", "int4-int8-zero-row", "int8-int8", "int8-zero-row"])
def test_largest_products(instructions: str, case: str) -> None:
    """Every product as large as it can be, -128 of packed activations included: nothing saturates on the way."""
    problem = build(case, 4096, 16, activation="identity_no_mul")
    layer = problem.layer
    layer.g1_alphas = layer.g2_alphas = None
    int8 = problem.scheme == "int8"
    code = torch.full((4, 16, 4096 if int8 else 2048), 127 if int8 else 0xFF, dtype=torch.int8 if int8 else torch.uint8)
    lowest = -128 if int8 else 0
    zero = torch.full((4, 16, 1), lowest, dtype=torch.int8 if int8 else torch.uint8)
    if "w13_zero_point" in problem.packed:
        problem.packed["w13_zero_point"] = layout.pack_scale(problem.scheme, zero, False)
    problem.packed["w13"] = layout.pack_weight(problem.scheme, code, False)
    problem.packed["w13_scale"] = layout.pack_scale(
        problem.scheme, torch.ones(4, 16, 1).to(problem.packed["w13_scale"]), False
    )
    value = (127 if int8 else 15) - (lowest if "zero" in case else 0 if int8 else 8)
    layer.w13 = torch.full((4, 16, 4096), float(value), dtype=torch.float64)
    x = torch.full((1, 4096), -128, dtype=torch.int8)
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    got = problem.run(x, ids, weights, F32, torch.ones(1, 1))
    h = torch.full((1, 16), -128.0 * value * 4096)
    values, factor = emulation.uniform_rows(h, "int8", None, 0)
    want = (values @ layer.w2[0].T).float() * factor[:, None]
    assert distance(got, want) < 1e-6


def test_the_choice_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"isa must be one of .*portable, got 'sse9'"):
        torch.ops.moeq_C.use_cpu_integer_isa("sse9")
    assert torch.ops.moeq_C.cpu_integer_isa() in ("amx", "avx512vnni", "avx512", "avxvnni", "avx2", "portable")


def test_a_table_brings_its_own(isa: str) -> None:
    """Where instructions are asked for by name, integers are not multiplied by others."""
    beside = {"portable": {"portable"}, "avx2": {"avx2", "avxvnni"}, "amx_emulated": {"avx2", "avxvnni"}}
    beside["amx"] = {"amx", "avx512vnni"}  # tiles of bytes where the machine has them
    assert torch.ops.moeq_C.cpu_integer_isa() in beside.get(isa, {"avx512", "avx512vnni"})


def test_sums_of_long_rows_stay_in_their_type(instructions: str) -> None:
    """Products of 255 and 127 leave int32 after 66,310 of them: 70,016 of one row, whose group is the row."""
    hidden, inter = 70_016, 16
    codes = {"w13": torch.full((1, 2 * inter, hidden), 127), "w2": torch.full((1, hidden, inter), 127)}
    raw = moe.RawWeights(
        scheme="int8",
        **{name: t.to(torch.int8) for name, t in codes.items()},
        **{f"{name}_scale": torch.full((1, t.shape[1], 1), 1e-6) for name, t in codes.items()},
        **{f"{name}_zero_point": torch.full((1, t.shape[1], 1), -128, dtype=torch.int8) for name, t in codes.items()},
    )
    given = (torch.ones(1, hidden), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    got, expected = (
        moe.fused_moe_routed(*given, moe.prepare(raw, act_format="int8", backend=backend))
        for backend in ("cpu", "reference")
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    assert expected[0, 0] > 0


@pytest.mark.parametrize("group_units", [1, 2, 4096, 4097, 9000])
def test_spans_cover_every_group_once(group_units: int, tmp_path: Path) -> None:
    library = host_library("spans_host.cpp", tmp_path)
    units = 20_001
    spans = torch.zeros(units, 3, dtype=torch.int64)
    count = library.spans(ctypes.c_int64(units), ctypes.c_int64(group_units), ctypes.c_void_p(spans.data_ptr()))
    assert count == library.number_of_spans(ctypes.c_int64(units), ctypes.c_int64(group_units))
    begin, end, group = spans[:count].unbind(-1)
    assert begin[0] == 0 and end[-1] == units and torch.equal(begin[1:], end[:-1])
    assert ((end - begin > 0) & (end - begin <= 4096)).all()
    assert torch.equal(begin // group_units, group) and torch.equal((end - 1) // group_units, group)
