"""Writes docs/support.md, its summary in the README, and backends/tested.json of the package, from records of runs.

    python scripts/support_table.py [--write]

A cell says of each backend that runs a format on a kind of device what tests/records has of it: "tested" (tests
passed there, and nothing that the backend depends on has changed since: scripts/backend_digests.py), "tested at
COMMIT, changed since", how many tests failed, "by contract" (passed against a simulator of the kernel's interface), or
"not run".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from backend_digests import digests  # noqa: E402

from torch_moe_ops.backends import BACKENDS  # noqa: E402
from torch_moe_ops.backends.tested import FILE, where_of  # noqa: E402
from torch_moe_ops.core.problem import Problem  # noqa: E402
from torch_moe_ops.core.schemes import SCHEMES, Scheme  # noqa: E402

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "support.md"
RECORDS = ROOT / "tests" / "records"
BEGIN, END = "<!-- support table: made by scripts/support_table.py -->", "<!-- end of the support table -->"
Record = dict[str, Any]

# Column: device type and compute capability.
DEVICES: dict[str, tuple[str, tuple[int, int] | None]] = {
    "CPU": ("cpu", None),
    "Ampere (SM80)": ("cuda", (8, 0)),
    "Hopper (SM90)": ("cuda", (9, 0)),
    "Blackwell (SM100)": ("cuda", (10, 0)),
}
SIZES = {"num_experts": 8, "hidden_size": 1024, "intermediate_size": 1024}


def read_records(folder: Path = RECORDS) -> list[Record]:
    """Of every device, in the order of their names."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


_UNQUANTIZED = "unquantized"


def _problem(scheme: Scheme, act_format: str, device: str, capability: tuple[int, int] | None) -> Problem:
    scale = "tensor" if act_format in scheme.static_acts else "none"  # calibrated, as published checkpoints are
    at = {"device": device, "capability": capability, "input_scale": scale}
    return Problem(scheme.name, act_format=act_format, **at, **SIZES)  # type: ignore[arg-type]


def _problems(scheme: Scheme, act_format: str, device: str, capability: tuple[int, int] | None) -> list[Problem]:
    """The same under every weight policy."""
    problem = _problem(scheme, act_format, device, capability)
    return [dataclasses.replace(problem, weight_policy=policy) for policy in ("exact", "packed", "folded")]


def _trust(said: str) -> int:
    """Orders what is said of formats: a scheme is as good as the least of its own."""
    order = ("failed", "not run", "changed since", "by contract", "tested")
    return next(i for i, words in enumerate(order) if words in said)


