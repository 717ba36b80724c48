"""The reader of machine code that finds arrivals which do not wait for loads before them, on small programs.

test_launch_order.py reads the built extension with it.
"""

from __future__ import annotations

import pytest
from early_releases import find_early_releases
from sass_order import faults_of

LOAD, SCALED = "LDS.64 R12, [R22+UR12+0x18000]", "FMUL R40, R24, R13"
ARRIVAL = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR9+0x18a28], RZ"


def program(*instructions: str) -> str:
    """What nvdisasm prints; a label is an instruction that ends in a colon."""
    lines, address = [], 0
    for text in (*instructions, "EXIT"):
        if text.endswith(":"):
            lines.append(text)
            continue
        lines.append(f"        /*{address:04x}*/                   {text} ;")
        address += 16
    return "\n".join(lines)


@pytest.mark.parametrize("load", (LOAD, "LDSM.16.M88.4 R12, [R82+0x8400]", "@P1 LDS R13, [R2]"))
def test_an_arrival_right_behind_a_load_is_found(load: str) -> None:
    (release,) = find_early_releases(program(load, ARRIVAL, SCALED))
    assert (release.address, release.load.instruction) == (0x10, load)


@pytest.mark.parametrize(
    "reader",
    (
        SCALED,  # of the second of two registers
        "HGMMA.64x8x16.F32 R24, R12, gdesc[UR36], R24, gsb0",
        "SHF.R.U32.HI R12, RZ, R3, R12",
        "IMAD.MOV.U32 R12, RZ, RZ, R40",  # which may write it only then
    ),
)
def test_who_reads_what_was_loaded_has_waited(reader: str) -> None:
    assert not find_early_releases(program(LOAD, reader, ARRIVAL))


def test_each_load_is_waited_for_by_itself() -> None:
    second = "LDS.64 R20, [R22+UR12+0x18020]"
    (release,) = find_early_releases(program(LOAD, second, SCALED, ARRIVAL))
    assert release.load.instruction == second


@pytest.mark.parametrize("between", ("LDS RZ, [RZ]", "LDG.E R12, desc[UR44][R16.64]"))
def test_other_loads_do_not_count(between: str) -> None:
    assert not find_early_releases(program(between, ARRIVAL))


def test_kernels_of_two_rings_are_left_out() -> None:
    sass = program("ACQBULK", LOAD, ARRIVAL)
    assert any("does not wait for LDS.64" in fault for fault in faults_of("gemm_kernelByteConfig", sass))
    assert not any("does not wait for LDS" in fault for fault in faults_of("gemm_kernelSlimConfig", sass))
