"""What the package uses of torch's private names is listed, and a torch that lacks one is refused by name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torch_moe_ops
from torch_moe_ops.core import torch_names
from torch_moe_ops.transports import members

PACKAGE = Path(torch_names.__file__).parents[1]


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _imported(tree: ast.Module) -> dict[str, str]:
    """Names of a file that torch's modules, or what is in them, go by."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _is_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def _is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _chain(node: ast.AST) -> list[str]:
    """["torch", "_C", "_overlaps"] of torch._C._overlaps; empty where it is not rooted in a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _chain(node.value)
        return [*before, node.attr] if before else []
    return []


def private_names(source: str) -> set[str]:
    """What the code of a file takes of torch that begins with an underscore, or lies in what does."""
    tree = ast.parse(source)
    imported = _imported(tree)
    found = set(imported.values())
    for node in ast.walk(tree):
        first, *rest = _chain(node) or [""]
        if first in imported:
            found.add(".".join((imported[first], *rest)))
    return {name for name in found if _is_private(name)}


def _listed() -> set[str]:
    both = torch_names.NEEDED | torch_names.SYMMETRIC_MEMORY
    return {f"{module}.{name}" for module, names in both.items() for name in names}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._overlaps(a, b)", {"torch._C", "torch._C._overlaps"}),
        ("from torch import _C as c\nc.f()", {"torch._C", "torch._C.f"}),
        ("def f():\n    import torch._x.y as z\n    z.empty()", {"torch._x.y", "torch._x.y.empty"}),
        ("from torch._x import f", {"torch._x.f"}),
        ("import torch\ntorch.mm(a, b), a._version, torch.__version__", set()),
        ("from mine import torch\ntorch._C", set()),
    ],
)
def test_private_names(source: str, names: set[str]) -> None:
    assert private_names(source) == names


def test_all_are_listed() -> None:
    """Each is listed, or leads to one, or is of one."""
    listed = _listed()
    used = set().union(*(private_names(path.read_text()) for path in PACKAGE.rglob("*.py")))
    ends = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    within = {name: {of for of in listed if f"{name}.".startswith(f"{of}.")} for name in ends}
    not_listed = [name for name, of in within.items() if not of]
    assert not not_listed, "list them in NEEDED of torch_moe_ops/core/torch_names.py"
    assert set().union(*within.values()) == listed


def test_this_torch_has_all() -> None:
    assert torch_names.missing(torch_names.NEEDED | torch_names.SYMMETRIC_MEMORY) == []


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"torch": ("_check", "_no_such"), "torch._no_such": ("a", "b")}
    assert torch_names.missing(wanted) == ["torch._no_such", "torch._no_such.a", "torch._no_such.b"]


def test_without_a_name_importing_says_so() -> None:
    """Also of names that files take as they are imported."""
    program = (
        "import torch, torch._functorch.utils as utils\n"
        "del torch._C._overlaps, utils.enable_single_level_autograd_function\n"
        "torch.__version__ = '9.9'\n"
        "import torch_moe_ops"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: torch_moe_ops {torch_moe_ops.__version__} needs torch._C._overlaps, "
        "torch._functorch.utils.enable_single_level_autograd_function, which torch 9.9 does not have: "
        "install torch 2.11 to 2.15, or a newer torch-moe-ops"
    )


def test_without_symmetric_memory_p2p_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "has_cuda_extension", lambda: True)
    monkeypatch.setattr(members.torch.version, "cuda", "13.0")
    monkeypatch.setattr(members.torch.ops.moeq_C, "ep_p2p_dispatch", None, raising=False)
    assert members._lacks() == ""
    monkeypatch.delattr("torch.distributed._symmetric_memory.rendezvous")
    assert members._lacks().endswith(" does not have torch.distributed._symmetric_memory.rendezvous")
