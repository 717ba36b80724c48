"""Makes the table of distances in docs/numerics.md, and what `accuracy="standard"` may choose, of committed results.

    python scripts/distance_table.py [--write]

Reads benchmarks/results/h200_distances*.jsonl (`benchmarks/distances.py`), and the times of h200_moe.jsonl,
h200_standard.jsonl (`benchmarks/run_h200.sh fp8`, `standard`) and the others of TIMES (`bench_sweep.py`). A file that
is not there counts for nothing.
Writes the tables and torch_moe_ops/backends/measured/distances.json, or without --write fails where they are not what
the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers.moe_peers.int4_forms import FORMS as INT4_FORMS  # noqa: E402
from benchmarks.peers.moe_peers.int4_forms import Form  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE, DATA = ROOT / "docs" / "numerics.md", ROOT / "torch_moe_ops" / "backends" / "measured" / "distances.json"
DISTANCES = (
    "h200_distances.jsonl",
    "h200_distances_int4.jsonl",
    "h200_distances_int4_a8.jsonl",
    "h200_distances_activations.jsonl",
    "h200_distances_fp8.jsonl",
    "h200_distances_int4_forms.jsonl",
    "h200_distances_int4_row.jsonl",
    "h200_distances_limit.jsonl",
)
TIMES = (
    "h200_moe.jsonl",
    "h200_standard.jsonl",
    "h200_auto_sweep_own.jsonl",
    "h200_int4_a8.jsonl",
    "h200_strict_fp8.jsonl",
    "h200_int4f16_a8.jsonl",
    "h200_int4_forms_times.jsonl",
    "h200_int4_row_times.jsonl",
)
BEGIN, END = "<!-- distances: begin (scripts/distance_table.py --write) -->", "<!-- distances: end -->"


def _title(form: Form) -> str:
    name = f"INT4 in groups of {form.group}" if form.group else "INT4 with scales of rows"
    name += " with zero points" if form.zero else ""
    return name if form.dtype == "bfloat16" else f"{name}, {form.dtype} scales"


_INT4 = {name: _title(form) for name, form in INT4_FORMS.items()}
FORMATS = {
    "fp8": "FP8 in 128x128 blocks, fp8 activations", "fp8row": "FP8 with scales of rows, fp8 activations",
    "fp8half": "FP8 with scales of half matrices, fp8 activations", **_INT4, "mxint4": "MXINT4",
    "nvfp4": "NVFP4", "mxfp4": "MXFP4", "bf16": "bfloat16", "nvfp4-a8": "NVFP4, fp8 activations",
    **{f"{name}-a8": f"{title}, fp8 activations" for name, title in _INT4.items()},
    "mxfp4-a8row": "MXFP4, fp8 activations",
    "fp8-a16": "FP8 in 128x128 blocks", "fp8row-a16": "FP8 with scales of rows",
    "fp8half-a16": "FP8 with scales of half matrices", "mxfp8-a16": "MXFP8",
}  # fmt: skip
PEERS = {"marlin": "Marlin", "humming": "humming", "vllm_triton": "vLLM's Triton kernel", "deepgemm": "DeepGEMM"}
# Formats of the benchmark of which `auto` has a choice -> scheme, activation format and what shares a scale. Times of
# fp8 weights do not depend on the latter.
TIMED = {
    "fp8": ("fp8_block", "fp8", None),
    "fp8row": ("fp8", "fp8", None),
    "mxint4": ("mxint4", "none", None),
    **{name: ("int4", "none", form.weight_scales) for name, form in INT4_FORMS.items()},
    **{f"{name}-a8": ("int4", "fp8", form.weight_scales) for name, form in INT4_FORMS.items()},
}

ACTIVATION = "silu"  # of lines that name none, and of the table's long part
ALIKE = "-silu"  # ends the name of a layer that was timed with silu where its model has another activation

TOKENS = {1, 2, 8, 64, 512}  # of every run (BATCHES of benchmarks/distance_cases.py); some have more
OWN_LIMIT = 0.0  # of lines that name none; limits are positive

Line = dict[str, Any]


class Kind(NamedTuple):
    """What lines have in common that are compared: a format, an activation and its limit."""

    fmt: str
    activation: str
    limit: float

    @property
    def is_of_the_long_part(self) -> bool:
        return (self.activation, self.limit) == (ACTIVATION, OWN_LIMIT)

    @property
    def named(self) -> str:
        return f"`{self.activation}`" + ("" if self.limit == OWN_LIMIT else f" with a limit of {self.limit:g}")


class Contestant(NamedTuple):
    kind: str
    who: str
    weight_policy: str


def read(name: str) -> list[Line]:
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def read_times(name: str) -> list[Line]:
    """The lines of formats of which `auto` has a choice."""
    return [line for line in read(name) if line["event"] == "env" or timed_as(line)[1] in TIMED]


def distances() -> list[Line]:
    """The lines of all runs, but of a contestant on a layer, for a format and an activation, those of the last run
    alone, be it that it failed there; that a whole case failed counts until it is measured."""
    return merged([(name, read(name)) for name in DISTANCES])


def merged(runs: list[tuple[str, list[Line]]]) -> list[Line]:
    """`distances` of files by their names."""
    last: dict[tuple[Any, ...], int] = {}
    for number, (_, lines) in enumerate(runs):
        for line in lines:
            if "who" in line:
                last[_measurement(line)] = number
            if line["event"] == "distance":
                last[line["format"], line["layer"]] = number
    return [
        line | {"file": name} if line["event"] == "env" else line
        for number, (name, lines) in enumerate(runs)
        for line in lines
        if line["event"] == "env" or _counts(line, number, last)
    ]


def _counts(line: Line, number: int, last: dict[tuple[Any, ...], int]) -> bool:
    if "who" in line:
        return last[_measurement(line)] == number
    return last.get((line["format"], line["layer"]), number) <= number


def _measurement(line: Line) -> tuple[Any, ...]:
    return (*measured_as(line), *contestant(line), line["layer"])


def measured_as(line: Line) -> Kind:
    return Kind(line.get("format", ""), line.get("activation", ACTIVATION), line.get("limit", OWN_LIMIT))


def contestant(line: Line) -> Contestant:
    return Contestant(line["kind"], line["who"], line.get("weight_policy", "exact"))


Measured = dict[Kind, dict[Contestant, list[Line]]]


def by_format(lines: Iterable[Line]) -> Measured:
    """The distances of each kind; in the order of FORMATS, silu first, an activation's own limit first."""
    found: Measured = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["event"] == "distance":
            found[measured_as(line)][contestant(line)].append(line)
    order = {name: i for i, name in enumerate(FORMATS)}
    names = sorted(found, key=lambda k: (order[k.fmt], k.activation != ACTIVATION, k.activation, k.limit))
    return {name: dict(found[name]) for name in names}


