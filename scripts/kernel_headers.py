"""Writes csrc/generated from the tables of the package: what C++ and CUDA have to know as Python does.

    python scripts/kernel_headers.py [--write]

Without --write it prints the headers. A test fails where they are out of date.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch_moe_ops.backends.cpu_panels.layout import LAYOUTS, SchemeLayout
from torch_moe_ops.backends.cpu_panels.pack import KERNEL_ACT_FORMATS, KERNEL_SCHEMES
from torch_moe_ops.core import kernel_facts as facts
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.call import KERNEL_FIELDS, ExpertsCall
from torch_moe_ops.core.router_facts import ROUTE_HIDDEN_SM90, SHARED_EXPERTS, RouteHidden
from torch_moe_ops.core.schemes import ACT_FORMATS, SCHEMES
from torch_moe_ops.routing.reference import SCORES

FOLDER = Path(__file__).resolve().parent.parent / "csrc" / "generated"
# Annotation -> type in C++, type in a schema.
TYPES = {
    "Tensor": ("Tensor", "Tensor"),
    "Tensor | None": ("OptionalTensor", "Tensor?"),
    "str": ("std::string", "str"),
    "float": ("double", "float"),
    "int": ("int64_t", "int"),
    "bool": ("bool", "bool"),
}
# None where a router is given, which an ExpertsCall of Python's does not know.
ABSENT_WITH_ROUTER = ("topk_ids", "topk_weights")
Fields = dict[str, str]
FILLED: Fields = {"ids": "Tensor", "weights": "Tensor"}  # by ops that route


def constant(name: str) -> str:
    """kMaxSlots for MAX_SLOTS, kInt4Per32 for int4_per32."""
    return "k" + "".join(part.capitalize() for part in name.lower().split("_"))


def numbers(table: type) -> Iterator[str]:
    """The numbers of a class as constants, each with its comment."""
    for name, comment in re.findall(r"^    ([A-Z]\w*) = [^#\n]*(?:#\s*(.*))?$", inspect.getsource(table), re.M):
        value = vars(table)[name]
        if comment:
            yield f"// {comment[0].upper()}{comment[1:]}."
        if isinstance(value, tuple):
            yield from array(f"int {constant(name)}", value)
        else:
            yield f"constexpr int {constant(name)} = {value};"


def enum(name: str, names: Iterable[str]) -> list[str]:
    """An enum of names."""
    return listed(f"enum class {name} : int", map(constant, names), " ")


def array(declared: str, values: Iterable[object]) -> list[str]:
    """A constant array."""
    return listed(f"constexpr {declared}[] =", map(str, values))


def listed(declared: str, values: Iterable[str], space: str = "") -> list[str]:
    """Values in braces: in a line where they fit, structs a line each. space: inside of the braces of a line."""
    known = list(values)
    line = f"{declared} {{{space}{', '.join(known)}{space}}};"
    if known[0].startswith("{"):
        inner = [f"    {value}," for value in known]
    elif len(line) <= 120:
        return [line]
    else:
        inner = wrapped(", ".join(known), "    ")
    return [f"{declared} {{", *inner, "};"]


def names_of(enums: dict[str, Iterable[str]]) -> Iterator[str]:
    """Where `parse` (csrc/names.h) finds the names of enums of namespace moeq."""
    yield "namespace moeq {"
    yield ""
    for name, values in enums.items():
        yield "template <>"
        yield f"struct Names<{name}> {{"
        lines = array("const char* kAll", (f'"{value}"' for value in values))
        yield from (f"  {line}" for line in ("static " + lines[0], *lines[1:]))
        yield "};"
        yield ""
    yield "}  // namespace moeq"


def wrapped(text: str, before: str, after: str = "") -> list[str]:
    """Lines of at most 120 characters between `before` and `after`: a blank that is left out without an `after`."""
    lines, room = [], 120 - len(before) - len(after)
    while text:
        at = len(text) if len(text) <= room else text.rindex(" ", 0, room) + 1
        lines.append(f"{before}{text[:at] if after else text[:at].rstrip()}{after}")
        text = text[at:]
    return lines


def space(name: str, *parts: Iterable[str]) -> Iterator[str]:
    yield f"namespace {name} {{"
    for part in parts:
        yield ""
        yield from part
    yield ""
    yield f"}}  // namespace {name}"


def header(what: str, includes: Iterable[str], *parts: Iterable[str]) -> str:
    """A whole file."""
    lines = [f"// {what} Written by scripts/kernel_headers.py: change what it reads, not this.", "#pragma once"]
    lines += [f"#include {name}" for name in includes]
    for part in parts:
        lines += ["", *part]
    return "\n".join(lines) + "\n"


def activations() -> str:
    gated = [activation.is_gated for activation in ACTIVATIONS.values()]
    if gated != sorted(gated, reverse=True):
        raise ValueError("ACTIVATIONS must have those with a gate first")
    first = constant(list(ACTIVATIONS)[sum(gated)])
    test = [f"constexpr bool is_gated(Activation activation) {{ return activation < Activation::{first}; }}"]
    body = space("moeq", enum("Activation", ACTIVATIONS), test)
    return header("Activations.", ['"../names.h"'], body, names_of({"Activation": ACTIVATIONS}))


def cpu() -> str:
    schemes = list(dict.fromkeys(KERNEL_SCHEMES.values()))
    layout = [
        "// How the layout stores a scheme.",
        "struct SchemeLayout {",
        "  int unit_bytes;         // of sixteen rows; 0: as the dtype says",
        "  int group_units;        // that share a block scale; 0: as the scales say",
        "  int group_scale_bytes;  // of a group of a panel; where the scales say their dtype, elements; 0: no scales",
        "  int scale_panels;       // that share a row of scales",
        "  int fp8_group;          // values of K that share a scale of fp8 activations; 0: a row",
        "};",
    ]
    rows = [
        "// How packed hidden states are stored.",
        "struct ActLayout {",
        "  int pack;         // codes of a byte; 0: none are taken",
        "  int block;        // values of K that share a scale; 0: a row",
        "  int scale_bytes;  // of each",
        "};",
    ]
    body = space(
        "moeq::cpu",
        numbers(facts.CpuPanels),
        enum("Scheme", schemes),
        enum("ActFormat", KERNEL_ACT_FORMATS),
        layout,
        ["// By scheme.", *array("SchemeLayout kSchemeLayouts", map(_of_scheme, schemes))],
        ["constexpr SchemeLayout layout_of(Scheme scheme) { return kSchemeLayouts[static_cast<int>(scheme)]; }"],
        rows,
        ["// By format.", *array("ActLayout kActLayouts", map(_of_act, KERNEL_ACT_FORMATS))],
    )
    names = names_of({"cpu::Scheme": schemes, "cpu::ActFormat": KERNEL_ACT_FORMATS})
    return header("Of the CPU kernels.", ['"../names.h"'], body, names)


def _of_scheme(name: str) -> str:
    layout: SchemeLayout = LAYOUTS[name]
    panels = facts.CpuPanels
    unit = layout.codes.elements * layout.dtype.itemsize if layout.codes and layout.dtype else 0
    each = 1 if layout.scale_dtype is None else layout.scale_dtype.itemsize
    scale_bytes = 0 if not layout.codes else each if layout.tiles else each * panels.PANEL_ROWS
    scale_panels = panels.TILE // panels.PANEL_ROWS if layout.tiles else 1
    group = next(SCHEMES[s].fp8_group for s, kernel in KERNEL_SCHEMES.items() if kernel == name)
    return f"{{{unit}, {layout.group // panels.UNIT}, {scale_bytes}, {scale_panels}, {group}}}"


def _of_act(name: str) -> str:
    act = ACT_FORMATS[name]
    if act.dtype is None or name.startswith("mxfp6"):  # mxfp6: the backend unpacks them
        return "{0, 0, 0}"
    return f"{{{act.pack}, {act.block}, {act.scale_dtype.itemsize}}}"


def sm90() -> str:
    formats = facts.SM90_FORMATS.values()
    body = space(
        "moeq::sm90",
        numbers(facts.Sm90),
        ["// What the weights are: the formats of formats.cuh.", *enum("Format", facts.SM90_FORMATS)],
        [f"constexpr int kFormats = {len(facts.SM90_FORMATS)};"],
        ["// Bytes of a tile's scales, by format.", *array("int kTileScaleBytes", (f.tile_bytes for f in formats))],
        ["// Bytes of one of them.", *array("int kEachScaleBytes", (f.each for f in formats))],
        ["constexpr int tile_scale_bytes(Format format) { return kTileScaleBytes[static_cast<int>(format)]; }"],
        ["// Kernels by their numbers.", *array("const char* kKernelNames", (f'"{k}"' for k in facts.SM90_KERNELS))],
        ["// Tiles of prefill (gemm_args.cuh): kernels 1 and on.", *enum("Shape", facts.SM90_KERNELS[1:])],
        [f"constexpr int kShapes = {len(facts.SM90_KERNELS) - 1};"],
        [
            "// What a router makes of logits: of all of them where experts are chosen, of the chosen ones where they",
            "// are weighted.",
            *enum("Score", SCORES),
        ],
        ["// What fp8 GEMMs multiply (tiled_problem.h).", *enum("Weights", facts.SM90_WEIGHTS)],
    )
    inner = (
        space(f"moeq::sm90::{name}", numbers(table))
        for name, table in (("decode", facts.Sm90Decode), ("few", facts.Sm90Few), ("w4a8", facts.Sm90W4a8))
    )
    names = names_of({"sm90::Score": SCORES, "sm90::Weights": facts.SM90_WEIGHTS})
    return header("Of the Hopper kernels.", ['"../names.h"'], body, *inner, names)


def act_formats() -> str:
    body = space("moeq::sm90", enum("ActFormat", facts.SM90_ACT_FORMATS))
    names = names_of({"sm90::ActFormat": facts.SM90_ACT_FORMATS})
    return header("What the Hopper kernels round activations to.", ['"../names.h"'], body, names)


def calls() -> str:
    call = {"out": "Tensor"} | {name: _annotated(ExpertsCall, name) for name in KERNEL_FIELDS}
    call |= dict.fromkeys(ABSENT_WITH_ROUTER, "Tensor | None")
    router = _router()
    parts = [
        ["using torch::stable::Tensor;", "using OptionalTensor = std::optional<Tensor>;"],
        [
            "// What every op that runs experts gets of a call (torch_moe_ops/core/call.py).",
            *_struct("LayerCall", "", call),
        ],
        ["// A router, as moeq::route's arguments.", *_struct("RouterCall", "", router)],
    ]
    for op, own in facts.OWN_ARGUMENTS.items():
        routed = op in facts.TAKES_ROUTER
        bases = " : LayerCall, RouterCall" if routed else " : LayerCall"
        filled = ("out", *facts.FILLS.get(op, ()))
        parts.append(_op(op, bases, call | (router if routed else {}) | own, own, filled))
    own = FILLED | SHARED_EXPERTS
    parts.append(_op("route_sm90", " : RouterCall", router | own, own, ("ids", "weights")))
    includes = ["<torch/csrc/stable/tensor.h>\n", "<optional>", "<string>", "<tuple>"]
    return header("The arguments of compiled ops.", includes, space("moeq", *parts))


def router() -> str:
    own = FILLED | ROUTE_HIDDEN_SM90
    op = _op("route_hidden_sm90", " : RouterCall", _router() | own, own, ("ids", "weights", "router_logits"))
    body = space("moeq", op)
    limits = space("moeq::sm90::hidden", numbers(RouteHidden))
    return header("Of the kernel for hidden states of routers.", ['"calls.h"'], limits, body)


def accepted() -> str:
    fields = {name: _annotated(ExpertsCall, name) for name in facts.ACCEPTED_TENSORS} | {"names": "int"}
    op = _op("experts_accepted", "", fields, fields, (), "Tensor?")
    return header("Of calls that need not be checked again (cpu/accepted.h).", ['"calls.h"'], space("moeq", op))


def _router() -> Fields:
    return {name: _annotated(facts.Router, name) for name in facts.Router._fields}


def _annotated(table: Any, name: str) -> str:
    hint = table.__annotations__[name]  # a NamedTuple keeps a ForwardRef of what is written there
    return getattr(hint, "__forward_arg__", hint)


def _struct(name: str, bases: str, fields: Fields) -> Iterator[str]:
    yield f"struct {name}{bases} {{"
    yield from (f"  {TYPES[kind][0]} {field};" for field, kind in fields.items())
    yield "};"


def _op(op: str, bases: str, fields: Fields, own: Fields, filled: tuple[str, ...], result: str = "()") -> list[str]:
    """An op's arguments as a struct, which knows its schema and the types of all arguments, in order."""
    *opening, end = _struct(f"{constant(op)[1:]}Call", bases, own)
    mutable = {
        name: f"Tensor({letter}!){'?' * fields[name].endswith('None')}"
        for name, letter in zip(filled, "abcd", strict=False)
    }
    schema = [f"{mutable.get(name, TYPES[kind][1])} {name}" for name, kind in fields.items()]
    types = [TYPES[kind][0] for kind in fields.values()]
    *first, last = wrapped(f"{op}({', '.join(schema)}) -> {result}", '      "', '"')
    return [
        *opening,
        "  static constexpr const char* kSchema =",
        *first,
        f"{last};",
        "  using Types = std::tuple<",
        *wrapped(f"{', '.join(types)}>;", "      "),
        end,
    ]


def headers() -> dict[str, str]:
    """The text of each file."""
    files = {"activations.h": activations(), "calls.h": calls(), "cpu.h": cpu(), "sm90.h": sm90()}
    return files | {"accepted.h": accepted(), "router.h": router(), "sm90_act_formats.h": act_formats()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write csrc/generated instead of printing")
    write = parser.parse_args().write
    for name, text in headers().items():
        if write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / name).write_text(text)
        else:
            print(text)


if __name__ == "__main__":
    main()
