"""Makes tables and plots of the GPU benchmark: part of the README, and benchmarks/results/h200.md.

    python scripts/benchmark_report.py [--write | --check] [--plots]

--write replaces both, --check fails where they are not what the result files say, --plots draws an SVG a model
(needs matplotlib). A cell takes all its layers from one run, the last that timed that model, number of tokens and
format, one with other libraries if there is any: what is compared was interleaved. Layers of a weight format whose
activations have other bits may be another run's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch_moe_ops as moe  # noqa: E402
from benchmarks.peers.moe_peers.int4_forms import FORMS as INT4_FORMS  # noqa: E402
from benchmarks.peers.moe_peers.int4_forms import Form  # noqa: E402
from torch_moe_ops.backends.explain import default_on  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
README, PAGE = ROOT / "README.md", RESULTS / "h200.md"
BEGIN, END = "<!-- speed table: made by scripts/benchmark_report.py -->", "<!-- end of the speed table -->"

LAYERS = (
    *("h200_moe.jsonl", "h200_standard.jsonl"),
    *("h200_auto_sweep_peers.jsonl", "h200_auto_sweep_between.jsonl", "h200_auto_sweep_fp8.jsonl"),
    *("h200_tables.jsonl", "h200_tables_fp8.jsonl", "h200_int4_fp8_peers.jsonl", "h200_auto_sweep_now.jsonl"),
)
SWEEP = "h200_sm90_sweep.jsonl"
MODELS = {
    "qwen3_30b": "Qwen3-30B-A3B",
    "dsv3": "DeepSeek-V3",
    "mixtral": "Mixtral-8x7B",
    "gptoss120b": "gpt-oss-120b",
}


def _int4_title(form: Form) -> str:
    scales = "" if form.dtype == "bfloat16" else f"{form.dtype} scales"
    if not form.group:
        return f"INT4, {scales or 'scales'} of rows"
    more = ["zero points"] * form.zero + [scales] * bool(scales)
    return ", ".join(["INT4", *[f"groups of {form.group}"] * (form.group != 128 or not more), *more])


# Weight formats in the order of the page, with what the library runs beside the plain format.
FORMATS = {
    "nvfp4": "NVFP4", "mxfp4": "MXFP4", **{name: _int4_title(form) for name, form in INT4_FORMS.items()},
    "mxint4": "MXINT4", "fp8": "FP8, 128x128 blocks", "fp8row": "FP8, scales of rows",
    "fp8half": "FP8, scales of half matrices", "mxfp8": "MXFP8",
    "bf16": "bfloat16",
}  # fmt: skip
README_FORMATS = ("nvfp4", "mxfp4", "int4", "mxint4", "fp8")
README_TOKENS = (1, 8, 64, 256, 1024, 4096)
# Formats in which the accuracy class "standard" has a choice -> a problem but for its sizes.
CHOSEN = {
    "int4": {"scheme": "int4", "weight_scales": "bfloat16 per 128"},
    "mxint4": {"scheme": "mxint4"},
    "fp8": {"scheme": "fp8_block", "act_format": "fp8"},
}
OURS = (
    *("cuda_sm90", "cuda_sm90_int4", "cuda_sm90_bf16", "cuda_sm90_fp8", "cuda_sm90_packed", "cuda_sm90_folded"),
    *("triton", "triton_fp8"),
)
AUTO = "auto"
ALIKE = "-silu"  # ends the name of a layer of ours that leaves out what peers leave out (gpt-oss)
PEERS = {
    "marlin": "Marlin (vLLM)",
    "humming-indexed": "humming, indexed",
    "humming-grouped": "humming, grouped",
    "triton_kernels": "triton_kernels (sorting not timed)",
    "vllm_triton": "vLLM's Triton kernel",
    "deepgemm": "DeepGEMM",
}
ACTS = {
    "": "", "a4": ", 4-bit activations", "a8": ", 8-bit activations", "a8row": ", fp8 activations",
    "a16": ", 16-bit activations",
}  # fmt: skip


class Cell(NamedTuple):
    """What one run timed for a model, a number of tokens and a weight format: layer -> record."""

    run: int
    layers: dict[str, dict[str, Any]]


Key = tuple[str, str, int]  # model, weight format, tokens


def weight_format(layer: str) -> str:
    return layer.partition("/")[2].partition("-")[0]


def read(*paths: Path) -> dict[Key, Cell]:
    """The last run of every cell, files in this order; of those with other libraries, where there are any.

    A run begins with a line of its environment. What `auto` took goes by its own name.
    """
    runs: dict[Key, dict[int, Cell]] = defaultdict(dict)
    run = 0
    for line in (line for path in paths for line in path.read_text("utf-8").splitlines()):
        record = json.loads(line)
        run += record["event"] == "env"
        if record["event"] != "bench" or record["shape"] not in MODELS or record["covers"] == "logits":
            continue
        name, _, fmt = record["layer"].partition("/")
        if name.removesuffix(ALIKE) == AUTO:
            if record.get("backend") not in OURS:  # an older file, which does not say it: the backend's own row does
                continue
            name = record["backend"] + name.removeprefix(AUTO)
        key = (record["shape"], fmt, record["M"])
        runs[key].setdefault(run, Cell(run, {})).layers[f"{name}/{fmt}"] = record
    return _by_weight_format({key: max(of_key.values(), key=_preference) for key, of_key in runs.items()})


def _by_weight_format(cells: dict[Key, Cell]) -> dict[Key, Cell]:
    """Together what has the same weights; the run is that of the plain format."""
    joined: dict[Key, Cell] = {}
    for (shape, fmt, m), cell in sorted(cells.items()):  # the plain format comes before those with other activations
        key = (shape, fmt.partition("-")[0], m)
        joined.setdefault(key, Cell(cell.run, {})).layers.update(cell.layers)
    return joined


def _preference(cell: Cell) -> tuple[bool, int]:
    return not all(is_ours(layer) for layer in cell.layers), cell.run


def is_ours(layer: str) -> bool:
    return layer.partition("/")[0].removesuffix(ALIKE) in OURS


def title(layer: str) -> str:
    """How a row names a layer."""
    name, _, fmt = layer.partition("/")
    shown = f"`{name.removesuffix(ALIKE)}`" if is_ours(layer) else PEERS.get(name, name)
    shown += ", silu without biases" if name.endswith(ALIKE) else ""
    return shown + ACTS[fmt.partition("-")[2]]


def _order(layer: str) -> tuple[int, int, str]:
    name, _, fmt = layer.partition("/")
    known = [*OURS, *(name + ALIKE for name in OURS), *PEERS]
    return (len(fmt.partition("-")[2]), known.index(name) if name in known else len(known), name)


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def rows_of(cells: dict[Key, Cell], shape: str, fmt: str) -> tuple[list[int], list[str]]:
    """The numbers of tokens and the layers that some run timed, ours first."""
    found = {m: cell for (s, f, m), cell in cells.items() if (s, f) == (shape, fmt)}
    layers = {layer for cell in found.values() for layer in cell.layers}
    return sorted(found), sorted(layers, key=lambda x: (not is_ours(x), _order(x), x))


def _header(first: str, ms: list[int]) -> list[str]:
    return [f"| {first} | " + " | ".join(f"M={m}" for m in ms) + " |", "|---|" + "---:|" * len(ms)]


def floor(cell: Cell) -> float:
    """Of the layer with the widest activations: what reading the weights, or its products, take at least."""
    return max(record["floor_us"] for record in cell.layers.values())


def full_table(cells: dict[Key, Cell], shape: str, fmt: str) -> list[str]:
    """Every layer of a model and weight format, and the least time that memory or products allow."""
    ms, layers = rows_of(cells, shape, fmt)
    lines = _header(f"{MODELS[shape]}, {FORMATS[fmt]}", ms)
    for layer in layers:
        times = [cells[shape, fmt, m].layers.get(layer) for m in ms]
        lines.append(f"| {title(layer)} | " + " | ".join(_us(t["us"]) if t else "" for t in times) + " |")
    floors = [floor(cells[shape, fmt, m]) for m in ms]
    return [*lines, "| *physical floor* | " + " | ".join(f"*{_us(f)}*" for f in floors) + " |"]


def best(cell: Cell, ours: bool) -> tuple[str, float] | None:
    """A layer in the plain format: that of the backend which `prepare` takes, or the fastest of the others."""
    found = {x: r for x, r in cell.layers.items() if is_ours(x) == ours and "-" not in x.partition("/")[2]}
    if not found:
        return None
    if not ours:
        layer = min(found, key=lambda x: (found[x]["us"], x))
    else:
        first = min(found, key=_order)
        layer = f"{default_backend(found[first])}/{weight_format(first)}"
        layer = layer if layer in found else first
    return layer, found[layer]["us"]


def default_backend(record: dict[str, Any]) -> str | None:
    """What `prepare(backend="auto")` takes on Hopper for the layer of a record, where "standard" has a choice."""
    chosen = CHOSEN.get(weight_format(record["layer"]))
    if chosen is None:
        return None
    names = {"num_experts": "E", "top_k": "k", "hidden_size": "H", "intermediate_size": "I"}
    sizes = {name: record[key] for name, key in names.items()}
    return default_on(moe.Problem(device="cuda", capability=(9, 0), **chosen, **sizes))


def readme_table(cells: dict[Key, Cell]) -> str:
    """The backend that `prepare` takes and the fastest of the others, with the ratio."""
    ms = sorted({m for _, fmt, m in cells if fmt == README_FORMATS[0]} & set(README_TOKENS))
    lines = _header("us a layer: ours / best other (their time over ours)", ms)
    timed: dict[tuple[str, str], list[str]] = {}  # format and other libraries of a row -> models
    for fmt, (shape, model) in itertools.product(README_FORMATS, MODELS.items()):
        row = []
        for m in ms:
            cell = cells.get((shape, fmt, m))
            mine, other = (best(cell, True), best(cell, False)) if cell else (None, None)
            if mine is None or other is None:
                row.append(_us(mine[1]) if mine else "")
                continue
            row.append(f"{_us(mine[1])} / {_us(other[1])} ({other[1] / mine[1]:.2f})")
        if any(row):
            lines.append(f"| {model}, {FORMATS[fmt]} | " + " | ".join(row) + " |")
        plain = (layer for layer in rows_of(cells, shape, fmt)[1] if "-" not in layer.partition("/")[2])
        peers = [title(layer) for layer in plain if not is_ours(layer)]
        if peers:
            timed.setdefault((FORMATS[fmt], "; ".join(peers)), []).append(model)
    lines += ["", "| other libraries that were timed | for |", "|---|---|"]
    return "\n".join([*lines, *(f"| {peers} | {fmt}: {', '.join(names)} |" for (fmt, peers), names in timed.items())])


Times = dict[tuple[str, int], float]  # model, tokens -> us


def sweep(path: Path, backend: str) -> Times:
    """Of a backend's NVFP4 layers in a file of bench_hopper_sweep.py."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {(r["shape"], r["M"]): r["us"] for r in records
            if r["event"] == "bench" and r["layer"] == f"{backend}/nvfp4"}  # fmt: skip


