"""What the scripts make of compute-sanitizer's logs: planted ones, in its words, with lines of the sources as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from modules_by_path import ROOT, load

racecheck_pairs = load("scripts/racecheck_pairs.py")
source_places = load("scripts/source_places.py")
ENTRIES = json.loads((ROOT / "scripts" / "racecheck_accepted.json").read_text())["accepted"]

FEW = (
    "void moeq::sm90::few::decode_few_kernel<moeq::sm90::Nvfp4Format, (moeq::sm90::few::Kind)1>(moeq::sm90::few::Args)"
)
OTHER = "void moeq::sm90::decode::decode_kernel<moeq::sm90::Nvfp4Format, (int)4>(moeq::sm90::decode::Args)"


def lines_of(place: str) -> list[tuple[str, int]]:
    """(file, line) of every line of csrc/cuda that a place of the list means."""
    name, _, part = place.partition(": ")
    found = []
    for file in sorted((ROOT / "csrc" / "cuda").rglob("*.cu*")):
        lines = file.read_text().splitlines()
        found += [
            (file.name, n)
            for n, line in enumerate(lines, 1)
            if part in line and source_places.function_at(lines, n) == name
        ]
    return found


def pairs_of_list() -> Iterator[tuple[dict, str, str]]:
    for entry in ENTRIES:
        yield from ((entry, write, read) for write in entry["writes"] for read in entry["reads"])


def access(kind: str, place: str, code: str = "moeq::sm90::few::inlined(int)") -> str:
    file, line = lines_of(place)[0]
    return f"{kind} access at {code}+0x6070 in {file}:{line}"


def log_of(*pairs: tuple[str, str], right: str = "2 results right", displayed: int | None = None) -> str:
    reports = [
        f"========= Error: Race reported between {one}\n=========     and {other} [560 hazards]\n========= "
        for one, other in pairs
    ]
    count = len(pairs) if displayed is None else displayed
    summary = f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"
    return "\n".join(["========= COMPUTE-SANITIZER", *reports, right, summary]) + "\n"


def report(folder: Path, log: str, code: int, tool: str = "racecheck") -> subprocess.CompletedProcess[str]:
    """scripts/sanitizer_report.sh on a process that prints this and ends with `code`."""
    (folder / "log").write_text(log)
    script = f'. scripts/sanitizer_report.sh; report {tool} decode-1:nvfp4 bash -c "cat {folder / "log"}; exit {code}"'
    env = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


SUMS = access("Write", ENTRIES[2]["writes"][0]), access("Read", ENTRIES[2]["reads"][0])


@pytest.mark.parametrize("place", sorted({p for e in ENTRIES for p in (*e["writes"], *e["reads"])}))
def test_places_of_the_list_are_in_the_sources(place: str) -> None:
    assert lines_of(place), f"no line of csrc/cuda is at {place!r}"


def test_every_pair_of_the_list_is_accepted(tmp_path: Path) -> None:
    pairs = [(access("Write", write), access("Read", read)) for _, write, read in pairs_of_list()]
    pairs += [(read, write) for write, read in pairs]
    done = report(tmp_path, log_of(*pairs), 3)
    assert done.returncode == 0, done.stdout + done.stderr
    for entry in ENTRIES:
        count = 2 * len(entry["writes"]) * len(entry["reads"])
        assert f"accepted: {entry['what']}, {count} times" in done.stdout


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        ((SUMS[0], access("Read", ENTRIES[4]["reads"][0])), "NOT ACCEPTED: Write leave_sums"),  # of two entries
        ((SUMS[0], SUMS[0]), "NOT ACCEPTED: Write leave_sums"),
        ((SUMS[0].replace("Write", "Read"), SUMS[1].replace("Read", "Write")), "NOT ACCEPTED: Read leave_sums"),
        ((SUMS[0], access("Read", "finish_unit: fixed.slots[entry.first + column]")), "finish_unit: const int slot"),
        ((access("Write", ENTRIES[2]["writes"][0], OTHER), SUMS[1]), "decode::decode_kernel"),  # in another kernel
        ((f"Write access at {FEW}+0x6070", f"Read access at {FEW}+0x1c30"), "build with MOEQ_LINEINFO=1"),
        ((SUMS[0], "Read access at at::native::f(int)+0x10 in Elsewhere.cuh:12"), "NOT ACCEPTED: Write leave_sums"),
    ],
)
def test_any_other_pair_is_an_error(tmp_path: Path, pair: tuple[str, str], text: str) -> None:
    done = report(tmp_path, log_of(SUMS, pair), 3)
    assert done.returncode == 3 and text in done.stdout, done.stdout + done.stderr
    assert "accepted: a unit's sums, 1 times" in done.stdout


def test_the_kernel_of_the_list_is_accepted_by_its_name(tmp_path: Path) -> None:
    place, other = ENTRIES[2]["writes"][0], ENTRIES[2]["reads"][0]
    done = report(tmp_path, log_of((access("Write", place, FEW), access("Read", other, FEW))), 3)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("log", "code", "text"),
    [
        (log_of(SUMS, displayed=2), 3, "racecheck counts 2 reports, the log has 1"),
        (log_of(SUMS).partition("========= RACECHECK")[0], 3, "the log has 0 summaries"),
        (log_of(SUMS) + "========= Warning: Maximum number of hazards reached.\n", 3, "more hazards than it keeps"),
        (log_of(SUMS, right="nvfp4: 0.3 off"), 3, "wrong or stopped"),
        (log_of(SUMS), 124, "exit status 124"),
        (log_of(), 1, "exit status 1"),
    ],
)
def test_a_log_that_proves_nothing_is_an_error(tmp_path: Path, log: str, code: int, text: str) -> None:
    done = report(tmp_path, log, code)
    assert done.returncode == code and text in done.stdout, done.stdout + done.stderr


DISASSEMBLY = """
.text._ZN1f:
\t//## File "a/decode_few_gemm.cuh", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "a/../b/decode_few_help.cuh", line 12 inlined at "a/x.cuh", line 3
        /*0010*/                   STS [R2], R1 ;
        /*6070*/                   STS [R2+0x4], R1 ;
