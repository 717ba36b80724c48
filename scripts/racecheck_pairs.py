"""Compares the pairs of accesses in a log of compute-sanitizer's racecheck with those that are accepted.

    python scripts/racecheck_pairs.py LOG

Prints how often each accepted pair was reported, and every other one; exit status 1 where there is another one, or
where the log may not have all. The kernels have to be built with MOEQ_LINEINFO=1, or scripts/racecheck_lines.py to add
the lines: a pair is known by the function and the text of its two lines (scripts/racecheck_accepted.json), not by their
numbers.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from source_places import Place, place_of

ACCEPTED = Path(__file__).with_name("racecheck_accepted.json")
_ACCESS = re.compile(
    r"(?P<kind>Read|Write) access at (?P<code>.+?\+0x[0-9a-f]+)"
    r"(?: in (?P<file>\S+?):(?P<line>\d+))?(?: \[\d+ hazards?\])?$"
)
_FIRST, _FURTHER = re.compile(r"^=+ \w+: Race reported between "), re.compile(r"^=+ +and ")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
_KERNEL = re.compile(r"\b(\w+_kernel)\b")


class Access(NamedTuple):
    """One side of a pair. place: empty where the log has no line of csrc/cuda."""

    kind: str
    code: str
    place: Place

    def __str__(self) -> str:
        return f"{self.kind} {': '.join(self.place) if self.place.text else 'somewhere'} ({self.code})"


Pair = tuple[Access, Access]


def access_of(text: str) -> Access:
    found = _ACCESS.search(text.rstrip())
    if found is None:
        raise ValueError(f"not an access as racecheck names it: {text!r}")
    return Access(found["kind"], found["code"], place_of(found["file"] or "", int(found["line"] or 0)))


def pairs_of(log: str) -> list[Pair]:
    """Every pair in the order of the log: racecheck names an access and then those that conflict with it."""
    pairs: list[Pair] = []
    first: Access | None = None
    for line in log.splitlines():
        if begin := _FIRST.match(line):
            first = access_of(line[begin.end() :])
        elif first is not None and (further := _FURTHER.match(line)):
            pairs.append((first, access_of(line[further.end() :])))
    return pairs


def accepted_as(pair: Pair, entries: list[dict[str, object]]) -> str | None:
    """What an entry calls the pair: a write and a read at its places, in its kernel where the log names one."""
    by_kind = {access.kind: access for access in pair}
    kernels = {name for access in pair for name in _KERNEL.findall(access.code)}
    if len(by_kind) != 2:
        return None
    for entry in entries:
        sides = (by_kind["Write"], entry["writes"]), (by_kind["Read"], entry["reads"])
        places = [any(access.place.is_at(where) for where in wheres) for access, wheres in sides]  # type: ignore[attr-defined]
        named = entry["kernel"]  # one or a list
        if all(places) and kernels <= set([named] if isinstance(named, str) else named):  # type: ignore[call-overload]
            return str(entry["what"])
    return None


def why_incomplete(log: str) -> str:
    """Why the log may not have every pair; empty where it has."""
    displayed = [int(count) for count in _SUMMARY.findall(log)]
    reported = sum(bool(_FIRST.match(line)) for line in log.splitlines())
    if len(displayed) != 1:
        return f"the log has {len(displayed)} summaries of racecheck, expected one"
    if displayed[0] != reported:
        return f"racecheck counts {displayed[0]} reports, the log has {reported}"
    if "Maximum number of hazards reached" in log:
        return "racecheck found more hazards than it keeps: NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS"
    return ""


def main(path: str) -> int:
    log = Path(path).read_text()
    entries = json.loads(ACCEPTED.read_text())["accepted"]
    known, others = Counter[str](), []
    for pair in pairs_of(log):
        name = accepted_as(pair, entries)
        if name is None:
            others.append(pair)
        else:
            known[name] += 1
    for name, count in sorted(known.items()):
        print(f"   accepted: {name}, {count} times")
    for one, other in others:
        print(f"   NOT ACCEPTED: {one}\n      and {other}")
    if any(not access.place.text for pair in others for access in pair):
        print("   some have no line of csrc/cuda: build with MOEQ_LINEINFO=1")
    incomplete = why_incomplete(log)
    if incomplete:
        print(f"   NOT ALL: {incomplete}")
    return bool(others or incomplete)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