def sweep_rows(path: Path) -> dict[tuple[str, int], str]:
    """Model, tokens -> microseconds of cuda_sm90, and triton's time over that."""
    mine, other = sweep(path, "cuda_sm90"), sweep(path, "triton")
    return {key: f"{_us(us)} ({other[key] / us:.2f})" for key, us in mine.items() if key in other}


def sweep_text(path: Path) -> list[str]:
    """All numbers of tokens of a sweep."""
    rows = sweep_rows(path)
    shapes = [shape for shape in MODELS if any(s == shape for s, _ in rows)]
    lines = ["## NVFP4 by number of tokens: `cuda_sm90`, and the time of `triton` over it", ""]
    lines += ["| tokens | " + " | ".join(MODELS[shape] for shape in shapes) + " |", "|---:|" + "---:|" * len(shapes)]
    for m in sorted({m for _, m in rows}):
        lines.append(f"| {m} | " + " | ".join(rows.get((shape, m), "") for shape in shapes) + " |")
    return lines


def emulation_text(path: Path) -> list[str]:
    """What the field falls back to without FP4 units, beside the library in the same run."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    times = {(r["shape"], r["M"], r["layer"]): r["us"] for r in records if r["event"] == "bench"}
    lines = [
        "## Against dequantizing on every forward",
        "",
        "The emulation of vLLM 0.20.2, which makes bfloat16 of all experts in every call. Since 0.33 it decodes only",
        "the experts that tokens go to, inside a Triton GEMM; that one was not timed.",
        "",
        "| model | M | emulation, ms | our fastest backend, us | ratio |",
    ]
    lines.append("|---|---:|---:|---:|---:|")
    for (shape, m, layer), us in sorted(times.items(), key=lambda item: item[0][1]):
        mine = [t for (s, n, other), t in times.items() if (s, n) == (shape, m) and is_ours(other) and "-" not in other]
        if layer.startswith("emulation") and mine:
            ours = min(mine)
            lines.append(f"| {MODELS[shape]} | {m} | {us / 1e3:.1f} | {_us(ours)} | {us / ours:.0f} |")
    return lines


def route_text(path: Path) -> list[str]:
    """The last time of every routing method and number of tokens."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    times = {(r["method"], r["M"]): r for r in records if r["event"] == "route"}
    ms = sorted({m for _, m in times})
    lines = ["## Routing: 256 experts, top 8, us inside a CUDA graph", "", *_header("method", ms)]
    for method in dict.fromkeys(name for name, _ in times):
        lines.append(f"| {method} | " + " | ".join(_us(times[method, m]["us"]) for m in ms) + " |")
    return lines


