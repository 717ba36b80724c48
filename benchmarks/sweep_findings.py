"""What a sweep says: where `auto` takes longer than another layer, and where its time jumps with the tokens."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from moe_layers import ALIKE, POLICIES
from sweep_cells import AUTO, MODELS, cell_of

from torch_moe_ops.backends import BACKENDS

SLOWER = 1.03  # than another layer: a loss
STEP = 1.10  # a larger number of tokens that is faster by that: a cliff; a time per token that grows by that: a dip
CLASSES = ("standard", "strict")

Record = dict[str, Any]
Times = dict[str, float]  # layer, without its format -> us


class Column(NamedTuple):
    """A model in a format: what each number of tokens took, and what `prepare` takes in each class."""

    model: str
    fmt: str
    cells: dict[int, Times]
    takes: dict[str, str | None]
    classes: dict[str, str]  # of the backends that are near enough to the oracle for one


class Loss(NamedTuple):
    model: str
    fmt: str
    tokens: int
    accuracy: str
    ours: str
    us: float
    other: str
    other_us: float

    @property
    def ratio(self) -> float:
        return self.us / self.other_us


class Step(NamedTuple):
    kind: str  # cliff, dip
    model: str
    fmt: str
    layer: str
    tokens: tuple[int, int]
    us: tuple[float, float]


def columns(records: Iterable[Record]) -> list[Column]:
    """Of every model and format the cells, each from the last run that has it, and the choice of the last run."""
    run, cells, runs, choices = 0, defaultdict(dict), {}, {}
    for record in records:
        run += record["event"] == "env"
        if record["event"] == "choice":
            choices[record["shape"], record["fmt"]] = record["takes"], record["classes"]
        if record["event"] != "bench":
            continue
        model, fmt, tokens = cell = cell_of(record)
        times = cells[model, fmt]
        if runs.get(cell) != run:
            runs[cell], times[tokens] = run, {}
        times[tokens][record["layer"].partition("/")[0]] = record["us"]
    return [Column(*key, dict(sorted(times.items())), *choices.get(key, ({}, {}))) for key, times in cells.items()]


def _rivals(layer: str, times: Times, accuracy: str, classes: dict[str, str]) -> Times:
    """What `layer` is compared with: peers do what it does but for a model's own activation and biases.

    Backends with a weight policy of their own compute other numbers, and are no rivals.
    """
    alike, found = layer.endswith(ALIKE), {}
    for name, us in times.items():
        backend = name.removesuffix(ALIKE)
        if name == layer or backend == AUTO or backend in POLICIES:
            continue
        if backend in BACKENDS:
            same = name.endswith(ALIKE) == alike and accuracy in (CLASSES[0], classes.get(backend))
            same = same and backend in classes
        else:
            same = accuracy == CLASSES[0] and (alike or AUTO + ALIKE not in times)
        if same:
            found[name] = us
    return found


def losses(column: Column) -> list[Loss]:
    """Cells in which what `prepare` takes is slower than another layer by more than 3 %, in each accuracy class."""
    found = []
    for tokens, times in column.cells.items():
        for accuracy in CLASSES:
            taken = column.takes.get(accuracy)
            if accuracy != CLASSES[0] and taken == column.takes.get(CLASSES[0]):
                taken = AUTO
            for kind in ("", ALIKE):
                layer = (AUTO if accuracy == CLASSES[0] else str(taken)) + kind
                rivals = _rivals(layer, times, accuracy, column.classes)
                if layer not in times or not rivals:
                    continue
                other = min(rivals, key=rivals.__getitem__)
                if times[layer] > SLOWER * rivals[other]:
                    names = (column.model, column.fmt, tokens, accuracy)
                    found.append(Loss(*names, layer, times[layer], other, rivals[other]))
    return found


def beside_peers(found: Iterable[Column]) -> dict[str, list[float]]:
    """Format -> the fastest other library's time over that of `auto`, in each cell that another one has."""
    ratios = defaultdict(list)
    for column in found:
        for times in column.cells.values():
            layer = AUTO + ALIKE if AUTO + ALIKE in times else AUTO
            rivals = _rivals(layer, times, CLASSES[0], column.classes)
            peers = [us for name, us in rivals.items() if name.removesuffix(ALIKE) not in BACKENDS]
            if layer in times and peers:
                ratios[column.fmt].append(min(peers) / times[layer])
    return dict(sorted(ratios.items()))


def steps(column: Column) -> list[Step]:
    """Cliffs and dips of `auto` from one number of tokens to the next that was timed."""
    found = []
    for layer in (AUTO, AUTO + ALIKE):
        mine = [(tokens, times[layer]) for tokens, times in column.cells.items() if layer in times]
        for (few, us), (many, more) in itertools.pairwise(mine):
            kind = "cliff" if more * STEP < us else "dip" if more / many > STEP * us / few else ""
            if kind:
                found.append(Step(kind, column.model, column.fmt, layer, (few, many), (us, more)))
    return found


def _table(column: Column) -> list[str]:
    names = list(dict.fromkeys(name for times in column.cells.values() for name in times))
    lines = [f"\n### {column.model}, {column.fmt}\n", "| tokens | " + " | ".join(names) + " |"]
    lines.append("|---:" * (len(names) + 1) + "|")
    for tokens, times in column.cells.items():
        row = [f"{times[name]:.1f}" if name in times else "" for name in names]
        lines.append(f"| {tokens} | " + " | ".join(row) + " |")
    taken = ", ".join(f"{kind} {name}" for kind, name in column.takes.items())
    return [*lines, f"\n`prepare` takes: {taken}"] if taken else lines


def _peers_table(found: list[Column]) -> list[str]:
    ratios = beside_peers(found)
    lines = [
        "",
        "| format | cells with another library | its time over `auto`'s: least | median | most | it is faster in |",
    ]
    lines.append("|---|" + "---:|" * 5)
    for fmt, values in ratios.items():
        least, middle, most = min(values), statistics.median(values), max(values)
        faster = sum(value < 1 for value in values)
        lines.append(f"| {fmt} | {len(values)} | {least:.2f} | {middle:.2f} | {most:.2f} | {faster} |")
    return lines if ratios else []


def report(records: Iterable[Record]) -> str:
    """Markdown: losses, cliffs and dips, other libraries' times over `auto`'s, then all times, microseconds a call."""
    found = sorted(columns(records), key=lambda c: (MODELS.index(c.model), c.fmt))
    lost = [loss for column in found for loss in losses(column)]
    stepped = [step for column in found for step in steps(column)]
    cells = sum(len(column.cells) for column in found)
    lines = [f"{cells} cells of {len(found)} layers: {len(lost)} losses, {len(stepped)} cliffs and dips.", ""]
    for x in sorted(lost, key=lambda x: -x.ratio):
        lines.append(
            f"- {x.model} {x.fmt}, {x.tokens} tokens, {x.accuracy}: {x.ours} {x.us:.1f} us, {x.other} "
            f"{x.other_us:.1f} us, {x.ratio:.2f} times"
        )
    for s in stepped:
        at = f"{s.us[0]:.1f} us at {s.tokens[0]} tokens, {s.us[1]:.1f} at {s.tokens[1]}"
        lines.append(f"- {s.kind}: {s.model} {s.fmt}, {s.layer}: {at}")
    lines += _peers_table(found)
    return "\n".join([*lines, *(line for column in found for line in _table(column))])
