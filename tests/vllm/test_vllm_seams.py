"""vLLM's sources have what the plug-in takes for granted: those installed, and those in MOEQ_VLLM_SOURCES."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import vllm_seams

VARIABLE = "MOEQ_VLLM_SOURCES"  # folders of the package, with ":" between them


def _sources() -> list[Path]:
    folders = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(":") if folder]
    spec = importlib.util.find_spec("vllm")
    return folders + ([Path(spec.origin).parent] if spec is not None and spec.origin is not None else [])


SOURCES = _sources()
WHY = f"vllm is not installed, and {VARIABLE} names no folder (`make test-vllm` gets both)"
needs_sources = pytest.mark.skipif(not SOURCES, reason=WHY)


@needs_sources
@pytest.mark.parametrize("folder", SOURCES, ids=lambda folder: "/".join(folder.parts[-2:]))
def test_the_interfaces_are_as_the_plug_in_has_them(folder: Path) -> None:
    assert vllm_seams.broken(folder) == []


@needs_sources
def test_the_check_notices_what_changed(tmp_path: Path) -> None:
    """Renamed parameters, lost attributes, methods and words."""
    files = {
        seam.partition(":")[0]
        for seam in (*vllm_seams.FUNCTIONS, *vllm_seams.ATTRIBUTES, *vllm_seams.ABSTRACT, *vllm_seams.TEXTS)
    }
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCES[0] / file, tmp_path / file)
    assert vllm_seams.broken(tmp_path) == []
    changes = [
        ("fused_moe/fused_moe_method_base.py", "topk_ids", "ids", "apply must take"),
        ("fused_moe/routed_experts.py", '"ModelOpt" in quant_method_name', "False", "must say"),
        ("fused_moe/config.py", "experts_per_token", "top_k", "must have ['experts_per_token']"),
        ("fused_moe/modular_kernel.py", "a1q_scale", "a1_scale", "apply must take"),
        ("fused_moe/modular_kernel.py", "def workspace_dtype", "@abstractmethod\n    def workspace_dtype", "too"),
        ("fused_moe/runner/moe_runner.py", "supports_internal_mk", "has_kernel", "must say"),
        ("quantization/modelopt.py", "_resolve_quant_algo", "_resolve", "must be there"),
    ]
    for file, old, new, complaint in changes:
        path = tmp_path / vllm_seams.LAYERS / file
        text = path.read_text()
        path.write_text(text.replace(old, new))
        vllm_seams._tree.cache_clear()
        assert any(complaint in wrong for wrong in vllm_seams.broken(tmp_path)), complaint
        path.write_text(text)
    vllm_seams._tree.cache_clear()


def test_a_folder_without_vllm_has_no_seam(tmp_path: Path) -> None:
    wrong = vllm_seams.broken(tmp_path)
    assert len(wrong) == sum(map(len, (vllm_seams.FUNCTIONS, vllm_seams.ATTRIBUTES, vllm_seams.ABSTRACT))) + sum(
        map(len, vllm_seams.TEXTS.values())
    )