def example_text(path: Path) -> list[str]:
    data = json.loads(path.read_text("utf-8"))
    lines = ["## A transformers model, compiled", "", f"`{data['command']}`, milliseconds a forward:", ""]
    lines += [
        "| tokens | eager transformers, bfloat16 experts | compiled, NVFP4 experts, one CUDA graph |",
        "|---:|---:|---:|",
    ]
    return lines + [f"| {r['tokens']} | {r['eager_ms']:.2f} | {r['compiled_ms']:.2f} |" for r in data["records"]]


_EXTRAS = {
    SWEEP: sweep_text,
    "h200_emulation.jsonl": emulation_text,
    "h200_route.jsonl": route_text,
    "h200_example.json": example_text,
}


def page(cells: dict[Key, Cell], folder: Path = RESULTS) -> str:
    """benchmarks/results/h200.md."""
    lines = ["# One H200", "", "Made by `scripts/benchmark_report.py` from the result files of this folder.", ""]
    lines += [
        "Microseconds a layer from top-k ids: medians of CUDA graphs over rotating routings, all layers of a table"
    ]
    lines += ["interleaved in one process (`benchmarks/run_h200.sh`, protocol in `benchmarks/peers/README.md`)."]
    lines += [
        "gpt-oss has biases and its own activation in our rows; other libraries run silu without biases there, and so"
    ]
    lines += ["do the rows that say it."]
    for shape in MODELS:
        formats = [f for f in FORMATS if any((s, g) == (shape, f) for s, g, _ in cells)]
        if not formats:
            continue
        lines += ["", f"## {MODELS[shape]}"]
        if (folder / f"h200_{shape}.svg").exists():
            lines += ["", f"![time over tokens](h200_{shape}.svg)"]
        for fmt in formats:
            lines += ["", *full_table(cells, shape, fmt)]
    for name, text in _EXTRAS.items():
        if (folder / name).exists():
            lines += ["", *text(folder / name)]
    return "\n".join(lines) + "\n"


