"""transformers' expert parallelism by ep_implementation="moeq": two and four processes over gloo, against one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from paths import ROOT, TESTS

pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.21 or later")
pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


def _run(kind: str, size: int, folder: Path) -> list[dict[str, object]]:
    program = str(TESTS / "programs" / "ep_transformers.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outs = [folder / f"{rank}.pt" for rank in range(size)]
    common = [str(size), str(folder / "store"), kind]
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), *common, str(out)], env=environment)
        for rank, out in enumerate(outs)
    ]
    try:
        codes = [process.wait(300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * size
    return [torch.load(out) for out in outs]


@pytest.mark.parametrize(
    ("kind", "size"),
    [("shared", 2), *(pytest.param(kind, size, marks=pytest.mark.slow) for kind, size in (("apart", 2), ("mixed", 4)))],
)
def test_logits_of_ranks_are_those_of_one_process(kind: str, size: int, tmp_path: Path) -> None:
    method = "_of_shared_batch" if kind == "shared" else "_exchanged"
    for found in _run(kind, size, tmp_path):
        assert found["experts"] == 8 // size
        assert found["calls"] == [method] * found["inference"]  # with gradients, transformers' own way
        assert found["inference"] == 6, found
        assert max(found["apart"].values()) < 1e-6, found["apart"]  # type: ignore[attr-defined]


def test_its_name_is_known() -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    import torch_moe_ops.transformers as moeq_transformers

    moeq_transformers.register()
    assert EPImplementationInterface()["moeq"].__name__ == "MoeqEP"
