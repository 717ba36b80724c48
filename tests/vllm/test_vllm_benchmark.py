"""The benchmark of vLLM's layer builds it of every format, and its weights mean what the oracle takes them for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paths import ROOT
from vllm_runs import INSTALLED, NOT_INSTALLED

from torch_moe_ops.vllm import registration, settings

pytestmark = pytest.mark.skipif(not INSTALLED, reason=NOT_INSTALLED)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its modules, on this CPU, in groups of one process."""
    from vllm_shared_layers import one_process

    before, environment = set(sys.modules), dict(os.environ)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv(settings.ACT_FORMAT, "none")
    import bench_vllm_layer
    from moe_peers import common

    registration.register()
    common.set_device("cpu")
    with one_process():
        yield SimpleNamespace(layer=bench_vllm_layer, common=common)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name in {n for n in set(sys.modules) - before if n.partition(".")[0] in ("moe_peers", "bench_vllm_layer")}:
        del sys.modules[name]


def test_layers_are_right_in_every_format(bench: Any) -> None:
    from vllm.forward_context import set_forward_context

    shape = bench.common.Shape("tiny", 8, 2, 512, 256)
    inputs = bench.common.make_inputs(shape, 5, 1)
    for number, fmt in enumerate(bench.layer.vllm_formats.FORMATS):
        weights = bench.common.Weights.random(fmt, shape)
        layer, config = bench.layer.build(bench.layer.OURS, fmt, weights, number)
        with set_forward_context(None, config), torch.inference_mode():
            found = layer(inputs.x, inputs.logits)
        error = bench.common.relative_error(found, bench.common.reference(weights, inputs))
        assert error < bench.common.TOLERANCE[16], fmt
