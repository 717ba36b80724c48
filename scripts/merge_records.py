"""Makes one record of a folder of test outcomes (tests/support/recording.py), for tests/records.

    python scripts/merge_records.py FOLDER [--out tests/records/NAME.json] [--without TESTS... --because TEXT]

NAME: the device by default. The last outcome of a test counts. Runs of other contents, devices or versions than the
last one are refused: a record speaks of one state. A run that knew no commit (no git there) is given that of this
tree, where the contents that the backends depend on are the same.

--without leaves out tests whose names begin so, as if they had not run: tests that were wrong themselves, or are of
something else than backends. The record and the page made of it say so, with their outcomes and why.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FORMAT = 1
SAME = ("digests", "device", "capability", "cpu_isa", "versions")  # in all runs of a record
OUTCOMES = ("passed", "failed", "skipped")
_ROW = ("backend", "scheme", "act_format", "weight_policy", "where")

Line = dict[str, Any]


def read_folder(folder: Path) -> tuple[Line, list[Line]]:
    """What its runs are about, and the lines of all runs. ValueError where they are about different things."""
    abouts, lines = [], []
    for file in sorted(folder.glob("**/outcomes-*.jsonl")):
        first, *rest = (json.loads(line) for line in file.read_text().splitlines())
        abouts.append((file.name, first["about"]))
        lines += rest
    if not abouts:
        raise ValueError(f"{folder} holds no outcomes-*.jsonl")
    last = abouts[-1][1]
    for name, about in abouts:
        differing = [key for key in SAME if about[key] != last[key]]
        if differing:
            raise ValueError(f"{name} differs from the last run of {folder} in {differing}: one record, one state")
    commits = {about["commit"] for _, about in abouts} - {None}
    if len(commits) > 1:
        raise ValueError(f"the runs of {folder} are of different commits: {sorted(commits)}")
    required = sorted({name for _, about in abouts for name in about["required"]})  # of all runs together
    return last | {"commit": commits.pop() if commits else None, "required": required}, lines


def outcomes(lines: Iterable[Line]) -> dict[str, Line]:
    """Test -> its last outcome, with all that it ran. A test that passed and then failed in its teardown failed."""
    found: dict[str, Line] = {}
    for line in lines:
        before = found.get(line["test"])
        if line["when"] == "teardown" and before is not None:
            line = {**line, "ran": before["ran"] + line["ran"]}
        found[line["test"]] = line
    return found


def rows(found: dict[str, Line]) -> list[Line]:
    """Counts for every kind of call that some test made."""
    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for line in found.values():
        for ran in {tuple(r) for r in line["ran"]}:
            counts[ran][line["outcome"]] += 1
    return [dict(zip(_ROW, ran, strict=True)) | _counted(counts[ran]) for ran in sorted(counts)]


def _left_out(everything: dict[str, Line], without: tuple[str, ...], because: str) -> Line:
    if not because:
        raise ValueError("--without needs --because")
    outcomes = Counter(line["outcome"] for test, line in everything.items() if test.startswith(without))
    return {"left_out": {"tests": sorted(without), "because": because, **_counted(outcomes)}}


def _counted(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in OUTCOMES}


def in_graph(folder: Path) -> list[Line]:
    """The cells of the in-graph matrix, a line for each layer and number of tokens; what was wrong by name."""
    cells: dict[tuple[Any, ...], Line] = {}
    read = [json.loads(line) for f in folder.glob("**/in_graph-*.jsonl") for line in f.read_text().splitlines()]
    key = ("backend", "chosen", "scheme", "act_format", "input_scale", "weight_policy", "tokens")
    for cell in sorted(read, key=lambda c: c["time"]):
        cells[tuple(cell[k] for k in (*key, "form", "front"))] = cell
    groups: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for cell in cells.values():
        groups[tuple(cell[k] for k in key)].append(cell)
    merged = []
    for group, members in sorted(groups.items()):
        line = dict(zip(key, group, strict=True)) | {"cells": len(members)}
        line |= {name: sum(c[name] for c in members) for name in ("replays", "right", "repeated", "like_eager")}
        line |= {"worst": round(max(c["worst"] for c in members), 6), "bound": round(members[0]["bound"], 6)}
        wrong = sorted(f"{c['form']} behind {c['front']}" for c in members if not _all_right(c))
        merged.append(line | ({"wrong": wrong} if wrong else {}))
    return merged


def _all_right(cell: Line) -> bool:
    return bool(cell["replays"] == cell["right"] == cell["repeated"] == cell["like_eager"])


def record(
    folder: Path,
    head: str | None = None,
    now: dict[str, str] | None = None,
    without: tuple[str, ...] = (),
    because: str = "",
) -> Line:
    """The record of a folder. head, now: this tree's commit and digests, for runs that knew no commit."""
    about, lines = read_folder(folder)
    if about["commit"] is None:
        if head is None:
            raise ValueError(f"no run of {folder} knew its commit, and this tree has changes that are not committed")
        if now != about["digests"]:
            raise ValueError(f"no run of {folder} knew its commit, and the contents of this tree are others")
        about["commit"] = head
    everything = outcomes(lines)
    found = {test: line for test, line in everything.items() if not without or not test.startswith(without)}
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for test, line in found.items():
        by_file[test.split("::")[0]][line["outcome"]] += 1
    skipped = Counter(line.get("why", "") for line in found.values() if line["outcome"] == "skipped")
    return {
        "format": FORMAT,
        **about,
        "totals": _counted(Counter(line["outcome"] for line in found.values())),
        "seconds": round(sum(line["seconds"] for line in found.values())),
        "files": {file: _counted(counts) for file, counts in sorted(by_file.items())},
        "failed": sorted(test for test, line in found.items() if line["outcome"] == "failed"),
        "skipped": dict(sorted(skipped.items())),
        **(_left_out(everything, without, because) if without else {}),
        # Tests register backends of their own.
        "rows": [row for row in rows(found) if row["backend"] in about["digests"]],
        "in_graph": in_graph(folder),
    }


def missing(made: Line) -> list[str]:
    """Required backends that no passed test ran: a record without them is not what was asked for."""
    ran = {row["backend"] for row in made["rows"] if row["passed"]}
    return [name for name in made["required"] if name not in ran]


def text_of(made: Line) -> str:
    """JSON with a line for each row, so that two records can be compared."""
    lists = {name: made[name] for name in ("rows", "in_graph")}
    text = json.dumps({**made, **{name: [] for name in lists}}, indent=1)
    for name, members in lists.items():
        body = ",\n".join(f"  {json.dumps(member)}" for member in members)
        text = text.replace(f'"{name}": []', f'"{name}": [\n{body}\n ]' if body else f'"{name}": []')
    return text + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--without", nargs="+", default=[])
    parser.add_argument("--because", default="")
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests" / "support")]
    from backend_digests import digests
    from recording import commit

    try:
        made = record(arguments.folder, commit(), digests(), tuple(arguments.without), arguments.because)
    except ValueError as error:
        raise SystemExit(f"merge_records: {error}") from None
    name = made["device"] if made["capability"] else f"{made['device']}-{made['cpu_isa']}"
    out = arguments.out or ROOT / "tests" / "records" / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text_of(made))
    print(f"{out}: {made['totals']}, {len(made['in_graph'])} lines of the in-graph matrix")
    for name in missing(made):
        print(f"required, but no passed test ran it: {name}")
    raise SystemExit(bool(made["failed"] or missing(made)))


if __name__ == "__main__":
    main()
