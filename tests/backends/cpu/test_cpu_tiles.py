"""AMX: matrix tiles, by the hardware where it is there and emulated to the bit everywhere."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

pytest.importorskip("torch_moe_ops._C", reason="the C++ extension was not compiled")
import cpu_emulation as emulation
import cpu_problems
from cpu_cases import BF16, CASES, any_case, build
from cpu_problems import Problem, assert_close_by_rows, nvfp4

from torch_moe_ops.backends.cpu_panels import layout

TILED = ("amx", "amx_emulated")


@pytest.fixture(params=TILED)
def tiled(request: pytest.FixtureRequest) -> str:
    """Tiles of the hardware, and emulated ones."""
    return str(request.getfixturevalue("use_isa")(request.param))


@pytest.fixture
def use_isa() -> object:
    before = torch.ops.moeq_C.cpu_isa()

    def use(isa: str) -> str:
        reason = torch.ops.moeq_C.cpu_isa_refusal(isa)
        if reason:
            pytest.skip(f"no {isa} here: {reason}")
        torch.ops.moeq_C.use_cpu_isa(isa)
        return isa

    yield use
    torch.ops.moeq_C.use_cpu_isa(before)


def on(isa: str, problem: Problem, arguments: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    torch.ops.moeq_C.use_cpu_isa(isa)
    return problem.run(*arguments)


@pytest.mark.parametrize("case", ["none-bf16", "nvfp4-none", "nvfp4-nvfp4", *CASES])
@pytest.mark.parametrize("shift", [0, -118])  # products around the smallest normal number
def test_hardware_has_the_bits_of_the_emulation(case: str, shift: int, use_isa: object) -> None:
    """One description of TDPBF16PS, by which results can be reproduced anywhere."""
    use_isa("amx_emulated")  # type: ignore[operator]
    use_isa("amx")  # type: ignore[operator]
    problem = any_case(case, 192, 320)
    x, ids, weights = problem.tokens(70, 2, BF16)
    arguments = (x * 2.0**shift, ids, weights)
    assert torch.equal(on("amx", problem, arguments), on("amx_emulated", problem, arguments))


@pytest.mark.parametrize(
    "case", ["none-bf16", "nvfp4-none", "mxfp4-none", "int4-g64-f16", "int8-int8", "fp8_block-fp8"]
)
def test_every_number_of_rows_gives_the_same_bits(case: str, tiled: str) -> None:
    """Up to 32 rows of an expert stay in registers, up to 128 share a decoded tile, more are taken apart."""
    problem = any_case(case, 192, 64)
    x, _, _ = problem.tokens(150, 1, BF16)
    ids, weights = torch.zeros(150, 1, dtype=torch.int32), torch.ones(150, 1)
    whole = problem.run(x, ids, weights)
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 48, 127, 128, 129):
        got = problem.run(x[:count], ids[:count], weights[:count])
        assert torch.equal(got, whole[:count]), count


@pytest.mark.parametrize("case", ["nvfp4-none", "nvfp4-nvfp4", *CASES])
@pytest.mark.parametrize("shift", [0, -120])  # products around the smallest normal number
def test_a_single_row_has_the_bits_of_tiles(case: str, shift: int, tiled: str) -> None:
    """It is multiplied without tiles (tile_single.h), as TDPBF16PS adds and takes subnormal numbers."""
    hidden = 80 if case.startswith("nvfp4") else 192  # ends within a tile where the format has such sizes
    problem = any_case(case, hidden, 64, activation="identity_no_mul")
    x, _, _ = problem.tokens(20, 1, BF16)
    x *= 2.0**shift
    x[:, ::7] *= 2.0**-9  # some elements are subnormal then
    ids, weights = torch.ones(20, 1, dtype=torch.int32), torch.ones(20, 1)
    whole = problem.run(x, ids, weights)
    assert whole.isfinite().all()
    assert whole.any() or case.endswith("static")  # whose scale makes them zero
    for row in range(0, 20, 5):
        one = slice(row, row + 1)
        assert torch.equal(problem.run(x[one], ids[one], weights[one]), whole[one])


@pytest.mark.parametrize("sizes", [(16, 16), (48, 16), (80, 144), (2064, 48)])
@pytest.mark.parametrize("case", ["none-bf16", "nvfp4-none", "nvfp4-nvfp4"])
def test_sizes_that_end_within_a_tile(case: str, tiled: str, sizes: tuple[int, int]) -> None:
    problem = any_case(case, *sizes)
    arguments = problem.tokens(37, 2, BF16)
    want = emulation.moe(problem.layer, *arguments)
    assert_close_by_rows(problem.run(*arguments), want, 3e-6, 5e-2)


@pytest.mark.parametrize("exponent", [-120, -60, 0, 60, 110])
def test_nvfp4_rows_of_any_magnitude(tiled: str, exponent: int) -> None:
    """Weights lie in the tiles divided by 2^112: rows are brought to where no product is lost, and back, exactly."""
    problem = nvfp4(64, 16, activation="identity_no_mul")
    problem.layer.g1_alphas = torch.full((5,), 2.0**-8)
    x, ids, weights = problem.tokens(9, 2, BF16)
    x = x.sign() * x.abs().clamp(0.25, 4)
    plain = problem.run(x, ids, weights)
    scaled = x * 2.0**exponent
    if exponent < 0:  # else the intermediate would be subnormal
        problem.layer.g1_alphas = problem.layer.g1_alphas * 2.0**-exponent
        assert torch.equal(problem.run(scaled, ids, weights), plain)
    else:
        assert torch.equal(problem.run(scaled, ids, weights), plain * 2.0**exponent)


@pytest.mark.parametrize(
    ("scales", "shift"), [((84, 87, 90), -70), ((84, 87, 90), -30), ((164, 167, 170), 36), ((30, 127, 220), 0)]
)
@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8", "nvfp4"])
def test_a_single_row_where_shortcuts_end(tiled: str, scheme: str, scales: tuple[int, ...], shift: int) -> None:
    """Powers of two meet sums instead of weights, but for magnitudes that could leave the normal numbers so; the
    products of a value with all codes likewise."""
    problem = build(f"{scheme}-none", 192, 32, activation="identity_no_mul") if scheme != "nvfp4" else nvfp4(192, 32)
    if scheme != "nvfp4":
        scale = torch.tensor(scales, dtype=torch.uint8)[problem.integers(0, 3, 4, 32, 6)]
        problem.packed["w13_scale"] = layout.pack_scale(scheme, scale, False)
    x, _, _ = problem.tokens(24, 1, BF16)
    x *= 2.0 ** (shift + problem.integers(-4, 8, *x.shape))  # 2^-64 and 2^41 are the bounds
    ids, weights = torch.ones(24, 1, dtype=torch.int32), torch.ones(24, 1)
    whole = problem.run(x, ids, weights)
    assert whole.any()
    for row in range(24):
        one = slice(row, row + 1)
        assert torch.equal(problem.run(x[one], ids[one], weights[one]), whole[one])


@pytest.mark.parametrize(("scales", "shift"), [((0, 1, 2), 60), ((8, 10, 12), 50), ((244, 247, 250), -100)])
@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
def test_mx_scales_of_every_size(tiled: str, scheme: str, scales: tuple[int, ...], shift: int) -> None:
    """Weights below 2^-126 count as zero; all others are exact, however large or small their scale."""
    problem = build(f"{scheme}-none", 64, 32, activation="identity_no_mul")
    layer = problem.layer
    scale = torch.tensor(scales, dtype=torch.uint8)[problem.integers(0, 3, 4, 32, 2)]
    old = layout.unpack_scale(scheme, problem.packed["w13_scale"], 32, 2, False)
    problem.packed["w13_scale"] = layout.pack_scale(scheme, scale, False)
    w13 = layer.w13 * torch.exp2(scale.double() - old.double()).repeat_interleave(32, -1)
    layer.w13 = torch.where(w13.abs() < 2.0**-126, 0.0, w13)
    layer.g1_alphas = torch.full((4,), 2.0 ** (127 - scales[1] - shift) if shift > 0 else 2.0**-20)
    x, ids, weights = problem.tokens(9, 1, BF16)
    arguments = (x * 2.0**shift, ids, weights)
    assert_close_by_rows(problem.run(*arguments), emulation.moe(layer, *arguments), 3e-6, 1e-2)


def test_a_nan_row_stays_alone(tiled: str) -> None:
    problem = nvfp4(64, 48)
    x, ids, weights = problem.tokens(40, 2, BF16)
    clean = problem.run(x, ids, weights)
    x[4, 3], x[6] = math.nan, math.inf
    got = problem.run(x, ids, weights)
    rows = [r for r in range(40) if r not in (4, 6)]
    assert torch.equal(got[rows], clean[rows])
    assert not got[4].isfinite().any() and not got[6].isfinite().any()


def test_the_refusal_has_a_reason(use_isa: object) -> None:
    reason = torch.ops.moeq_C.cpu_isa_refusal("amx")
    if not reason:
        pytest.skip("this machine has AMX")
    assert cpu_problems.supported("amx") is False
    with pytest.raises(RuntimeError, match="must be an instruction set of this machine, got 'amx': "):
        torch.ops.moeq_C.use_cpu_isa("amx")


def test_tiles_are_the_default_where_the_system_grants_them() -> None:
    code = "import torch_moe_ops._C, torch; print(torch.ops.moeq_C.cpu_isa())"
    env = {name: value for name, value in os.environ.items() if name != "MOEQ_CPU_ISA"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert (run.stdout.strip() == "amx") == (torch.ops.moeq_C.cpu_isa_refusal("amx") == "")
