"""A digest of what each backend is made of, for the records of test runs (tests/records).

    python scripts/backend_digests.py [--files NAME]

A backend depends on the Python modules that its own reaches by imports inside the package, on the router, and on the
C++ and CUDA sources of the ops that those call: the file that registers an op, what it includes, and the files that
define what the included headers declare and any of these files uses. Hashed are their top-level statements (Python) and
their texts (C++), without comments, docstrings, imports and includes, in no order: renaming a file, or moving a
function to another one that the backend reaches, leaves the digest as it is.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "torch_moe_ops"
# Imported by what backends import, and no part of what they compute: where weights come from, the release, the records.
APART = {
    f"{PACKAGE}.{name}"
    for name in (
        "weights.from_quant_config",
        "weights.quant_config_readings",
        "files.serialization",
        "core.version",
        "backends.tested",
    )
}
# What every backend's tests and its monolithic calls run besides: the router.
ROUTER = (f"{PACKAGE}.routing.options", f"{PACKAGE}.routing.reference", f"{PACKAGE}.backends.triton_engine.routing")
# And on the one kind of device that these run on.
HOPPER, HOPPER_ROUTER = "cuda_sm90", f"{PACKAGE}.backends.sm90.router"


def digest(files: Iterable[Path]) -> str:
    """Of the contents of files, whatever they are called."""
    pieces = sorted(piece for file in files for piece in _pieces(file.read_text(), file.suffix == ".py"))
    return hashlib.sha256("\n".join(pieces).encode()).hexdigest()[:16]


@cache
def _pieces(text: str, is_python: bool) -> tuple[str, ...]:
    statements = python_statements(text) if is_python else [cpp_text(text)]
    return tuple(hashlib.sha256(s.encode()).hexdigest() for s in statements if s)


def python_statements(text: str) -> list[str]:
    """Top-level statements of a module without what computes nothing: comments, docstrings, imports, blank lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if _computes_nothing(node):
            for row in range(node.lineno - 1, node.end_lineno or node.lineno):  # type: ignore[attr-defined]
                lines[row] = ""
    found = []
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        kept = (line.rstrip() for line in lines[first - 1 : node.end_lineno])
        found.append("\n".join(line for line in kept if line))
    return found


def _computes_nothing(node: ast.AST) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


_CPP_NOISE = re.compile(
    r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/|^[ \t]*#[ \t]*(?:include|pragma once)[^\n]*', re.S | re.M
)


def cpp_text(text: str) -> str:
    """Without comments and includes, white space as one blank."""
    return " ".join(_CPP_NOISE.sub(lambda found: found[1] or " ", text).split())


def python_files(root: Path, *modules: str) -> set[Path]:
    """The files of modules of the package and of all that they import from the package, anywhere in their texts."""
    todo, seen = list(modules), {}
    while todo:
        name = todo.pop()
        file = _file_of(root, name)
        if file is None or name in seen or name in APART:
            continue
        seen[name] = file
        todo += _imported(file)
    return set(seen.values())


def _file_of(root: Path, module: str) -> Path | None:
    """None: a package, which stands for all of its modules and is no dependence, or not of this package."""
    file = root.joinpath(*module.split(".")).with_suffix(".py")
    return file if file.exists() else None


@cache
def _imported(file: Path) -> tuple[str, ...]:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(name for name in names if name.startswith(f"{PACKAGE}."))


def ops_called(files: Iterable[Path]) -> set[str]:
    """The compiled ops that Python files call."""
    return {name for file in files for name in re.findall(r"\bmoeq_C\.(\w+)", file.read_text())}


