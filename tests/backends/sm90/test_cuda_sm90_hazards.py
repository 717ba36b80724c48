"""The built CUDA extension: no kernel writes registers that a product in flight still reads (wgmma_hazards.py).

ptxas has been seen to do so where the code around `wgmma` branches, and runs do not show it for certain.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import wgmma_hazards

import torch_moe_ops

LIBRARY = Path(torch_moe_ops.__file__).parent / "_C_cuda.abi3.so"


@pytest.mark.slow
def test_no_operand_is_overwritten(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="CUDA's binary utilities come with Triton")
    if not LIBRARY.exists():
        pytest.skip("the CUDA extension is not built")
    kernels = wgmma_hazards.kernels(LIBRARY, tmp_path)
    assert any("PackedI" in name for name, _ in kernels)
    assert any("Nvfp4Format" in name for name, _ in kernels)
    for name, sass in kernels:
        assert not wgmma_hazards.find_hazards(sass), name


def test_branches_by_table_are_followed() -> None:
    sass = """
        /*0000*/ HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0010*/ BRXU UR4 -0x20 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
        /*0020*/ EXIT ;
.L_x_2:
        /*0030*/ MOV R5, R1 ;
        /*0040*/ EXIT ;
"""
    hazards = wgmma_hazards.find_hazards(sass)
    assert [hazard.address for hazard in hazards] == [0x30]
