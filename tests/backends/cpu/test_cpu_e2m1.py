"""NVFP4 times NVFP4 and MXFP4 times MXFP4 as products of integers: the stated order, by whatever instructions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
import cpu_emulation as emulation
import cpu_problems
from cpu_cases import BF16, F32, any_case
from cpu_problems import Problem, assert_batch_and_threads_do_not_show, assert_instructions_do_not_show, integers_by

import torch_moe_ops as moe
from torch_moe_ops.backends.cpu_panels import layout

isa = cpu_problems.isa  # the fixture
CASES = ("nvfp4-nvfp4", "mxfp4-mxfp4")
BLOCK = {"nvfp4": 16, "mxfp4": 32}


@pytest.fixture(params=["avx512vnni", "avx512", "avxvnni", "avx2", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way to multiply integers that this machine has."""
    yield from integers_by(request.param)


def operands(x: Tensor, scheme: str, gscale: Tensor | None) -> tuple[Tensor, Tensor]:
    if scheme == "nvfp4":
        return emulation.nvfp4_rows(x, gscale)
    return emulation.mx_rows(x, scheme), torch.ones(x.shape[0])


def linear(x: Tensor, problem: Problem, name: str, alpha: Tensor, gscale: Tensor | None = None) -> Tensor:
    """Rows of expert 0 through w13 or w2: sums of blocks are exact, and join in ascending order, rounded each time."""
    values, factor = operands(x, problem.scheme, gscale)
    products = values.double()[:, None] * getattr(problem.layer, name)[0].double()[None]
    sums = products.unflatten(-1, (-1, BLOCK[problem.scheme])).sum(-1)
    assert torch.equal(sums.float().double(), sums)
    acc = torch.zeros(sums.shape[:2])
    for block in range(sums.shape[-1]):
        acc = acc + sums[..., block].float()
    return acc * (alpha * factor)[:, None]


def of_one_expert(case: str, tokens: int) -> tuple[Problem, tuple[Tensor, Tensor, Tensor]]:
    problem = any_case(case, 192, 320, activation="identity_no_mul")
    problem.layer.g1_alphas = problem.layer.g2_alphas = torch.full((4,), 0.25)
    x, _, _ = problem.tokens(tokens, 1, F32)
    return problem, (x, torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_bits_are_those_of_the_stated_order(isa: str, case: str, tokens: int) -> None:
    problem, arguments = of_one_expert(case, tokens)
    h = linear(arguments[0], problem, "w13", torch.tensor(0.25))
    assert torch.equal(problem.run(*arguments), linear(h, problem, "w2", torch.tensor(0.25)))


def test_a_calibrated_scale(isa: str) -> None:
    problem, arguments = of_one_expert("nvfp4-nvfp4", 5)
    gscale = problem.layer.a1_gscale = problem.layer.a2_gscale = torch.tensor(700.0)
    h = linear(arguments[0], problem, "w13", torch.tensor(0.25), gscale)
    assert torch.equal(problem.run(*arguments), linear(h, problem, "w2", torch.tensor(0.25), gscale))


@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_has_the_same_bits(instructions: str, case: str) -> None:
    problem = any_case(case, 192, 320)
    assert_instructions_do_not_show(problem, problem.tokens(23, 2, BF16))


@pytest.mark.parametrize("case", CASES)
def test_bitwise_independent_of_batch_and_threads(instructions: str, case: str) -> None:
    assert_batch_and_threads_do_not_show(any_case(case, 192, 128))


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_largest_products(instructions: str, case: str, sign: float) -> None:
    """Every product is as large as it can be, of one sign: sums of 16 bits hold a block of them, offset included."""
    problem, (x, ids, weights) = of_one_expert(case, 5)
    scheme, layer = problem.scheme, problem.layer
    codes = torch.full((4, 320, 96), 0x77 if sign > 0 else 0xFF, dtype=torch.uint8)
    problem.packed["w13"] = layout.pack_weight(scheme, codes, False)
    problem.packed["w13_scale"] = torch.full_like(problem.packed["w13_scale"].view(torch.uint8), 119).view(
        problem.packed["w13_scale"].dtype
    )
    scale = 240.0 if scheme == "nvfp4" else 2.0**-8
    layer.w13 = torch.full((4, 320, 192), sign * 6.0 * scale, dtype=torch.float64)
    x = torch.full_like(x, 6.0)
    x[1::2] = -6.0
    h = linear(x, problem, "w13", torch.tensor(0.25))
    assert torch.equal(problem.run(x, ids, weights), linear(h, problem, "w2", torch.tensor(0.25)))
    assert h[0, 0].sign() == sign and h[1, 0].sign() == -sign


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_no_integer_holds_is_not_lost(isa: str, case: str, value: float) -> None:
    """A value without a number stays one, in its token alone; so does a block of MX that overflows float32."""
    problem = any_case(case, 192, 64)
    x, ids, weights = problem.tokens(9, 2, F32)
    clean = problem.run(x, ids, weights)
    x[4, 40] = value
    got = problem.run(x, ids, weights)
    others = torch.arange(9) != 4
    assert torch.equal(got[others], clean[others])
    assert (case == "nvfp4-nvfp4" and value == 3e38) or not got[4].isfinite().any()


def test_values_of_mx_blocks_below_normal_floats_are_zero(isa: str) -> None:
    problem, (x, ids, weights) = of_one_expert("mxfp4-mxfp4", 3)
    x = x.clamp(-6, 6) * 2.0**-126
    problem.layer.g1_alphas = torch.full((4,), 2.0**120)
    want = emulation.mx_rows(x, "mxfp4").float()
    zeros = torch.where(want.abs() < 2.0**-126, 0.0, want)
    assert not torch.equal(zeros, want)
    assert torch.equal(problem.run(x, ids, weights), problem.run(zeros, ids, weights))


def test_no_instruction_set_takes_them_in_bfloat16(isa: str) -> None:
    """Which would give the same bits, later, but where a product is subnormal: AVX-512 BF16 and tiles lose it."""
    problem, (x, ids, weights) = of_one_expert("mxfp4-mxfp4", 3)
    problem.layer.g1_alphas = torch.full((4,), 2.0**120)
    x = x.sign() * 2.0**-126  # a normal operand, and half of it is none
    h = linear(x, problem, "w13", torch.tensor(2.0**120))
    assert torch.equal(problem.run(x, ids, weights), linear(h, problem, "w2", torch.tensor(0.25)))


@pytest.mark.parametrize(
    ("scheme", "act_format", "integers"),
    [("nvfp4", "nvfp4", True), ("mxfp4", "mxfp4", True), ("nvfp4", "none", False), ("mxfp4", "mxfp8", False)],
)
def test_explain_names_the_instructions(isa: str, scheme: str, act_format: str, integers: bool) -> None:
    w13, w2 = torch.randn(2, 64, 64), torch.randn(2, 64, 32)
    said = str(moe.explain(moe.quantize_experts(w13, w2, scheme), act_format=act_format, device="cpu"))
    assert f"kernels: {isa}" in said
    assert (f"products of integers: {torch.ops.moeq_C.cpu_integer_isa()}" in said) == integers
