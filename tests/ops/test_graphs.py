"""torch.compile, torch.export and AOTInductor: one graph, pinned; dynamic token counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from host_library import COMPILER
from paths import PROGRAMS, ROOT
from problems import Case, make_batch, make_raw
from torch._dynamo.testing import EagerAndRecordGraphs, normalize_gm
from torch.testing._internal.common_utils import TestCase, run_tests

import torch_moe_ops as moe
from torch_moe_ops.core.schemas import FAMILIES

CASE = Case(act_format="nvfp4", input_scale="tensor", experts=4, top_k=2)
ROUTING = moe.Routing("renormalize", 2)
WRAPPER = ROOT / "scripts" / "cxx_local_archives.sh"


def _weights(backend: str = "reference") -> moe.PreparedWeights:
    return moe.prepare(make_raw(CASE), act_format="nvfp4", backend=backend)


class TestPinnedGraph(TestCase):
    """What users see in their graphs. EXPECTTEST_ACCEPT=1 rewrites the texts."""

    def test_one_graph_with_dynamic_tokens(self) -> None:
        w = _weights()
        recorder = EagerAndRecordGraphs()
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend=recorder, dynamic=None)
        def layer(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return moe.fused_moe(x, logits, w, routing=ROUTING) + x

        for tokens in (5, 9, 17):
            x = torch.randn(tokens, CASE.hidden).bfloat16()
            layer(x, torch.randn(tokens, CASE.experts))
        # One graph for the first size, one dynamic graph for all others.
        self.assertEqual(len(recorder.graphs), 2)
        self.assertExpectedInline(
            _op_lines(recorder.graphs[1]),
            """nvfp4_moe: "bf16[s0, 64]" = torch.ops.moeq.nvfp4_moe(l_x_, None, l_logits_, None, l_w_w13, l_w_w13_scale, l_w_g1_alphas, None, l_w_w2, l_w_w2_scale, l_w_g2_alphas, None, l_w_a1_gscale, l_w_a2_gscale, 'reference', 'renormalize', 2, 'nvfp4', 'silu', None, None, None, 4, 0, 0, 0, 1.0, None, 'exact', None)""",
        )

    def test_routed_graph(self) -> None:
        w = _weights()
        recorder = EagerAndRecordGraphs()
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend=recorder)
        def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return moe.fused_moe_routed(x, ids, weights, w)

        layer(*make_batch(CASE))
        self.assertEqual(len(recorder.graphs), 1)
        self.assertExpectedInline(
            _op_lines(recorder.graphs[0]),
            """nvfp4_moe_routed: "bf16[5, 64]" = torch.ops.moeq.nvfp4_moe_routed(l_x_, None, l_ids_, l_weights_, l_w_w13, l_w_w13_scale, l_w_g1_alphas, None, l_w_w2, l_w_w2_scale, l_w_g2_alphas, None, l_w_a1_gscale, l_w_a2_gscale, 'reference', 'nvfp4', 'silu', None, None, None, 4, 0, False, 'exact', None)""",
        )


def _op_lines(gm: torch.fx.GraphModule) -> str:
    text = re.sub(r"\bs\d+\b", "s0", normalize_gm(gm.print_readable(print_output=False)))
    lines = [line.strip() for line in text.splitlines() if "torch.ops.moeq" in line]
    return "\n".join(line.split(";")[0] for line in lines)


def _layer_module(w: moe.PreparedWeights) -> torch.nn.Module:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return moe.fused_moe(x, logits, w, routing=ROUTING)

    return Layer()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_compiled_equals_eager(backend: str) -> None:
    layer = _layer_module(_weights(backend))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (0, 1, 2, 33):
        x, logits = torch.randn(tokens, CASE.hidden).bfloat16(), torch.randn(tokens, CASE.experts)
        torch.testing.assert_close(compiled(x, logits), layer(x, logits), rtol=0, atol=0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_inductor_compiles_routed_ops_with_absent_tensors(family: str) -> None:
    """Absent tensors (hidden_states_scale, biases) must stay where they are when Inductor writes the call."""
    scheme = FAMILIES[family][0]
    case = Case(scheme=scheme.name, act_format=scheme.act_formats[0], hidden=96, inter=64)
    w = moe.prepare(make_raw(case), act_format=case.act_format)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe.fused_moe_routed(x * 2, ids, weights, w) + 1

    x, ids, weights = make_batch(case)
    torch.testing.assert_close(layer(x, ids, weights), moe.fused_moe_routed(x * 2, ids, weights, w) + 1, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_export_with_a_dynamic_token_dimension(backend: str) -> None:
    layer = _layer_module(_weights(backend))
    x, logits = torch.randn(7, CASE.hidden).bfloat16(), torch.randn(7, CASE.experts)
    tokens = torch.export.Dim("num_tokens")
    program = torch.export.export(layer, (x, logits), dynamic_shapes=({0: tokens}, {0: tokens}))
    for count in (0, 1, 5, 40):
        x, logits = torch.randn(count, CASE.hidden).bfloat16(), torch.randn(count, CASE.experts)
        torch.testing.assert_close(program.module()(x, logits), layer(x, logits), rtol=0, atol=0)


def test_prepared_weights_are_a_legal_export_input() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, logits: torch.Tensor, w: moe.PreparedWeights) -> torch.Tensor:
            return moe.fused_moe(x, logits, w, routing=ROUTING)

    w = _weights()
    x, logits = torch.randn(7, CASE.hidden).bfloat16(), torch.randn(7, CASE.experts)
    program = torch.export.export(Layer(), (x, logits, w))
    torch.testing.assert_close(program.module()(x, logits, w), Layer()(x, logits, w), rtol=0, atol=0)


def _package(folder: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    """aoti_package.py with a compiler of AOTInductor's behind the wrapper, and nothing of it in a cache."""
    environment = {**os.environ, "CXX": str(WRAPPER), "MOEQ_CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    command = [sys.executable, str(PROGRAMS / "aoti_package.py"), str(folder / "layer.pt2")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_aotinductor_runs_the_package(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("AOTInductor needs a C++ compiler (g++ or clang++)")
    done = _package(tmp_path, COMPILER)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@pytest.mark.slow
def test_aotinductor_with_a_libstdcxx_from_an_archive(tmp_path: Path) -> None:
    """As of a compiler that finds no shared libstdc++: without the wrapper the package cannot be loaded."""
    if COMPILER is None or not _archive_of_libstdcxx():
        pytest.skip("needs a C++ compiler and libstdc++.a")
    linker = tmp_path / "c++"
    linker.write_text(
        f'#!/bin/sh\ncase " $* " in *" -shared "*) set -- "$@" -static-libstdc++;; esac\nexec {COMPILER} "$@"\n'
    )
    linker.chmod(0o755)
    done = _package(tmp_path, str(linker))
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
    with zipfile.ZipFile(tmp_path / "layer.pt2") as package:
        models = [package.read(name) for name in package.namelist() if name.endswith(".so")]
    assert models and all(b"libstdc++.so" not in model for model in models), "the archive was not linked"


def _archive_of_libstdcxx() -> bool:
    found = subprocess.run([str(COMPILER), "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()).is_absolute()


if __name__ == "__main__":
    run_tests()