def readme_with_table(text: str, cells: dict[Key, Cell]) -> str:
    """The README with its table replaced."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return "\n\n".join([before + BEGIN, readme_table(cells), END + after])


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "moeq", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot(cells: dict[Key, Cell], shape: str, to: Path) -> None:
    """Time over tokens, log axes: NVFP4 and MXFP4 layers in one panel each, with the floor."""
    plt = _pyplot()
    formats = [f for f in FORMATS if len(rows_of(cells, shape, f)[0]) > 1]
    figure, axes = plt.subplots(1, len(formats), figsize=(4.2 * len(formats), 3.6), squeeze=False, sharey=True)
    for ax, fmt in zip(axes[0], formats, strict=True):
        ms, layers = rows_of(cells, shape, fmt)
        for layer in layers:
            points = [(m, r["us"]) for m in ms if (r := cells[shape, fmt, m].layers.get(layer))]
            style: dict[str, Any] = {"linewidth": 2.2} if is_ours(layer) else {"linewidth": 1.1, "linestyle": "--"}
            variant, known, _ = _order(layer)  # a color a library, paler for its other activations
            style |= {"color": f"C{known}", "alpha": 0.5 if variant else 1.0}
            ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=title(layer).replace("`", ""), **style)
        floors = [floor(cells[shape, fmt, m]) for m in ms]
        ax.plot(ms, floors, color="black", linestyle=":", label="physical floor")
        ax.set(xscale="log", yscale="log", title=f"{MODELS[shape]}, {FORMATS[fmt]}", xlabel="tokens")
        ax.set_xticks(ms, [str(m) for m in ms], minor=False)
        ax.minorticks_off()
        ax.grid(True, alpha=0.3)
        ax.legend(fontsize=7, frameon=False)
    axes[0][0].set_ylabel("us a layer")
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})
    plt.close(figure)


def ratios(cells: dict[Key, Cell], shape: str, fmt: str) -> dict[int, float]:
    """Tokens -> the time of the fastest other library over that of the library's preferred backend."""
    found = {}
    for m in rows_of(cells, shape, fmt)[0]:
        mine, other = best(cells[shape, fmt, m], True), best(cells[shape, fmt, m], False)
        if mine and other:
            found[m] = other[1] / mine[1]
    return found


