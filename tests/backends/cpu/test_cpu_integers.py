"""Integer weights times int8 activations: exact sums, and the same bits by whatever instructions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
import cpu_emulation as emulation
import cpu_problems
from cpu_cases import BF16, CASES, F32, build
from cpu_problems import Problem, assert_threads_do_not_show, distance

from torch_moe_ops.backends.cpu_panels import layout

isa = cpu_problems.isa  # the fixture

INTEGERS = tuple(
    name
    for name, case in CASES.items()
    if case["act_format"] == "int8" and case["scheme"] in ("int4", "mxint4", "int8")
)


@pytest.fixture(params=["avx512vnni", "avx512", "avxvnni", "avx2", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way to multiply integers that this machine has."""
    try:
        torch.ops.moeq_C.use_cpu_integer_isa(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield str(request.param)
    torch.ops.moeq_C.use_cpu_integer_isa("")


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
    arguments = problem.tokens(23, 2, BF16)
    got = problem.run(*arguments)
    torch.ops.moeq_C.use_cpu_integer_isa("portable")
    assert torch.equal(got, problem.run(*arguments))


@pytest.mark.parametrize("case", INTEGERS)
def test_bitwise_independent_of_batch_and_threads(instructions: str, case: str) -> None:
    problem = build(case, 192, 128)
    x, ids, weights = problem.tokens(41, 2, BF16)
    whole = problem.run(x, ids, weights)
    for count in (1, 2, 3, 8, 17):
        assert torch.equal(problem.run(x[:count], ids[:count], weights[:count]), whole[:count])
    order = torch.randperm(41, generator=problem.generator)
    assert torch.equal(problem.run(x[order], ids[order], weights[order]), whole[order])
    assert_threads_do_not_show(problem, (x, ids, weights), whole)


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
    assert torch.ops.moeq_C.cpu_integer_isa() in ("avx512vnni", "avx512", "avxvnni", "avx2", "portable")


def test_a_table_brings_its_own(isa: str) -> None:
    """Where instructions are asked for by name, integers are not multiplied by others."""
    beside = {"portable": {"portable"}, "avx2": {"avx2", "avxvnni"}, "amx_emulated": {"avx2", "avxvnni"}}
    assert torch.ops.moeq_C.cpu_integer_isa() in beside.get(isa, {"avx512", "avx512vnni"})