.text._ZN1g:
        /*6070*/                   EXIT ;
"""


def test_lines_are_added_by_machine_code() -> None:
    module = load("scripts/racecheck_lines.py")
    found = module.lines_of(DISASSEMBLY.splitlines())
    assert found["_ZN1f"] == {
        0: "decode_few_gemm.cuh:7",
        0x10: "decode_few_help.cuh:12",
        0x6070: "decode_few_help.cuh:12",
    }
    assert found["_ZN1g"] == {}
    flag = "void f<(bool)1, (K)0>(A)"
    lines = {module.name_of("void f<true, (K)0>(A)"): found["_ZN1f"]}
    log = (
        f"= Race reported between Write access at {flag}+0x10\n"
        f"=     and Read access at [clone {flag}] g(int)+0x6070 [56 hazards]\n"
        "=     and Read access at other()+0x10 [2 hazards]\n"
    )
    assert module.with_lines(log, lines).splitlines() == [
        f"= Race reported between Write access at {flag}+0x10 in decode_few_help.cuh:12",
        f"=     and Read access at [clone {flag}] g(int)+0x6070 in decode_few_help.cuh:12 [56 hazards]",
        "=     and Read access at other()+0x10 [2 hazards]",
    ]


@pytest.mark.parametrize("tool", ["racecheck", "memcheck"])
def test_a_clean_log(tmp_path: Path, tool: str) -> None:
    done = report(tmp_path, log_of(), 0, tool)
    assert done.returncode == 0 and "accepted" not in done.stdout.lower()


def test_other_tools_accept_nothing(tmp_path: Path) -> None:
    assert report(tmp_path, log_of(SUMS), 3, "memcheck").returncode == 3