def plot_ratios(cells: dict[Key, Cell], to: Path, fmt: str = "nvfp4") -> None:
    """The README's plot: a line a model, named at its end, on a linear axis."""
    plt = _pyplot()
    figure, ax = plt.subplots(figsize=(7.2, 3.4))
    ticks = sorted({m for _, f, m in cells if f == fmt})
    below = 0.0
    lines = {model: found for shape, model in MODELS.items() if (found := ratios(cells, shape, fmt))}
    for model, found in sorted(lines.items(), key=lambda item: list(item[1].values())[-1]):
        at = [ticks.index(m) for m in found]
        (line,) = ax.plot(at, found.values(), marker="o", markersize=4, linewidth=2)
        below = max(below + 0.14, list(found.values())[-1])  # names do not lie on each other
        ax.annotate(f"  {model}", (at[-1], below), color=line.get_color(), va="center")
    ax.axhline(1, color="black", linewidth=1)
    ax.annotate("the best other library", (0, 1), textcoords="offset points", xytext=(0, 4), fontsize=8)
    ax.set_xticks(range(len(ticks)), [str(m) for m in ticks])
    ax.set(ylim=(0, None), xlim=(-0.2, len(ticks) + 0.3), xlabel="tokens", ylabel="its time over ours")
    ax.set_title(f"{FORMATS[fmt]} weights, 16-bit activations, one H200", fontsize=10)
    ax.grid(True, axis="y", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    parser.add_argument("--plots", action="store_true")
    args = parser.parse_args()
    cells = read(*(RESULTS / name for name in LAYERS))
    if args.plots:
        plotted = read(RESULTS / LAYERS[0])  # every format of the other file would be a panel of its own
        for shape in {s for s, _, _ in plotted}:
            plot(plotted, shape, RESULTS / f"h200_{shape}.svg")
        plot_ratios(plotted, RESULTS / "h200_speed.svg")
    wanted = {README: readme_with_table(README.read_text("utf-8"), cells), PAGE: page(cells)}
    if args.write:
        for path, text in wanted.items():
            path.write_text(text, "utf-8")
    elif args.check:
        stale = [p.name for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
        if stale:
            print(f"not what the result files say: {', '.join(stale)} (run scripts/benchmark_report.py --write)")
        return int(bool(stale))
    else:
        print(wanted[PAGE])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
