"""Digests of what backends are made of: they follow what is computed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from modules_by_path import ROOT, load

from torch_moe_ops.backends import BACKENDS

digests = load("scripts/backend_digests.py")

PYTHON = '''"""What it does."""
from torch_moe_ops.b import helper

LIMIT = 3  # of tokens


def run(call):
    """Runs."""
    from torch_moe_ops import c
    text = "a # b"
    return helper(call, LIMIT, text)
'''
CUDA = """// A kernel.
#include "layer.h"
namespace n {
void run(int* out) { *out = 1; /* one */ }
}
"""


def of_python(text: str) -> str:
    return digests.digest([_written(text, ".py")])


def of_cuda(text: str) -> str:
    return digests.digest([_written(text, ".cu")])


_folder: Path


@pytest.fixture(autouse=True)
def _folder_of_test(tmp_path: Path) -> None:
    global _folder
    _folder = tmp_path


def _written(text: str, suffix: str) -> Path:
    file = _folder / f"file{len(list(_folder.iterdir()))}{suffix}"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("old", "new"),
    (
        ("from torch_moe_ops.b import", "from torch_moe_ops.inner.b import"),
        ("    from torch_moe_ops import c\n", "    from torch_moe_ops.other import c\n"),
        ("  # of tokens", "  # of slots"),
        ('"""Runs."""', '"""Runs a call."""'),
        ("LIMIT = 3  # of tokens\n\n\n", "LIMIT = 3\n"),
    ),
)
def test_what_computes_nothing_leaves_a_digest(old: str, new: str) -> None:
    assert old in PYTHON
    assert of_python(PYTHON.replace(old, new)) == of_python(PYTHON)


@pytest.mark.parametrize(("old", "new"), (("LIMIT = 3", "LIMIT = 4"), ('"a # b"', '"a # c"'), ("(call, L", "(text, L")))
def test_what_computes_changes_a_digest(old: str, new: str) -> None:
    assert old in PYTHON
    assert of_python(PYTHON.replace(old, new)) != of_python(PYTHON)


def test_indentation_counts() -> None:
    text = "def f(x):\n    if x:\n        x += 1\n    return x\n"
    assert of_python(text) != of_python(text.replace("    return", "        return"))


def test_cuda_sources() -> None:
    assert of_cuda(CUDA.replace("layer.h", "sm90/layer.h").replace("one", "two").replace("A kernel", "One")) == of_cuda(
        CUDA
    )
    assert of_cuda(CUDA.replace("= 1", "= 2")) != of_cuda(CUDA)
    assert of_cuda('auto url = "http://a";') != of_cuda('auto url = "http://b";')


def _package(files: dict[str, str]) -> Path:
    root = _folder / f"tree{len(list(_folder.iterdir()))}"
    for name, text in files.items():
        file = root / "torch_moe_ops" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_moved_files_and_functions_leave_a_digest() -> None:
    helper, table = "def helper(x):\n    return x + 1\n", "TABLE = {1: 2}\n"
    main = "from torch_moe_ops.{} import helper\n\ndef run(x):\n    return helper(x)\n"
    trees = [
        {"a.py": main.format("b"), "b.py": f"from torch_moe_ops import c\n{helper}", "c.py": table},
        {"a.py": main.format("inner.deep"), "inner/deep.py": f"import torch_moe_ops.c\n{helper}{table}", "c.py": ""},
        {"a.py": main.format("b"), "b.py": helper, "unrelated.py": "X = 1\n"},  # lacks the table
    ]
    first, moved, without = (
        digests.digest(digests.python_files(root, "torch_moe_ops.a")) for root in map(_package, trees)
    )
    assert first == moved
    assert first != without


def test_names_that_are_declared_are_no_uses() -> None:
    declared = (
        "struct Plan; const void* kernel_of(Kind kind); template <class T> Variant<T> rows(int n); int run(Plan& p);"
    )
    assert not {"kernel_of", "rows", "run"} & digests._uses(declared)
    used = " inline int both(Plan& p) { return run(p); } launch(kernel_of(Kind::kOne), rows<Format>(2));"
    assert {"kernel_of", "rows", "run", "launch"} <= digests._uses(declared + used)


def test_every_compiled_source_belongs_to_a_backend() -> None:
    """But for quantizers, exchanges and routers, which are ops of their own, and the file that declares the ops."""
    compiled = {p.relative_to(ROOT) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".cpp")}
    used = {p.relative_to(ROOT) for name in BACKENDS for p in digests.files_of(name)}
    left = {str(p) for p in compiled - used}
    apart = ("csrc/cuda/module", "csrc/cuda/quantize", "csrc/cuda/dynamic_gscale", "csrc/cuda/sm90/ops/op_route")
    apart += ("csrc/cuda/expert_parallel/", "csrc/cuda/sm90/routing/route_hidden")
    assert not {p for p in left if not p.startswith(apart)}


def test_backends_depend_on_their_own_sources() -> None:
    def names(backend: str) -> set[str]:
        return {p.name for p in digests.files_of(backend)}

    assert {"bf16.cu", "combine.cu", "op_bf16.cpp", "mainloop.py"} <= names("cuda_sm90_bf16")
    assert {"w4a8.cu", "w4a8_quantize.cu", "op_w4a8.cpp"} <= names("cuda_sm90_fp8") & names("cuda_sm90_packed")
    assert {"decode_few.cu", "route.cuh", "prefill.cu", "schedule.cu", "op_experts.cpp"} <= names("cuda_sm90")
    assert {"experts.cpp", "isa_avx2.cpp", "chunk_gemm.cpp", "quantize.h", "ops.cpp"} <= names("cpu")
    assert {"decode_few_fp8.cu", "decode_few_int4.cu", "gemm_rows.cu"} <= names("cuda_sm90")
    assert not {"bf16.cu", "op_bf16.cpp"} & (names("cuda_sm90") | names("cuda_sm90_fp8")), (
        "declared beside what they use"
    )
    assert "gemm_rows.cu" not in names("cuda_sm90_bf16")
    assert "experts.cpp" not in names("cuda_sm90")
    assert not {"w4a8_int4.cu", "bf16.cu"} & names("cpu")
    assert not {"w4a8.cu", "launch.py", "experts.cpp"} & names("flashinfer_trtllm")
    assert not any(name.endswith((".cu", ".cpp")) for name in names("triton"))
    assert all("routing.py" in names(name) for name in BACKENDS)
