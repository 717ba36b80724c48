"""The plan of the few-token kernel's launches, made by the host's code with no GPU: which problems it takes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cpp" / "sm90_plan_host.cu"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
HOPPER = (132, 227 * 1024)
# top_k, experts, hidden, inter
QWEN3, GPT_OSS, DEEPSEEK, MIXTRAL = (8, 128, 2048, 768), (4, 128, 2880, 2880), (8, 256, 7168, 2048), (2, 8, 4096, 14336)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if NVCC is None:
        pytest.skip("no CUDA compiler (nvcc) to build the host's code")
    path = tmp_path_factory.mktemp("plan") / "libplan.so"
    flags = ["-std=c++17", "-O1", "-gencode", "arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC", "-shared"]
    subprocess.run([NVCC, *flags, "-cudart", "static", str(SOURCE), "-o", str(path)], check=True, capture_output=True)
    return path


def takes(library: Path, layer: tuple[int, int, int, int], tokens: int, gpu: tuple[int, int] = HOPPER) -> bool:
    top_k, experts, hidden, inter = layer
    found = ctypes.CDLL(str(library)).plan_few(*gpu, tokens, top_k, experts, hidden, inter, 1, 0, 0)
    assert found in (0, 1), (layer, tokens, found)
    return found == 1


@pytest.mark.parametrize(
    ("layer", "most"),
    [(QWEN3, 8), (GPT_OSS, 4), (DEEPSEEK, 3), (MIXTRAL, 4)],
    ids=["qwen3", "gpt-oss", "dsv3", "mixtral"],
)
def test_the_tokens_that_the_documentation_names(library: Path, layer: tuple[int, int, int, int], most: int) -> None:
    assert [takes(library, layer, tokens) for tokens in range(1, 10)] == [tokens <= most for tokens in range(1, 10)]


# In a process of its own: a plan that divides by what was never written ends it.
PROGRAM = """
import ctypes, random, sys
plan = ctypes.CDLL(sys.argv[1]).plan_few
draw = random.Random(int(sys.argv[2]))
taken = 0
for _ in range(4000):
    sizes = [64 * draw.randint(1, 160), 16 * draw.randint(1, 1200)]
    top_k = draw.randint(1, 22)
    problem = (draw.randint(0, 9), top_k, draw.randint(top_k, 512), *sizes)
    found = plan(*draw.choice(((132, 232448), (78, 232448), (114, 232448), (132, 101376))), *problem,
                 draw.randint(0, 1), draw.randint(0, 1), draw.randint(0, 4))
    assert found >= 0, problem
    taken += found
print(taken)
"""


@pytest.mark.parametrize("seed", range(3))
def test_every_plan_fits_or_is_none(library: Path, seed: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(library), str(seed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 200 < int(done.stdout) < 3800


def test_sums_that_the_exchange_has_no_room_for(library: Path) -> None:
    program = (
        "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).plan_few(132, 232448, 8, 8, 256, 7168, 2048, 1, 0, 0))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(library)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "0")
