"""Every weight scheme and activation format of the C++ kernels, on every instruction set of this machine."""

from __future__ import annotations

from functools import cache

import cpu_emulation as emulation
import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
import cpu_problems
from cpu_cases import BF16, CASES, F32, build
from cpu_problems import Problem, assert_close_by_rows, distance

from torch_moe_ops.backends.cpu_panels import layout

isa = cpu_problems.isa  # the fixture

ANY_SIZE = ("fp8", "fp8_block", "int8")  # multiples of 8


@cache
def solved(case: str, hidden: int, inter: int, dtype: torch.dtype, tokens: int) -> tuple[Problem, list[Tensor], Tensor]:
    """A problem, its tokens and the emulation's answer, shared by all instruction sets."""
    problem = build(case, hidden, inter)
    problem.layer.w13_bias = problem.randn(4, 2 * inter)
    arguments = list(problem.tokens(tokens, 2, dtype))
    return problem, arguments, emulation.moe(problem.layer, *arguments)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("case", CASES)
def test_against_emulation(isa: str, case: str, dtype: torch.dtype) -> None:
    problem, arguments, want = solved(case, 192, 320, dtype, 19)
    assert_close_by_rows(problem.run(*arguments), want, 3e-6, 1e-2)


@pytest.mark.parametrize("sizes", [(8, 8), (136, 144), (264, 24)])
@pytest.mark.parametrize("case", [c for c in CASES if CASES[c]["scheme"] in ANY_SIZE and "group" not in CASES[c]])
def test_sizes_that_fill_no_panel_or_tile(isa: str, case: str, sizes: tuple[int, int]) -> None:
    problem, arguments, want = solved(case, *sizes, F32, 5)
    assert_close_by_rows(problem.run(*arguments), want, 3e-6, 3e-2)


@pytest.mark.parametrize("case", CASES)
def test_bitwise_independent_of_batch(isa: str, case: str) -> None:
    problem = build(case, 192, 128)
    x, ids, weights = problem.tokens(21, 2, BF16)
    whole = problem.run(x, ids, weights)
    for t in (0, 20):
        assert torch.equal(problem.run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])[0], whole[t])


def test_int8_products_are_summed_exactly(isa: str) -> None:
    """Sums beyond 2^24 in which every unit counts."""
    problem = build("int8-int8", 2048, 16, activation="identity_no_mul")
    layer = problem.layer
    layer.g1_alphas = layer.g2_alphas = None
    x = torch.full((1, 2048), 127.0)
    x[0, 1] = 1.0
    codes = torch.full((4, 16, 2048), 127, dtype=torch.int8)
    codes[:, :, 1] = torch.arange(16, dtype=torch.int8)
    problem.packed["w13"] = layout.pack_weight("int8", codes, False)
    problem.packed["w13_scale"] = layout.pack_scale("int8", torch.ones(4, 16, 1), False)
    layer.w13 = codes.double()
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    want = emulation.moe(layer, x, ids, weights)
    assert distance(problem.run(x, ids, weights), want) < 1e-6


@pytest.mark.parametrize("act_format", ["mxfp4", "mxfp8", "fp8", "int8", "fp8_block"])
def test_packed_hidden_states(isa: str, act_format: str) -> None:
    """Codes and scales from outside give what the same values give when they are quantized inside."""
    case = {"mxfp4": "mxfp4-mxfp4", "mxfp8": "mxfp8-mxfp8", "fp8": "fp8-fp8", "int8": "int8-int8"}
    problem = build(case.get(act_format, "fp8_block-fp8"), 256, 64)
    x, ids, weights = problem.tokens(6, 2, F32)
    inside = problem.run(x, ids, weights)
    if act_format.startswith("mx"):
        values = emulation.mx_rows(x, act_format).unflatten(-1, (-1, 32))
        largest = 6.0 if act_format == "mxfp4" else 448.0
        mantissa, exponent = torch.frexp(x.unflatten(-1, (-1, 32)).abs().amax(-1) / largest)
        power = exponent - (mantissa == 0.5).int()
        elements = (values / torch.exp2(power.double())[..., None]).flatten(-2)
        scale = (power + 127).to(torch.uint8)
        codes = elements.to(torch.float8_e4m3fn)
        if act_format == "mxfp4":
            index = (elements.abs()[..., None] == emulation.E2M1.double()).int().argmax(-1)
            nibbles = (index + 8 * torch.signbit(elements)).to(torch.uint8)
            codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    elif act_format == "fp8_block":
        pieces = [emulation.uniform_rows(piece, "fp8", None, 0) for piece in x.split(128, -1)]
        codes = torch.cat([piece for piece, _ in pieces], -1).to(torch.float8_e4m3fn)
        scale = torch.stack([factor for _, factor in pieces], -1)
    else:
        elements, scale = emulation.uniform_rows(x, act_format, None, 0)
        codes = elements.to(torch.float8_e4m3fn if act_format == "fp8" else torch.int8)
    assert torch.equal(problem.run(codes, ids, weights, F32, scale.contiguous()), inside)


@pytest.mark.parametrize("case", CASES)
def test_layout_is_undone(case: str) -> None:
    problem = build(case, 192, 320)
    for name, rows, k, gated in (("w13", 640, 192, True), ("w2", 192, 320, False)):
        again = problem.make(rows, k, gated)
        codes = layout.pack_weight(problem.scheme, again.codes, gated)
        back = layout.unpack_weight(problem.scheme, codes, rows, k, gated)
        assert torch.equal(back.view(torch.uint8), again.codes.view(torch.uint8)), name
        options = problem.options
        shapes = layout.packed_shapes(
            problem.scheme, 4, 192, 320, True, codes.dtype,
            None if again.scale is None else again.scale.dtype, int(options.get("group", 0)),
        )  # fmt: skip
        assert shapes[name] == (tuple(codes.shape), codes.dtype)
        for tensor in (again.scale, again.zero):
            if tensor is None:
                continue
            packed = layout.pack_scale(problem.scheme, tensor, gated)
            restored = layout.unpack_scale(problem.scheme, packed, rows, tensor.shape[2], gated)
            assert torch.equal(restored.view(torch.uint8), tensor.view(torch.uint8)), name
            assert packed.shape == shapes[f"{name}_scale"][0]


@pytest.mark.parametrize("element", ["e3m2", "e2m3"])
def test_fp6_codes_as_e4m3(element: str) -> None:
    codes = torch.arange(64, dtype=torch.uint8)
    table = torch.tensor(emulation.MX_ELEMENTS[f"mxfp6_{element}"][1])
    as_e4m3 = layout.fp6_to_e4m3(codes, element)
    values = as_e4m3.view(torch.float8_e4m3fn).float()
    assert torch.equal(values[:32], table) and torch.equal(values[32:], -table)
    assert torch.equal(layout.e4m3_to_fp6(as_e4m3, element), codes)