class Table:
    """What records say of backends whose contents now have the given digests."""

    def __init__(self, records: list[Record], now: dict[str, str]):
        self.records, self.now = records, now

    def status(self, backend: str, scheme: str, act_format: str, where: str) -> str:
        """Of one backend in one cell. where: as tests/support/attribution.py names devices."""
        for place, passed in ((where, "tested"), ("simulator", "by contract")):
            counted = [(record, self._counts(record, backend, scheme, act_format, place)) for record in self.records]
            known = [(record, counts) for record, counts in counted if counts["passed"] + counts["failed"]]
            if known:
                record, counts = self._foremost(known, backend)
                return self._said(record, backend, counts, passed)
        return "not run"

    def _foremost(self, known: list[tuple[Record, Counter[str]]], backend: str) -> tuple[Record, Counter[str]]:
        """Of several records the one to go by: of the contents as they are, a failure first; else the newest."""
        newest_first = sorted(known, key=lambda one: one[0]["date"], reverse=True)
        current = [one for one in newest_first if not self.changed(one[0], backend)]
        failed = [one for one in current if one[1]["failed"]]
        return (failed or current or newest_first)[0]

    def _counts(self, record: Record, backend: str, scheme: str, act_format: str, where: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for row in record["rows"]:
            if (row["backend"], row["scheme"], row["act_format"], row["where"]) == (backend, scheme, act_format, where):
                counts.update({name: row[name] for name in ("passed", "failed", "skipped")})
        return counts

    def _said(self, record: Record, backend: str, counts: Counter[str], passed: str) -> str:
        commit = record["commit"][:7]
        total = counts["passed"] + counts["failed"]
        said = f"{counts['failed']} of {total} tests failed" if counts["failed"] else passed
        if self.changed(record, backend):
            return f"{said} at {commit}, changed since"
        return f"{said} at {commit}" if counts["failed"] else said

    def changed(self, record: Record, backend: str) -> bool:
        """Whether what the backend depends on is not what the record was made with."""
        return bool(record["digests"].get(backend) != self.now[backend])

    def cell(self, scheme: Scheme, act_format: str, device: str, capability: tuple[int, int] | None) -> str:
        """Backends other than `reference` that fit, by what is known of them."""
        problem = _problem(scheme, act_format, device, capability)
        known: dict[str, list[str]] = defaultdict(list)
        for name, backend in BACKENDS.items():
            if name != "reference" and backend.fits_anywhere(problem):
                known[self.status(name, scheme.name, act_format, where_of(device, capability))].append(name)
        return "; ".join(f"{', '.join(names)}: {said}" for said, names in known.items()) or "not yet (`reference` runs)"

    def said_of(self, backend: str, scheme: Scheme, device: str, capability: tuple[int, int] | None) -> str | None:
        """The least that is known of a scheme's formats that the backend runs on a device; None: it runs none."""
        known = [
            self.status(backend, scheme.name, act_format, where_of(device, capability))
            for act_format in scheme.act_formats
            if any(BACKENDS[backend].fits_anywhere(p) for p in _problems(scheme, act_format, device, capability))
        ]
        return min(known, key=_trust, default=None)

    def summary_cell(self, backend: str, device: str, capability: tuple[int, int] | None) -> str:
        """Schemes by what is known of them, on one line."""
        known: dict[str, list[str]] = defaultdict(list)
        for scheme in SCHEMES.values():
            said = self.said_of(backend, scheme, device, capability)
            if said is not None:
                known[said].append(_UNQUANTIZED if scheme.name == "none" else scheme.name)
        return "; ".join(
            f"{said}: {'every scheme' if len(names) == len(SCHEMES) else ', '.join(names)}"
            for said, names in known.items()
        )

    def summary(self) -> str:
        """A line a backend."""
        lines = ["| " + " | ".join(["backend", *DEVICES]) + " |", "|" + "---|" * (1 + len(DEVICES))]
        for name in BACKENDS:
            if name != "reference":
                cells = [self.summary_cell(name, *where) for where in DEVICES.values()]
                lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
        return "\n".join(lines)

    def markdown(self) -> str:
        """A line a scheme and activation format, and the records."""
        header = ["scheme", "`act_format`", *DEVICES]
        lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for scheme in SCHEMES.values():
            for act in scheme.act_formats:
                cells = [self.cell(scheme, act, *where) for where in DEVICES.values()]
                lines.append("| " + " | ".join([f"`{scheme.name}`", f"`{act}`", *cells]) + " |")
        return "\n".join([*lines, "", *(self._line(record) for record in self.records)]).rstrip()

    def _line(self, record: Record) -> str:
        totals, versions = record["totals"], record["versions"]
        with_ = ", ".join(
            f"{name} {versions[name]}" for name in ("torch", "triton", "flashinfer") if versions.get(name)
        )
        counts = f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped"
        device = record["device"] if record["capability"] else f"{record['device']} ({record['cpu_isa']})"
        text = f"- {device}, commit {record['commit'][:7]}, {record['date']}, {with_}: {counts}"
        left = record.get("left_out")
        if left is None:
            return text
        tests = ", ".join(f"`{name}`" for name in left["tests"])
        outcomes = f"{left['passed']} passed, {left['failed']} failed, {left['skipped']} skipped"
        return f"{text}. Not counted: {tests} ({outcomes}): {left['because']}"

    def distilled(self) -> str:
        """torch_moe_ops/backends/tested.json: what an installed library knows of its records."""
        found = []
        for record in self.records:
            passed: dict[str, dict[str, dict[str, list[str]]]] = {}
            for row in record["rows"]:
                backends = passed.setdefault(row["where"], {})
                names = backends.setdefault(row["backend"], {}).setdefault(row["scheme"], [])
                if row["passed"] and not row["failed"] and row["act_format"] not in names:
                    names.append(row["act_format"])
            about = {name: record[name] for name in ("device", "commit", "date")}
            about["changed"] = [name for name in BACKENDS if self.changed(record, name)]
            found += [{"where": where, **about, "passed": names} for where, names in sorted(passed.items())]
        return json.dumps({"format": 1, "records": found}, indent=1) + "\n"


def current() -> Table:
    """From this tree's records and contents."""
    return Table(read_records(), digests())


def readme_with_table(text: str) -> str:
    """The README with its summary replaced."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{current().summary()}\n\n{END}{after}"


_HEAD = """# What runs where

Made by `scripts/support_table.py` from the records of test runs in `tests/records`.

- **tested**: tests passed with this format on such a device, and nothing that the backend depends on has changed since
  (`scripts/backend_digests.py` compares contents, wherever they lie). "changed since": something has.
- **by contract**: the call into a third-party kernel passed against a simulator of its interface. It proves arguments,
  layouts and units, not the kernel: [FlashInfer](flashinfer.md).
- **not run**: the backend takes the format there, and no record has run it. Where no backend but the slow, exact
  `reference` takes it, the cell says so.

The rows of `nvfp4` and `mxfp4` with fp8 activations are for weight policy `exact`; `packed` and `folded` run on Hopper
(`cuda_sm90_packed`, `cuda_sm90_folded`: [Hopper](hopper.md)) and on `reference`.

"""


def page() -> str:
    """docs/support.md."""
    return f"{_HEAD}{current().markdown()}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        README.write_text(readme_with_table(README.read_text()))
        PAGE.write_text(page())
        FILE.write_text(current().distilled())
    else:
        print(current().summary(), current().markdown(), sep="\n\n")


if __name__ == "__main__":
    main()
