"""The tests' own order: where files lie, that texts name files which are there, and that tests of a backend say which."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import required
from attribution import FOLDERS, backends_of
from paths import ROOT, TESTS

from torch_moe_ops.backends import BACKENDS

NO_TESTS = {"support", "programs", "data", "cpp", "records"}
SM90 = TESTS / "backends" / "sm90" / "test_planted.py"
TEXTS = (".py", ".sh", ".md", ".toml", ".yml", ".h", ".cuh", ".cu", ".cpp", "Makefile")
# In these, names of files are made up.
EXAMPLES = {"tests/repository/test_records.py", "tests/repository/test_rooms_of_tests.py"}


def test_every_test_lies_in_a_room() -> None:
    files = list(TESTS.rglob("*.py"))
    assert [path.name for path in files if path.parent == TESTS] == ["conftest.py"]
    rooms = {path.relative_to(TESTS).parts[0] for path in files if path.name.startswith("test_")}
    assert not rooms & NO_TESTS
    others = [path for path in files if not path.name.startswith("test_") and path.parent != TESTS]
    assert {path.relative_to(TESTS).parts[0] for path in others} == {"support", "programs"}


def test_names_of_files_are_unique() -> None:
    """Helpers are imported by name; a test is found by it."""
    counts = Counter(path.name for path in TESTS.rglob("*.py") if "flashinfer_sim" not in path.parts)
    assert [name for name, count in counts.items() if count > 1] == []


def test_texts_name_files_of_tests_that_are_there() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no git repository, which says what belongs to the tree")
    missing = []
    for name in listed.stdout.split():
        if name.endswith(TEXTS) and name not in EXAMPLES and (ROOT / name).exists():
            found = re.findall(r"(?<![\w/.])tests/[\w/.*]*[\w*]", (ROOT / name).read_text("utf-8"))
            missing += [f"{name}: {path}" for path in found if not any(ROOT.glob(path)) and "NAME" not in path]
    assert missing == []


def test_folders_of_backends_name_registered_ones() -> None:
    folders = {path.name for path in (TESTS / "backends").iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    assert folders - set(FOLDERS) == {"gpu"}, "tests of all backends on a GPU: their parameters say which"
    named = {folder: backends_of(TESTS / "backends" / folder / "test_planted.py", {}) for folder in FOLDERS}
    nobodys = [folder for folder, backends in named.items() if not backends]
    assert not nobodys, (
        f"no registered backend's name begins as FOLDERS of tests/support/attribution.py says: {nobodys}"
    )
    homeless = set(BACKENDS) - {"reference"} - frozenset().union(*named.values())
    assert not homeless, f"say in FOLDERS of tests/support/attribution.py which folder of tests/backends has {homeless}"


@pytest.mark.parametrize(
    ("path", "parameters", "said"),
    [
        (SM90, {}, {name for name in BACKENDS if name.startswith("cuda_sm90")}),
        (SM90, {"backend": "cuda_sm90_bf16", "tokens": 3}, {"cuda_sm90_bf16"}),
        (TESTS / "ops" / "test_planted.py", {"backend": "triton"}, {"triton"}),
        (TESTS / "ops" / "test_planted.py", {"sizes": [1, 2], "scheme": "nvfp4"}, set()),
    ],
)
def test_what_a_test_says(path: Path, parameters: dict[str, object], said: set[str]) -> None:
    assert backends_of(path, parameters) == said


def test_what_a_test_says_decides_whether_it_had_to_run() -> None:
    """Where it says nothing, the reason for which it was skipped does."""
    missing = {"flashinfer_cutlass": "flashinfer-python must be installed"}
    cutlass, triton = frozenset({"flashinfer_cutlass"}), frozenset({"triton"})
    assert required.concerns("another release is needed", missing, on_gpu=False, said=cutlass)
    assert not required.concerns("needs a CUDA device", missing, on_gpu=True, said=triton)
    assert required.concerns("needs a CUDA device", missing, on_gpu=False, said=frozenset())
    assert not required.concerns("another release is needed", missing, on_gpu=False, said=frozenset())
