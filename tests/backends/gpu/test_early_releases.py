"""The reader of machine code that finds arrivals which do not wait for loads before them: small programs, and compiled ones.

`make cuda-compile` reads every kernel of csrc/cuda/sm90 with it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import early_releases
import pytest
from early_releases import Accepted, find_early_releases
from paths import ROOT
from sass_code import disassembled, read_code, source_places
from sass_registers import is_read_later, predicates_written, read, written

LOAD, USE = "LDS.64 R12, [R22+UR12+0x18000]", "FMUL R40, R24, R13"
ARRIVAL = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR9+0x18a28], RZ"


def program(*lines: str, file: str = "") -> str:
    """What nvdisasm prints with -hex -gi, and "EXIT". A line may begin with "sb2 " (it reports on scoreboard 2), "wait2 "
    (it waits for that) or "name.cuh:12 " (where it comes from); a label ends in a colon."""
    text, address = [], 0
    for line in (*lines, "EXIT"):
        if line.endswith(":"):
            text.append(line)
            continue
        reports, waits = 7, 0
        while found := re.match(r"(?:sb(\d)|wait(\d)|(\w+\.cuh?):(\d+)) ", line):
            line = line[found.end() :]
            reports = int(found[1] or reports)
            waits |= 1 << int(found[2]) if found[2] else 0
            if found[3]:
                text.append(f'\t//## File "/csrc/{found[3]}", line {found[4]}')
        text.append(f"        /*{address:04x}*/                   {line} ;   /* 0x{0:016x} */")
        text.append(f"                                              /* 0x{waits << 52 | reports << 46:016x} */")
        address += 16
    return "\n".join(text)


@pytest.mark.parametrize("load", (LOAD, "LDSM.16.M88.4 R12, [R82+0x8400]", "@P1 LDS R13, [R2]"))
def test_an_arrival_right_behind_a_load_is_found(load: str) -> None:
    (release,) = find_early_releases(program(f"sb2 {load}", ARRIVAL, f"wait2 {USE}"))
    assert release.arrival.address == 0x10 and release.load.text in load
    assert "does not wait for 0x0 LDS" in str(release)


@pytest.mark.parametrize(
    "waits", (f"wait2 {USE}", "wait2 NOP", "DEPBAR.LE SB2, 0x0", "@P5 wait2 NOP".replace("@P5 ", ""))
)
def test_who_waits_for_its_scoreboard_has_it(waits: str) -> None:
    assert not find_early_releases(program(f"sb2 {LOAD}", waits, ARRIVAL, USE))


def test_an_arrival_may_wait_itself() -> None:
    assert not find_early_releases(program(f"sb2 {LOAD}", f"wait2 {ARRIVAL}", USE))


@pytest.mark.parametrize(
    "waits", ("wait3 NOP", "DEPBAR.LE SB2, 0x1", "@P1 DEPBAR.LE SB2, 0x0", "DEPBAR.LE SB3, 0x0", "FMUL R40, R24, R23")
)
def test_other_waits_do_not_count(waits: str) -> None:
    assert find_early_releases(program(f"sb2 {LOAD}", waits, ARRIVAL, USE))


def test_each_load_is_waited_for_by_itself() -> None:
    second = "LDS.64 R20, [R22+UR12+0x18020]"
    code = program(f"sb2 {LOAD}", f"sb3 {second}", f"wait2 {USE}", ARRIVAL, "wait3 FMUL R40, R24, R21")
    (release,) = find_early_releases(code)
    assert release.load.text == second


@pytest.mark.parametrize("next_one", (ARRIVAL, "sb1 LDS R30, [R2]", "sb1 SHFL.BFLY PT, R30, R39, 0x4, 0x1f"))
def test_a_load_that_reports_nothing_has_come_with_the_next_one(next_one: str) -> None:
    found = find_early_releases(program(LOAD, next_one, "wait1 NOP", ARRIVAL, USE))
    assert bool(found) == (next_one == ARRIVAL)


@pytest.mark.parametrize("other", ("sb2 LDG.E R12, desc[UR44][R16.64]", "sb2 LDS RZ, [RZ]"))
def test_other_loads_do_not_count(other: str) -> None:
    assert not find_early_releases(program(other, ARRIVAL, USE, "FMUL R40, R24, R12"))


# ---------------------------------------------------------------------------------------------------------------- paths


def test_a_path_around_the_wait() -> None:
    code = program(f"sb2 {LOAD}", "@P1 BRA `(.L_x_1)", "wait2 NOP", ".L_x_1:", ARRIVAL, USE)
    assert len(find_early_releases(code)) == 1


def test_a_load_of_the_turn_before() -> None:
    code = program(".L_x_1:", ARRIVAL, f"wait2 {USE}", f"sb2 {LOAD}", "@P1 BRA `(.L_x_1)")
    assert len(find_early_releases(code)) == 1


def test_predicates_exclude_nothing() -> None:
    """One lane arrives, and others have loaded."""
    assert find_early_releases(program(f"sb2 @P3 {LOAD}", "@P3 BRA `(.L_x_1)", ARRIVAL, ".L_x_1:", USE))


CALL, RETURN = "CALL.REL.NOINC `($k$f)", "RET.REL.NODEC R4 `(k)"


@pytest.mark.parametrize(
    ("caller", "callee"),
    (
        ((f"sb2 {LOAD}", CALL), (ARRIVAL, RETURN, USE)),
        ((CALL, ARRIVAL, USE), (f"sb2 {LOAD}", RETURN)),
        ((CALL, USE), (f"sb2 {LOAD}", ARRIVAL, RETURN)),
        ((f"sb2 {LOAD}", ARRIVAL, CALL), (USE, RETURN)),
    ),
)
def test_calls_are_followed(caller: tuple[str, ...], callee: tuple[str, ...]) -> None:
    used = caller if caller[-1] == USE else (*caller, USE)
    assert len(find_early_releases(program(*used, "EXIT", "$k$f:", *callee))) == 1
    assert not find_early_releases(program(*(used[0], "wait2 NOP", *used[1:]), "EXIT", "$k$f:", "wait2 NOP", RETURN))


def test_an_arrival_that_no_path_leads_to_is_no_answer() -> None:
    with pytest.raises(ValueError, match=r"no path leads to SYNCS\.ARRIVE"):
        find_early_releases(program("EXIT", ".L_x_1:", ARRIVAL))


def test_a_value_that_nobody_reads_may_come_late() -> None:
    assert not find_early_releases(program(f"sb2 {LOAD}", ARRIVAL, "MOV R12, R3", "MOV R13, R3", USE))
    assert find_early_releases(program(f"sb2 {LOAD}", ARRIVAL, "MOV R12, R3", "@P1 MOV R13, R3", USE))
    same = program(f"sb2 {LOAD}", ARRIVAL, "@P1 MOV R13, R3", f"@P1 {USE}")
    assert not find_early_releases(same)
    changed = program(f"sb2 {LOAD}", ARRIVAL, "@P1 MOV R13, R3", "ISETP.GE.AND P1, PT, R25, 0x28, PT", f"@P1 {USE}")
    assert find_early_releases(changed)
    assert not is_read_later(read_code(program("NOP", "@P1 MOV R13, R3", "@!P1 MOV R13, R3", USE)), 0, 13)


# ------------------------------------------------------------------------------------------------------------- accepted


def test_what_is_accepted_is_known_by_functions() -> None:
    async_cuh = (ROOT / "csrc/cuda/sm90/device/async.cuh").read_text().splitlines()
    line = next(
        number
        for number, text in enumerate(async_cuh, 1)
        if "mbarrier.arrive.shared" in text or "mbarrier_arrive(" in text
    )
    assert source_places.place_of("async.cuh", line).function == "barrier_arrive"
    (release,) = find_early_releases(program(f"sb2 {LOAD}", f"async.cuh:{line} {ARRIVAL}", USE))
    assert release.arrival.functions == ("barrier_arrive",) and release.load.functions == ()
    assert Accepted("barrier_arrive", "", "").covers(release) and not Accepted("", "barrier_arrive", "").covers(release)
    release = release._replace(load=release.arrival)
    assert Accepted("barrier_arrive", "barrier_arrive", "").covers(release)
    assert Accepted("barrier_arrive", "barrier_arrive: mbarrier", "").covers(release)
    assert not Accepted("barrier_arrive", "barrier_arrive: something else", "").covers(release)
    assert not Accepted("arrive", "barrier_arrive", "").covers(release)
    assert not Accepted("barrier_arrive", "barrier_arrive < consume", "").covers(release)


def test_places_are_compared_from_the_innermost_out() -> None:
    """What an outer function loads itself says nothing of what it calls."""
    scales = Path(ROOT / "csrc/cuda/sm90/w4a8/w4a8_kernel.cuh").read_text().splitlines()
    line = next(number for number, text in enumerate(scales, 1) if "shared.work[work_ring.slot]" in text)
    inner = "async.cuh:22 " + f"w4a8_kernel.cuh:{line} "
    (release,) = find_early_releases(program(f"{inner}sb2 {LOAD}", ARRIVAL, USE))
    assert release.load.functions == ("barrier_arrive", "consume")
    assert not Accepted("", "consume", "").covers(release)


def test_no_entry_says_what_another_does() -> None:
    entries = early_releases.accepted()
    for one in entries:
        for other in entries:
            same = other.arrival.startswith(one.arrival) and (
                not one.load or f"{other.load} < ".startswith(f"{one.load} < ")
            )
            assert one is other or not same, (one, other)


def test_accepted_functions_exist() -> None:
    text = "\n".join(file.read_text() for file in (ROOT / "csrc/cuda/sm90").rglob("*.cuh"))
    for entry in early_releases.accepted():
        assert entry.because
        for name in filter(None, f"{entry.arrival} < {entry.load}".split(" < ")):
            function, _, part = name.partition(": ")
            assert re.search(rf"\b{function}\(", text) and part in text, name


def test_a_release_that_no_entry_covers_is_a_fault() -> None:
    assert len(early_releases.faults(program(f"sb2 {LOAD}", ARRIVAL, USE))) == 1


# ---------------------------------------------------------------------------------------------------------- instructions


@pytest.mark.parametrize(
    ("text", "writes", "reads"),
    (
        (LOAD, {12, 13}, {22}),
        ("LDS.128 R8, [R8]", {8, 9, 10, 11}, {8}),
        ("STG.E.128 desc[UR12][R34.64+0x800], R28", set(), {34, 35, 28, 29, 30, 31}),
        ("IMAD.WIDE.U32 R18, R27, R34, R4", {18, 19}, {27, 28, 34, 35, 4, 5}),  # two of each: never too few
        ("IADD3 R34, P1, R34, R36, RZ", {34}, {34, 36}),
        ("ISETP.GE.AND P1, PT, R25, 0x28, PT", set(), {25}),
        ("SHFL.BFLY PT, R40, R39, 0x4, 0x1f", {40}, {39}),
        ("HGMMA.64x16x16.F32 R24, R12, gdesc[UR36], R24, gsb0", set(), {*range(12, 16), *range(24, 32)}),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", {4}, {4, 5, 6, 7, *range(8, 16)}),  # written: rather too few
        ("STSM.16.MT88.4 [R4], R24", set(), {4, 24, 25, 26, 27}),
        ("I2F.U64 R38, R28", {38}, {28, 29}),
        ("BREV R3, R4", {3}, {4}),
    ),
)
def test_registers(text: str, writes: set[int], reads: set[int]) -> None:
    assert (written(text), read(text)) == (writes, reads)


@pytest.mark.parametrize(
    ("text", "predicates"),
    (
        ("ISETP.GE.AND P1, P2, R25, 0x28, P3", {"P1", "P2"}),
        ("UISETP.GE.AND UP0, UPT, UR6, UR16, UPT", {"UP0", "UPT"}),
        ("PLOP3.LUT P2, PT, PT, PT, UP0, 0x80, 0x0", {"P2", "PT"}),
        ("IADD3 R34, P1, R34, R36, RZ", {"P1"}),
        ("SEL R34, R35, R36, P1", set()),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7+0x33860], R2", {"P0"}),
        ("SHFL.BFLY P3, R40, R39, 0x4, 0x1f", {"P3"}),
        (USE, set()),
    ),
)
def test_predicates(text: str, predicates: set[str]) -> None:
    assert predicates_written(text) - {"PT"} == predicates - {"PT"}


# ------------------------------------------------------------------------------------------------------------- compiled

SOURCE = """
#include "async.cuh"
using namespace moeq::sm90;
__global__ void kernel(float* out) {{
  __shared__ float values[1024];
  __shared__ uint64_t barrier;
  const uint32_t at = shared_address(&barrier);
  values[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  const float value = values[threadIdx.x ^ 1];
  barrier_arrive({barrier});
  out[threadIdx.x] = value;
}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("barrier", "early"),
    (("at", True), ("once_loaded(at, __float_as_uint(value))", False)),
    ids=("at once", "once loaded"),
)
def test_compiled_code(barrier: str, early: bool, tmp_path: Path) -> None:
    """Bits that nobody documents mean what they are taken for."""
    pytest.importorskip("triton", reason="CUDA's binary utilities come with Triton")
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source, compiled, folder = tmp_path / "kernel.cu", tmp_path / "kernel.o", tmp_path / "code"
    source.write_text(SOURCE.format(barrier=barrier))
    folder.mkdir()
    include = ROOT / "csrc/cuda/sm90/device"
    command = [nvcc, "-std=c++17", "-arch=sm_90a", "-lineinfo", f"-I{include}", "-c", str(source), "-o", str(compiled)]
    subprocess.run(command, check=True, timeout=300)
    ((_, sass),) = disassembled(compiled, folder, "-hex", "-gi")
    found = find_early_releases(sass)
    assert len(found) == early
    assert all("barrier_arrive" in release.arrival.functions for release in found)
