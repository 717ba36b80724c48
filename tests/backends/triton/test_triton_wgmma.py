"""No kernel writes registers that a tensor core may still be reading, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_programs import words_of
from wgmma_hazards import find_hazards

pytest.importorskip("triton")

# A step of K that ends with a product in flight (1) and one that waits (0).
_LOOP = """
        /*0000*/                   PREEXIT ;
.L_x_0:
        /*0010*/                   {first} ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0050*/              @!P0 BRA `(.L_x_0) ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   MOV R32, RZ ;
        /*0080*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("first", "left", "count"),
    [
        ("LDS.64 R34, [R2]", "0x1", 1),
        ("@P1 IMAD.MOV.U32 R35, RZ, RZ, 0x43004300", "0x1", 1),
        ("LDS.128 R29, [R2]", "0x1", 1),
        ("LDS.64 R34, [R2]", "0x0", 0),
        ("LDS.64 R36, [R2]", "0x1", 0),
        ("STS.64 [R2], R34", "0x1", 0),
    ],
)
def test_the_scanner(first: str, left: str, count: int) -> None:
    hazards = find_hazards(_LOOP.format(first=first, left=left))
    assert [hazard.address for hazard in hazards] == [0x10] * count


# 300 tokens: two warpgroups a program; there int8 gave wrong results on an H200 before a step of K waited.
CASES = [("int8", 300)]
MORE = [("int8", 9), ("mxint4", 9), ("mxint4", 300), ("nvfp4", 9), ("nvfp4", 300), ("mxfp4", 9), ("fp8", 300)]


@pytest.mark.parametrize(("scheme", "tokens"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE])
def test_kernels(scheme: str, tokens: int, tmp_path: Path) -> None:
    lines = words_of("triton_wgmma.py", tmp_path, scheme, tokens, tmp_path)
    assert [line[0] for line in lines] == ["gemm1_kernel", "gemm2_kernel"]
    for name, products, left, hazards, *first in lines:
        assert int(products) > 0, f"{name}: no operand in registers: the test shows nothing"
        assert left == "0", f"{name}: a step of K ends with {left} products in flight"
        assert hazards == "0", f"{name}: {hazards} registers written under a product: {' '.join(first)}"
