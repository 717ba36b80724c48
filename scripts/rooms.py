"""The rooms of the package, from its imports: their levels, what each imports, and what breaks the rules.

    python scripts/rooms.py [--write]

A room is an entry of torch_moe_ops/: a folder, or a module beside them. Every import counts, also those inside
functions and those for types alone. The rules (tests/repository/test_rooms.py): no circle of files, no circle of rooms,
and so an order of rooms in which each imports from lower levels only; at most seven levels. --write renews the picture
in docs/design.md.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "torch_moe_ops"
PICTURE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- rooms: begin (scripts/rooms.py --write) -->", "<!-- rooms: end -->"
FRONT = f"{PACKAGE} itself"

Graph = dict[str, set[str]]


def imports(root: Path = ROOT) -> Graph:
    """Module -> the modules of the package that it imports, anywhere in its text."""
    files = {_name(path.relative_to(root)): path for path in sorted((root / PACKAGE).rglob("*.py"))}
    return {name: set(_imported(path, files)) - {name} for name, path in files.items()}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module in modules:
            # A name of a package is a module of it, or else defined in its __init__.
            yield from (m if (m := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names)


def room(module: str) -> str:
    """The folder below the package that a module lies in, or the module's own name; FRONT for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FRONT


def between_rooms(graph: Graph) -> Graph:
    """Room -> the rooms that its files import from."""
    rooms: Graph = {room(module): set() for module in graph}
    for module, targets in graph.items():
        rooms[room(module)] |= {room(target) for target in targets} - {room(module)}
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Sets of nodes that reach one another, by Tarjan's algorithm; each sorted."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in number:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == number[node]:
            cut = stack.index(node)
            found.append(sorted(stack[cut:]))
            del stack[cut:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return [circle for circle in found if len(circle) > 1]


def levels(rooms: Graph) -> dict[str, int]:
    """Room -> one more than the highest level that it imports from, from 1 on; of a graph without circles."""
    known: dict[str, int] = {}

    def level(node: str) -> int:
        if node not in known:
            known[node] = 1 + max((level(target) for target in rooms[node]), default=0)
        return known[node]

    for node in rooms:
        level(node)
    return known


def sentence(name: str, root: Path = ROOT) -> str:
    """What a room says of itself: the first sentence of its docstring."""
    base = root / PACKAGE
    file = next(p for p in (base / name / "__init__.py", base / f"{name}.py", base / "__init__.py") if p.exists())
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
    return re.split(r"(?<=[.!?])\s", text)[0].rstrip(".")


def picture(root: Path = ROOT) -> str:
    """A table of the rooms, the highest level first."""
    rooms = between_rooms(imports(root))
    level = levels(rooms)
    lines = ["| level | room | holds | imports from |", "|---|---|---|---|"]
    for name in sorted(rooms, key=lambda name: (-level[name], name)):
        below = ", ".join(f"`{other}`" for other in sorted(rooms[name], key=lambda other: (-level[other], other)))
        lines.append(f"| {level[name]} | `{name}` | {sentence(name, root)} | {below or 'nothing'} |")
    return "\n".join(lines)


def with_picture(text: str, drawn: str) -> str:
    """A page with the table between its marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{drawn}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew docs/design.md")
    if parser.parse_args().write:
        PICTURE.write_text(with_picture(PICTURE.read_text(), picture()))
    else:
        print(picture())


if __name__ == "__main__":
    main()