def field_of(each: dict[Contestant, list[Line]]) -> dict[tuple[str, int], list[tuple[Contestant, Line]]]:
    """(layer, tokens) -> the peers that were run, or where none was, those that were emulated."""
    found: dict[tuple[str, int], list[tuple[Contestant, Line]]] = defaultdict(list)
    for kind in ("peer", "emulated"):
        cells = [(who, line) for who, lines in each.items() if who.kind == kind for line in lines]
        known = set(found)
        for who, line in cells:
            if (line["layer"], line["tokens"]) not in known:
                found[line["layer"], line["tokens"]].append((who, line))
    return found


def ratio_to_field(mine: list[Line], each: dict[Contestant, list[Line]]) -> tuple[float, str] | None:
    """The largest ratio to the nearest peer over all cells and both distances, and the peers; None without any."""
    field, ratios, names = field_of(each), [], set()
    for line in mine:
        rivals = field.get((line["layer"], line["tokens"]))
        if not rivals:
            return None
        ratios += [line[what] / min(rival[what] for _, rival in rivals) for what in ("l2", "row")]
        names |= {PEERS[who.who] + (" as emulated" if who.kind == "emulated" else "") for who, _ in rivals}
    return max(ratios), " and ".join(sorted(names))


def stated(lines: list[Line]) -> list[Line]:
    """What distances.json says of each of our backends: nothing of one that failed on a layer of the format.

    A layer counts where all numbers of TOKENS were measured.
    """
    failed = {(measured_as(line), contestant(line)) for line in lines if line["event"] == "missing" and "who" in line}
    entries = []
    for kind, each in by_format(lines).items():
        for who, mine in each.items():
            if who.kind != "ours" or (kind, who) in failed:
                continue
            against = ratio_to_field(mine, each)
            entry = {name: mine[0][name] for name in ("scheme", "act_format", "weight_scales")}
            entry |= {"backend": who.who, "weight_policy": who.weight_policy}
            entry["activation"] = kind.activation
            entry |= {} if kind.limit == OWN_LIMIT else {"limit": kind.limit}
            entry["layers"] = len(complete_layers(mine))
            for what in ("l2", "row"):
                values = [line[what] for line in mine]
                entry[what] = [min(values), max(values)]
            entry |= {"field": against and against[1], "ratio": against and round(against[0], 3)}
            entries.append(entry)
    return entries


