"""The C++ kernels against a step-by-step emulation of the contract, on every instruction set of this machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import cache

import cpu_emulation as emulation
import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
import cpu_problems
from cpu_problems import Problem, assert_close_by_rows, assert_threads_do_not_show, distance, nvfp4

from torch_moe_ops.backends.cpu_panels import layout

isa = cpu_problems.isa  # the fixture

SILU = (1.0, 0.0, math.inf)
ACTIVATIONS = {
    "silu": (1.0, 0.0, 0.5),
    "gelu": SILU,
    "gelu_tanh": SILU,
    "relu2": SILU,
    "swigluoai": (1.702, 1.0, 0.7),
    "swiglustep": (1.0, 0.0, 0.3),
    "situ": (4.0, 25.0, math.inf),
    "silu_no_mul": SILU,
    "gelu_no_mul": SILU,
    "relu2_no_mul": SILU,
    "identity_no_mul": SILU,
}


def gscales(problem: Problem, kind: str) -> None:
    layer = problem.layer
    if kind == "static":
        layer.a1_gscale, layer.a2_gscale = torch.tensor(700.0), torch.tensor(900.0)
    elif kind == "expert":
        layer.a1_gscale = 500.0 + 400.0 * problem.rand(problem.experts)
        layer.a2_gscale = 500.0 + 900.0 * problem.rand(problem.experts)
    if layer.a1_gscale is not None and layer.g1_alphas is not None and layer.g2_alphas is not None:
        layer.g1_alphas, layer.g2_alphas = layer.g1_alphas / 700.0, layer.g2_alphas / 700.0


@cache
def solved(kind: str, sizes: tuple[int, int], dtype: torch.dtype, tokens: int) -> tuple[Problem, list[Tensor], Tensor]:
    """An NVFP4 problem, its tokens and the emulation's answer, shared by all instruction sets."""
    problem = nvfp4(*sizes, act_format="none" if kind == "none" else "nvfp4")
    gscales(problem, kind)
    arguments = list(problem.tokens(tokens, 3, dtype))
    return problem, arguments, emulation.moe(problem.layer, *arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["static", "expert", "dynamic"])
@pytest.mark.parametrize("sizes", [(16, 16), (64, 176), (704, 48)])
def test_nvfp4_w4a4(isa: str, dtype: torch.dtype, kind: str, sizes: tuple[int, int]) -> None:
    problem, arguments, want = solved(kind, sizes, dtype, 33)
    got = problem.run(*arguments)
    assert_close_by_rows(got, want, 2e-6, 5e-2)
    assert distance(got, want) < 2e-3
    assert distance(problem.run(*arguments, dtype), want) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("sizes", [(16, 16), (64, 176), (704, 48)])
def test_nvfp4_w4a16(isa: str, dtype: torch.dtype, tokens: int, sizes: tuple[int, int]) -> None:
    problem, arguments, want = solved("none", sizes, dtype, tokens)
    assert_close_by_rows(problem.run(*arguments), want, 2e-6, 2e-6 if dtype == torch.float32 else 2e-3)


@cache
def unquantized(sizes: tuple[int, int], dtype: torch.dtype) -> tuple[Problem, list[Tensor], Tensor]:
    problem = Problem("none", 4, *sizes, weight_dtype=dtype)
    problem.layer.w13_bias = problem.randn(4, 2 * sizes[1])
    problem.layer.w2_bias = problem.randn(4, sizes[0])
    arguments = list(problem.tokens(9, 2, dtype))
    return problem, arguments, emulation.moe(problem.layer, *arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 1), (1, 7), (33, 50), (128, 17)])
