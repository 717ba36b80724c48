"""The pages of the site: every public name is in the reference, every page is reachable, every example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from modules_by_path import ROOT

import torch_moe_ops as moe

DOCS, DATA = ROOT / "docs", ROOT / "tests" / "data"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
NOT_OBJECTS = {"__version__", "config", "ops"}  # a string; pages and sections of their own


def _examples(page: str) -> str:
    """The Python blocks of a page, one after the other, on the lines where they stand."""
    return _blocks(DOCS / page)


def _blocks(path: Path) -> str:
    lines, inside = [], False
    for line in path.read_text("utf-8").splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence and not inside else inside and not fence
    return "\n".join(lines)


WITH_EXAMPLES = [page for page in PAGES if _examples(page).strip()]


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in page:
        pytest.importorskip("transformers", minversion="5.17", reason="register needs transformers >= 5.17")
    monkeypatch.chdir(ROOT)  # paths of checkpoints are those of the source tree
    torch._dynamo.reset()
    exec(compile(_examples(page), str(Path("docs") / page), "exec"), {"__name__": "example"})


def test_the_readmes_example_runs_on_a_checkpoint_of_the_tests() -> None:
    given = "path/to/checkpoint"
    code = _blocks(ROOT / "README.md")
    assert code.count(given) == 1
    torch._dynamo.reset()
    code = code.replace(given, str(DATA / "checkpoints" / "qwen3_moe_modelopt_nvfp4"))
    exec(compile(code, "README.md", "exec"), {"__name__": "example"})


def test_the_tutorial_and_the_how_to_pages_have_examples() -> None:
    assert {"tutorial.md", "howto/backends.md", "howto/add-a-backend.md"} <= set(WITH_EXAMPLES)


def test_every_public_name_is_in_the_reference() -> None:
    named = set(re.findall(r"^::: torch_moe_ops\.(\w+)$", (DOCS / "reference.md").read_text("utf-8"), re.MULTILINE))
    assert set(moe.__all__) - NOT_OBJECTS <= named
    assert "config" in named


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [page for page in PAGES if f": {page}" not in navigation] == []