class Sources:
    """The C++ and CUDA sources below a folder, and how they hang together."""

    def __init__(self, folder: Path):
        self.folder = folder
        files = sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu"))
        self.text = {file: cpp_text(file.read_text()) for file in files}
        self.includes = {file: self._includes(file) for file in files}
        self.uses = {file: _uses(text) for file, text in self.text.items()}
        self._all: dict[Path, set[Path]] = {}
        self.definers: dict[str, set[Path]] = {}
        for file in files:
            if file.suffix in (".cpp", ".cu"):
                for name in set(_DEFINED.findall(self.text[file])) | set(_INSTANTIATED.findall(self.text[file])):
                    self.definers.setdefault(name, set()).add(file)

    def _includes(self, file: Path) -> list[Path]:
        found = []
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.M):
            path = next((p for p in ((file.parent / name).resolve(), self.folder / name) if p in self.text), None)
            if path is not None:
                found.append(path)
        return found

    def of_op(self, op: str) -> set[Path]:
        """Every file that the op is compiled from."""
        files = {file for file, text in self.text.items() if f'm.impl("{op}"' in text}
        while True:
            files = files.union(*(self.all_includes(file) for file in files))
            found = files | self._definitions(files)
            if found == files:
                return files
            files = found

    def _definitions(self, files: set[Path]) -> set[Path]:
        """The sources that define what headers among the files declare, which they include, and a file uses."""
        used = set[str]().union(*(self.uses[file] for file in files))
        found: set[Path] = set()
        for header in files:
            if header.suffix in (".h", ".cuh"):
                for name in used & set(_DECLARED.findall(self.text[header])):
                    found.update(s for s in self.definers.get(name, ()) if header in self.all_includes(s))
        return found

    def all_includes(self, file: Path) -> set[Path]:
        """What a file includes, directly or not."""
        if file not in self._all:
            direct = self.includes[file]
            self._all[file] = set(direct).union(*(self.all_includes(other) for other in direct))
        return self._all[file]


_ARGUMENTS = r"\([^;{}]*?\)"
# A type, a name, its arguments, and what follows: a body, or a semicolon, where it is no call that is returned.
_DEFINED = re.compile(rf"[\w>*&]\s[*&]?(?:\w+::)*([a-zA-Z_]\w+) ?{_ARGUMENTS}(?: const)? ?{{")
_DECLARED = re.compile(
    rf"\b(?!return\b|else\b|new\b)[\w:]+(?:<[^;{{}}()]*>)?[ *&]+(?:\w+::)*([a-zA-Z_]\w+) ?(?={_ARGUMENTS}(?: const)?;)"
)
_INSTANTIATED = re.compile(rf"\btemplate [^;{{}}]*?\b([a-zA-Z_]\w+) ?<[^;{{}}]*?> ?{_ARGUMENTS};")


def _uses(text: str) -> set[str]:
    """Every name in a source but those that are declared there and nowhere mentioned else."""
    return set(re.findall(r"\w+", _DECLARED.sub(" ", text)))


def backend_modules(root: Path) -> dict[str, str]:
    """Backend name -> the module that registers it."""
    from torch_moe_ops.backends import BACKENDS

    modules = {}
    for name, backend in BACKENDS.items():
        run = getattr(backend.run, "func", backend.run)
        modules[name] = run.__module__
    for file in sorted((root / PACKAGE / "backends").glob("*.py")):  # `run` may be another backend's
        if file.stem in BACKENDS:
            modules[file.stem] = f"{PACKAGE}.backends.{file.stem}"
    return modules


def files_of(name: str, root: Path = ROOT) -> set[Path]:
    """All that a backend depends on."""
    router = (*ROUTER, HOPPER_ROUTER) if name.startswith(HOPPER) else ROUTER
    files = python_files(root, backend_modules(root)[name], *router)
    sources = _sources(root / "csrc")
    return files.union(*(sources.of_op(op) for op in ops_called(files)))


@cache
def _sources(folder: Path) -> Sources:
    return Sources(folder)


def digests(root: Path = ROOT) -> dict[str, str]:
    """Backend name -> digest of what it is made of now."""
    return {name: digest(files_of(name, root)) for name in backend_modules(root)}


def _lines(name: str) -> Iterator[str]:
    for file in sorted(files_of(name)):
        yield str(file.relative_to(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", metavar="NAME", help="list what this backend depends on instead")
    name = parser.parse_args().files
    print("\n".join(_lines(name)) if name else json.dumps(digests(), indent=2))


if __name__ == "__main__":
    main()