def test_unquantized_any_size(isa: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    problem, arguments, want = unquantized(sizes, dtype)
    exact = dtype == torch.float32
    assert distance(problem.run(*arguments), want) < (2e-6 if exact else 1e-3)
    assert distance(problem.run(*arguments, dtype), want) < (2e-6 if exact else 4e-3)


@cache
def activated(activation: str, act_format: str) -> tuple[Problem, list[Tensor], Tensor]:
    problem = nvfp4(48, 80, act_format=act_format, activation=activation, constants=ACTIVATIONS[activation])
    layer, halves = problem.layer, 2 if problem.gated else 1
    layer.g1_alphas = problem.alphas(2) * torch.tensor([3.0, 0.5]) if problem.gated else problem.alphas(1)
    layer.w13_bias = problem.randn(5, halves * 80) * 0.3
    layer.w2_bias = problem.randn(5, 48) * 0.3
    arguments = list(problem.tokens(12, 2, torch.float32))
    return problem, arguments, emulation.moe(layer, *arguments)


@pytest.mark.parametrize("act_format", ["none", "nvfp4"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_biases_and_alphas_per_half(isa: str, activation: str, act_format: str) -> None:
    problem, arguments, want = activated(activation, act_format)
    assert_close_by_rows(problem.run(*arguments), want, 3e-6, 3e-6 if act_format == "none" else 2e-2)


@pytest.mark.parametrize("size", [1e-3, 1e-8, 1e-15])
def test_situ_of_tiny_numbers(isa: str, size: float) -> None:
    problem = Problem("none", 4, 64, 48, weight_dtype=torch.float32, activation="situ", constants=ACTIVATIONS["situ"])
    x, ids, weights = problem.tokens(9, 2, torch.float32)
    want = emulation.moe(problem.layer, x * size, ids, weights)
    assert 0 < want.abs().max() < size
    assert_close_by_rows(problem.run(x * size, ids, weights), want, 2e-6, 2e-6)


@pytest.mark.parametrize("sizes", [(2880, 720), (2304, 464), (176, 2880)])
def test_awkward_model_sizes(sizes: tuple[int, int]) -> None:
    problem = nvfp4(*sizes, experts=3, act_format="nvfp4")
    gscales(problem, "expert")
    x, ids, weights = problem.tokens(5, 2, torch.bfloat16)
    assert distance(problem.run(x, ids, weights), emulation.moe(problem.layer, x, ids, weights)) < 5e-4


def test_codes_on_exact_ties(isa: str) -> None:
    """Every block scale is a power of two, so that each tie of the code table is met exactly."""
    problem = nvfp4(64, 16, act_format="nvfp4", activation="identity_no_mul")
    problem.layer.a1_gscale = problem.layer.a2_gscale = torch.tensor(1.0)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    row = torch.cat((ties, -ties, torch.tensor([-0.0, 6.0])))
    x = torch.stack([torch.cat([row * 2.0**p for p in (0, 3, -3, -5)])] * 2)
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    want = emulation.moe(problem.layer, x, ids, weights)
    assert distance(problem.run(x, ids, weights), want) < 1e-6


def test_block_scale_underflow_and_zero_rows(isa: str) -> None:
    problem = nvfp4(64, 32, act_format="nvfp4")
    gscales(problem, "static")
    x = problem.randn(4, 64)
    x[0] = 0
    x[1, :16] = 6.0 * 2.0**-10 / 700.0 * 0.999  # scale at half of the smallest subnormal: lost by contract
    x[2, 16:32] *= 1e6  # saturates scale and codes
    ids, weights = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    got, want = problem.run(x, ids, weights), emulation.moe(problem.layer, x, ids, weights)
    for row in range(1, 4):
        assert distance(got[row], want[row]) < 1e-5, row
    assert torch.equal(got[0], torch.zeros(64))


def test_packed_hidden_states_are_taken_as_they_are(isa: str) -> None:
    problem = nvfp4(64, 48, act_format="nvfp4")
    gscales(problem, "static")
    codes = torch.randint(0, 256, (6, 32), generator=problem.generator, dtype=torch.uint8)
    scale = (problem.rand(6, 4) * 8).to(torch.float8_e4m3fn)
    _, ids, weights = problem.tokens(6, 2, torch.float32)
    values = emulation.decode_e2m1(codes) * scale.float().repeat_interleave(16, -1)
    want = torch.zeros(6, 64)
    layer = problem.layer
    assert layer.g1_alphas is not None and layer.g2_alphas is not None and layer.a2_gscale is not None
    for t in range(6):
        for j in range(2):
            e = int(ids[t, j])
            acc = (layer.w13[e].double() @ values[t].double()).float() * layer.g1_alphas[e]
            h = torch.nn.functional.silu(acc[:48]) * acc[48:]
            q, _ = emulation.nvfp4_rows(h[None], layer.a2_gscale)
            want[t] += weights[t, j] * (layer.w2[e].double() @ q[0].double()).float() * layer.g2_alphas[e]
    assert distance(problem.run(codes, ids, weights, torch.float32, scale), want) < 1e-3


@pytest.mark.parametrize("act_format", ["none", "nvfp4"])
def test_foreign_and_duplicate_ids(isa: str, act_format: str) -> None:
    problem = nvfp4(64, 48, act_format=act_format, offset=10)
    x, ids, weights = problem.tokens(7, 4, torch.float32)
    ids[0] = torch.tensor([-1, 9, 15, 2**31 - 1])
    ids[1] = torch.tensor([12, 12, -(2**31), 12])
    ids[2, 0] = -1
    got, want = problem.run(x, ids, weights), emulation.moe(problem.layer, x, ids, weights)
    assert torch.equal(got[0], torch.zeros(64))
    assert distance(got[1:], want[1:]) < 1e-3


@pytest.mark.parametrize("act_format", ["none", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router_weight_on_input(isa: str, act_format: str, dtype: torch.dtype) -> None:
    problem = nvfp4(64, 48, act_format=act_format, weight_on_input=True)
    x, ids, weights = problem.tokens(9, 1, dtype)
    assert distance(problem.run(x, ids, weights), emulation.moe(problem.layer, x, ids, weights)) < 1e-3


def test_no_tokens(isa: str) -> None:
    problem = nvfp4(64, 48)
    x, ids, weights = problem.tokens(0, 2, torch.bfloat16)
    assert problem.run(x, ids, weights).shape == (0, 64)


@pytest.mark.parametrize("act_format", ["none", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bitwise_independent_of_batch_and_threads(isa: str, act_format: str, dtype: torch.dtype) -> None:
    problem = nvfp4(96, 80, experts=3, act_format=act_format)
    x, ids, weights = problem.tokens(41, 2, dtype)
    whole = problem.run(x, ids, weights)
    for t in (0, 5, 40):
        assert torch.equal(problem.run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])[0], whole[t])
    order = torch.randperm(41, generator=problem.generator)
    assert torch.equal(problem.run(x[order], ids[order], weights[order]), whole[order])
    assert_threads_do_not_show(problem, (x, ids, weights), whole)


def test_chunks_of_tokens_do_not_show(isa: str) -> None:
    """More tokens than one chunk of the driver holds."""
    problem = nvfp4(16, 16, act_format="nvfp4")
    x, ids, weights = problem.tokens(1500, 2, torch.bfloat16)
    whole = problem.run(x, ids, weights)
    parts = [problem.run(x[i : i + 500], ids[i : i + 500], weights[i : i + 500]) for i in (0, 500, 1000)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("act_format", ["none", "nvfp4"])
def test_a_nan_row_stays_alone(isa: str, act_format: str) -> None:
    problem = nvfp4(64, 48, act_format=act_format)
    x, ids, weights = problem.tokens(9, 2, torch.float32)
    clean = problem.run(x, ids, weights)
    x[4, 3], x[6] = math.nan, math.inf
    got = problem.run(x, ids, weights)
    rows = [r for r in range(9) if r not in (4, 6)]
    assert torch.equal(got[rows], clean[rows])
    assert got[4].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_rounds_once_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    problem = nvfp4(64, 48)
    x, ids, weights = problem.tokens(17, 2, torch.float32)
    weights[3] *= 1e-7  # half subnormals
    weights[5] *= 1e9  # beyond half
    assert torch.equal(problem.run(x, ids, weights, dtype), problem.run(x, ids, weights).to(dtype))


def test_layout_round_trip_and_shapes() -> None:
    for scheme, dtype, pack in (
        ("nvfp4", torch.uint8, 2),
        ("none", torch.bfloat16, 1),
        ("none", torch.float16, 1),
        ("none", torch.float32, 1),
    ):
        hidden, inter = (48, 80) if pack == 2 else (37, 19)
        generator = torch.Generator().manual_seed(1)
        for gated in (True, False):
            n = 2 * inter if gated else inter
            raw = torch.randint(0, 256, (3, n, hidden // pack * dtype.itemsize), generator=generator, dtype=torch.uint8)
            raw = raw.view(dtype)
            packed = layout.pack_weight(scheme, raw, gated)
            assert (tuple(packed.shape), packed.dtype) == layout.packed_shapes(scheme, 3, hidden, inter, gated, dtype)[
                "w13"
            ]
            back = layout.unpack_weight(scheme, packed, n, hidden, gated)
            assert torch.equal(back.view(torch.uint8), raw.view(torch.uint8))
            w2 = layout.packed_shapes(scheme, 3, hidden, inter, gated, dtype)["w2"][0]
            assert layout.intermediate_size_of(scheme, w2) == -(-inter // 16) * 16


def test_isa_from_the_environment() -> None:
    code = "import torch_moe_ops._C, torch; print(torch.ops.moeq_C.cpu_isa())"
    for value, expected in (("portable", "portable"), ("", torch.ops.moeq_C.cpu_isa()), ("sse9", None)):
        run = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "MOEQ_CPU_ISA": value}, capture_output=True, text=True
        )
        if expected is None:
            assert run.returncode != 0 and "MOEQ_CPU_ISA must be one of" in run.stderr
        else:
            assert run.stdout.strip() == expected, run.stderr


def test_bad_shapes_are_refused_before_memory_is_read() -> None:
    problem = nvfp4(64, 48)
    x, ids, weights = problem.tokens(3, 2, torch.bfloat16)
    problem.packed["w13"] = problem.packed["w13"][:, :-1].contiguous()
    with pytest.raises(RuntimeError, match="moeq::experts: "):
        problem.run(x, ids, weights)
