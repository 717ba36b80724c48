"""What the transformers plug-in says where a package is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from modules_by_path import ROOT

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
try:
    import torch_moe_ops.transformers
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("transformers", " needs transformers 5.17 or later: pip install 'torch-moe-ops[transformers]'"),
        ("regex", ": transformers is installed, but does not import: No module named 'regex'"),
    ],
)
def test_it_is_the_one_that_is_named(package: str, said: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITHOUT, package]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"torch_moe_ops.transformers{said}\n"
