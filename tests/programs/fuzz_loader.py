"""Mutated headers, configs, indices and saved weights: each loads, or raises CheckpointError that names a file.

    python tests/programs/fuzz_loader.py --count 1000000 [--first 0] [--jobs 1] [--out FILE.jsonl]

Case n is always the same: `--first n --count 1` repeats it. A case fails with any other error, with more than a second
of computing (a minute of waiting), with a crash, with more than a gigabyte of memory, or where what was loaded is what
the loader promises to refuse. Exit status 1 where one did.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from checkpoints_support import TooSlow, cpu_limit
from loader_mutations import damage_text, dump, mutate_header, mutate_json, prefix
from loader_sources import Source, sources

import torch_moe_ops as moe
from torch_moe_ops.checkpoints import CheckpointError, load_experts
from torch_moe_ops.checkpoints.index import CONFIG, SHARD_INDEX, SINGLE_FILE, forget
from torch_moe_ops.commands.inspect import Inspection

SECONDS = 1.0
WAITING = 60.0
MEMORY = 1 << 30
_REPORT_EVERY = 500


class Outcome(NamedTuple):
    """What came of a case: "loaded" or "refused"; and the kind of source with what was done to it."""

    what: str
    mutations: list[str]


def attempt(folder: Path, number: int) -> Outcome:
    """Case `number` in an empty folder. AssertionError, or whatever came, where it fails."""
    rng = random.Random(number)
    source = rng.choice(sources(folder))
    what = rng.choice(["header", "header", "config", "data", "index"]) if source.kind == "checkpoint" else "header"
    path, done = _write(folder, source, what, rng)
    mutations = [f"{source.kind}, {what}{f': {name}' if name else ''}" for name in sorted(set(done))]
    quick = rng.random() < 0.1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with cpu_limit(SECONDS):
                loaded = _load(source, path, quick)
    except CheckpointError as error:
        text = str(error)
        assert str(folder) in text, f"no file is named: {text!r}"
        assert len(text) < 6000 and text.isprintable(), f"message: {text[:300]!a}"
        return Outcome("refused", mutations)
    _check_all(loaded)
    return Outcome("loaded", mutations)


def load_sources(folder: Path) -> None:
    """Every source as it is: what is imported and compiled at first use belongs to no case, nor does its memory."""
    for source in sources(folder):
        empty(folder)
        path, _ = _write(folder, source, "", random.Random(0))
        _check_all(_load(source, path, quick=False))


def _write(folder: Path, source: Source, what: str, rng: random.Random) -> tuple[Path, list[str]]:
    """The files of a case; `what` is mutated ("": nothing). Where to load them from; a header's mutations, or [""]."""
    texts, header, data, done = dict(source.texts), source.header, source.data, [""]
    if what == "header":
        header, done = mutate_header(header, rng, favour_metadata=source.kind != "checkpoint")
        data = rng.choice([data, data, data, data + b"\x00", data[: rng.randrange(len(data))]]) if data else data
    elif what == "config":
        name = rng.choice(list(texts))
        texts[name] = _mutate_text(texts[name], rng)
    elif what == "data" and data:
        data = _spoil(data, rng)
    elif what == "index":
        names = [name for name in json.loads(header) if name != "__metadata__"]
        weight_map = {"weight_map": dict.fromkeys(names, "one.safetensors"), "metadata": {"total_size": len(data)}}
        texts[SHARD_INDEX] = dump(weight_map) if rng.random() < 0.1 else _mutate_text(dump(weight_map), rng)
    file = folder / ("one.safetensors" if what == "index" else SINGLE_FILE)
    length = struct.pack("<Q", len(header)) if what != "header" else prefix(len(header), rng)
    file.write_bytes(length + header + data)
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return folder if source.kind == "checkpoint" else file, done