def complete_layers(lines: Iterable[Line]) -> set[str]:
    """The layers that have a line for each number of TOKENS."""
    found: dict[str, set[int]] = defaultdict(set)
    for line in lines:
        found[line["layer"]].add(line["tokens"])
    return {layer for layer, each in found.items() if each >= TOKENS}


def times(files: Iterable[list[Line]], backends: set[str]) -> list[Line]:
    """Median times of our backends, a layer and format an entry.

    A number of tokens takes all of its times from the last run that has it: only what was timed together is compared.
    """
    # layer and format -> tokens -> run -> backend -> us
    runs: dict[tuple[Any, ...], dict[int, dict[int, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    run = 0
    for lines in files:
        for line in lines:
            run += line["event"] == "env"
            name, fmt = timed_as(line)
            if line["event"] != "bench" or fmt not in TIMED or name not in backends or line["covers"] != "ids":
                continue
            key = (*TIMED[fmt], line["E"], line["k"], line["H"], line["I"])
            runs[key][line["M"]].setdefault(run, {})[name] = round(line["us"], 2)
    entries = []
    names = ("scheme", "act_format", "weight_scales", "num_experts", "top_k", "hidden_size", "intermediate_size")
    for key, cells in sorted(runs.items(), key=str):
        us: dict[str, dict[str, float]] = defaultdict(dict)
        for tokens, of_runs in sorted(cells.items()):
            for name, value in of_runs[max(of_runs)].items():
                us[name][str(tokens)] = value
        entries.append(dict(zip(names, key, strict=True)) | {"us": {name: us[name] for name in sorted(us)}})
    return entries


def timed_as(line: Line) -> tuple[str, str]:
    """(backend, format): that which `auto` took, and none of a layer that was timed with silu as well."""
    name, _, fmt = line.get("layer", "").partition("/")
    if line.get("activation"):
        return "", fmt
    name = name.removesuffix(ALIKE)
    return line.get("backend", name) if name == "auto" else name, fmt


def data() -> str:
    """torch_moe_ops/backends/measured/distances.json; an entry a line."""
    lines = distances()
    env = lines[0] if lines else {"device": "", "capability": None}
    entries = stated(lines)
    timed = times(map(read_times, TIMES), {entry["backend"] for entry in entries})
    head = json.dumps({"format": 1, "device": env["device"], "capability": env["capability"]})[:-1]
    return f'{head},\n "distances": {_a_line_each(entries)},\n "times": {_a_line_each(timed)}}}\n'


def _a_line_each(entries: list[Line]) -> str:
    return "[" + ",".join(f"\n  {json.dumps(entry)}" for entry in entries) + "]"


def table(lines: list[Line]) -> list[str]:
    """The section of docs/numerics.md."""
    formats = by_format(lines)
    if not formats:
        return ['No results yet: `auto` takes what `accuracy="strict"` takes.']
    runs = [f"One {env['device']}, torch {env['torch']}, {env['date']} (commit {env['commit']}): "
            f"`benchmarks/distances.py`, `benchmarks/results/{env.get('file', DISTANCES[0])}`."
            for env in lines if env["event"] == "env"]  # fmt: skip
    text = [*dict.fromkeys(runs), ""]
    tokens = sorted({line["tokens"] for line in lines if line["event"] == "distance"})
    for kind, each in formats.items():
        if not kind.is_of_the_long_part:
            continue
        text += [f"| {FORMATS[kind.fmt]} | layers | " + " | ".join(f"M={m}" for m in tokens) + " | of the field's |"]
        text += ["|---|---:|" + "---:|" * len(tokens) + "---:|"]
        for who, mine in sorted(
            each.items(), key=lambda item: (("ours", "peer", "emulated").index(item[0].kind), item[0])
        ):
            against = ratio_to_field(mine, each) if who.kind == "ours" else None
            cells = [_cell([line for line in mine if line["tokens"] == m]) for m in tokens]
            share = f"{against[0]:.2f}" if against else ""
            layers = len({line["layer"] for line in mine})
            text.append(f"| {_name(who)} | {layers} | " + " | ".join(cells) + f" | {share} |")
        text.append("")
    text += activation_table(formats)
    missing = list(dict.fromkeys(_missing(line) for line in lines if line["event"] == "missing"))
    return [*text, "Not measured:", "", *missing] if missing else text[:-1]


def activation_table(formats: Measured) -> list[str]:
    """Our backends with other activations than silu and other limits than an activation's own: a row a format and
    backend, the largest of all numbers."""
    found: dict[tuple[str, Contestant], dict[str, tuple[list[Line], float]]] = defaultdict(dict)
    for kind, each in formats.items():
        for who, mine in sorted(each.items()) if not kind.is_of_the_long_part else ():
            if who.kind == "ours" and (against := ratio_to_field(mine, each)):
                found[kind.fmt, who][kind.named] = mine, against[0]
    rows = []
    for (fmt, who), of in found.items():
        names = ", ".join(of)
        largest = _cell([line for mine, _ in of.values() for line in mine])
        layers = min(len({line["layer"] for line in mine}) for mine, _ in of.values())
        ratio = max(ratio for _, ratio in of.values())
        rows.append(f"| {FORMATS[fmt]} | {_name(who)} | {names} | {layers} | {largest} | {ratio:.2f} |")
    head = [
        "| format | backend | activations | layers | largest | of the field's, emulated |",
        "|---|---|---|---:|---:|---:|",
    ]
    return [*head, *rows, ""] if rows else []


def _name(who: Contestant) -> str:
    if who.kind == "ours":
        return f"`{who.who}`" + ("" if who.weight_policy == "exact" else f", {who.weight_policy}")
    return PEERS[who.who] + (", emulated" if who.kind == "emulated" else "")


def _cell(lines: list[Line]) -> str:
    return " / ".join(f"{max(line[what] for line in lines):.1e}" for what in ("l2", "row")) if lines else "-"


def _missing(line: Line) -> str:
    who = f"{PEERS.get(line['who'], line['who'])} on " if "who" in line else ""
    return f"- {who}{FORMATS[line['format']]}, {line['layer']}: {line['why']}"


def page(text: str) -> str:
    """docs/numerics.md with the table of the results."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *table(distances()), END]) + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    wanted = {PAGE: page(PAGE.read_text("utf-8")), DATA: data()}
    stale = [path for path, text in wanted.items() if path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is {'written' if write else 'not what the results say'}")
        if write:
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    raise SystemExit(main())