def _mutate_text(text: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return damage_text(text, rng)
    value: Any = json.loads(text)
    for _ in range(rng.choice([1, 1, 2])):
        value = mutate_json(value, rng)
    return dump(value)


def _spoil(data: bytes, rng: random.Random) -> bytes:
    """Some bytes of the tensors, at random or all alike."""
    changed, start = bytearray(data), rng.randrange(len(data))
    end = min(len(data), start + rng.choice([1, 4, 100, 5000]))
    alike = rng.choice([None, 0, 0x7F, 0xFF])
    changed[start:end] = rng.randbytes(end - start) if alike is None else bytes([alike]) * (end - start)
    return bytes(changed)


def _load(source: Source, path: Path, quick: bool) -> list[moe.RawWeights]:
    if source.kind == "raw":
        return [moe.RawWeights.load(path)]
    if source.kind == "prepared":
        return [moe.restore(moe.PreparedWeights.load(path))]
    forget(str(path))  # written anew within a tick of the clock
    if quick:
        list(Inspection(path, quick=True, backends=False).lines())
        return []
    return list(load_experts(path, None, mtp=True))


def _check_all(loaded: list[moe.RawWeights]) -> None:
    """No NaN, and no matrix whose scales are all zero, came through."""
    for raw in loaded:
        for name, tensor in raw.tensors().items():
            if not tensor.is_floating_point() or raw.source == "":
                continue
            assert not tensor.float().isnan().any(), f"NaN in {name}"
            if name in ("w13_scale", "w2_scale"):
                assert tensor.float().flatten(1).any(1).all(), f"only zeros in {name}"


@dataclass
class Report:
    """Of a run: how often what came out, and every failure with the number that repeats it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    mutations: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # outcomes by mutation
    slowest: float = 0.0
    slowest_number: int = -1
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.what] += 1
        for name in outcome.mutations:
            self.mutations[name][outcome.what] += 1


def _work(numbers: range, current: Any, results: Any) -> None:
    """In a process of its own: cases one after the other; what came is sent on every now and then."""
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as made:
        folder = Path(made)
        load_sources(folder)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        report = Report()
        for number in numbers:
            current.value = number
            empty(folder)
            begin = time.process_time()
            try:
                report.add(attempt(folder, number))
            except (Exception, TooSlow) as error:
                report.failures.append({"number": number, "error": f"{type(error).__name__}: {error}"[:500]})
            seconds = time.process_time() - begin
            if seconds > report.slowest:
                report.slowest, report.slowest_number = seconds, number
            if number % _REPORT_EVERY == 0:
                results.send(report)
                report = Report()
        results.send(report)
    results.send(None)


def empty(folder: Path) -> None:
    """No files of an earlier case."""
    for name in (SINGLE_FILE, "one.safetensors", SHARD_INDEX, CONFIG, "hf_quant_config.json"):
        (folder / name).unlink(missing_ok=True)


def run(first: int, count: int) -> Report:
    """Cases in a second process, in a third after a crash or a wait without end, and so on."""
    total, context = Report(), mp.get_context("spawn")
    while count > 0:
        current, (receive, send) = context.Value("q", first - 1), context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(range(first, first + count), current, send))
        process.start()
        send.close()
        finished, seen, since = False, current.value, time.monotonic()
        while (not finished and process.is_alive()) or receive.poll(0):
            try:
                report = receive.recv() if receive.poll(1) else ...
            except EOFError:
                break
            finished |= report is None
            if isinstance(report, Report):
                _add(total, report)
            if current.value != seen:
                seen, since = current.value, time.monotonic()
            elif seen >= first and time.monotonic() - since > WAITING:
                process.kill()
        process.join()
        if finished:
            break
        if current.value < first:
            raise RuntimeError("a process ended before its first case: see above")
        total.failures.append({"number": current.value, "error": f"the process ended with {process.exitcode}"})
        count -= current.value + 1 - first
        first = current.value + 1
    return total


def _add(total: Report, part: Report) -> None:
    total.outcomes += part.outcomes
    for name, outcomes in part.mutations.items():
        total.mutations[name] += outcomes
    total.failures += part.failures
    if part.slowest > total.slowest:
        total.slowest, total.slowest_number = part.slowest, part.slowest_number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    begin = time.time()
    report = run(a.first, a.count)
    report.mutations = dict(sorted(report.mutations.items()))
    versions = {"python": platform.python_version(), "torch": torch.__version__, "torch_moe_ops": moe.__version__}
    seconds = round(time.time() - begin)
    line = {"first": a.first, "count": a.count, "seconds": seconds, "versions": versions, **vars(report)}
    print(json.dumps(line))
    if a.out:
        with a.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return bool(report.failures)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
