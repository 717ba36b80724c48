"""The benchmark's own layers: the peers' weights reach the library with the meaning that the peers give them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import benchmark_modules
import pytest
import torch

from torch_moe_ops.backends import BACKENDS

INT4 = ("int4", "int4g32", "int4g64", "int4zp", "int4f16", "int4zpf16", "int4g32zp", "int4g32f16", "int4g32zpf16",
        "int4g64zp", "int4g64f16", "int4g64zpf16", "int4f32", "int4zpf32", "int4row", "int4rowf16")  # fmt: skip
FORMATS = ("nvfp4", "nvfp4-a4", "nvfp4-a8", "mxfp4", "mxfp4-a8", "mxfp4-a8row", *INT4, "mxint4", "fp8", "fp8row",
           "fp8half", "fp8-a16", "fp8row-a16", "fp8half-a16", "mxfp8-a16", "mxfp8-a8", "int8", "int8-a8", "bf16",
           *(f"{fmt}-a8" for fmt in INT4))  # fmt: skip


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    with benchmark_modules.importable(monkeypatch):
        import moe_layers
        from moe_peers import common

        monkeypatch.setattr(common, "DEV", "cpu")
        yield SimpleNamespace(layers=moe_layers, common=common)


def _error(bench: Any, fmt: str, shape: Any) -> float:
    weights = bench.common.Weights.random(fmt, shape)
    layer, *alike = bench.layers.entries(["reference"], [fmt])[0].build(fmt, weights, None)
    inputs = bench.common.make_inputs(shape, 5, 1)
    with torch.inference_mode():
        errors = [
            bench.common.relative_error(x(*x.prepare(inputs)), x.reference(weights, inputs)) for x in (layer, *alike)
        ]
    assert [x.label for x in (layer, *alike)] == ["reference", "reference-silu"][: len(errors)]
    return max(errors)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_our_layers_agree_with_the_reference_of_the_peers(bench: Any, fmt: str, act: str) -> None:
    error = _error(bench, fmt, bench.common.Shape("small", 4, 2, 256, 128, act))
    assert error < bench.common.TOLERANCE[bench.common.act_bits(fmt)]


def test_auto_is_timed_as_users_get_it(bench: Any) -> None:
    weights = bench.common.Weights.random("fp8", bench.common.Shape("small", 4, 2, 256, 128))
    (layer,) = bench.layers.entries(["auto"], ["fp8"])[0].build("fp8", weights, None)
    assert layer.label == "auto" and layer.prepared.requested == "auto"
    assert layer.details(1) == {"backend": layer.prepared.backend}


def test_gpt_oss_has_biases_and_its_own_activation(bench: Any) -> None:
    shape = bench.common.Shape(bench.layers.GPT_OSS, 4, 2, 160, 96)
    assert _error(bench, "mxfp4", shape) < 1e-2


def test_formats_are_all_known(bench: Any) -> None:
    assert tuple(sorted(bench.layers.FORMATS)) == tuple(sorted(FORMATS))
    with pytest.raises(SystemExit, match=r"--fmts: must be of nvfp4, .*, got 'nvfp3'"):
        bench.layers.entries(["triton"], ["nvfp3"])
    assert bench.layers.entries(["no_such_backend"], ["nvfp4"]) == []
    assert set(bench.layers.ONLY) | set(bench.layers.POLICIES) <= set(BACKENDS)
    assert [e.fmt for e in bench.layers.entries(["triton_fp8"], list(FORMATS))] == ["fp8", "fp8row", "fp8half"]


def test_a_backend_that_cannot_run_a_format_is_skipped_with_its_reasons(bench: Any) -> None:
    weights = bench.common.Weights.random("nvfp4", bench.common.Shape("small", 4, 2, 64, 32))
    with pytest.raises(bench.common.Unsupported, match=r"device must be|flashinfer"):
        bench.layers.entries(["flashinfer_trtllm"], ["nvfp4"])[0].build("nvfp4", weights, None)


def test_what_is_compiled_ahead_is_what_is_timed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same scheme, formats, sizes and biases."""
    pytest.importorskip("triton", reason="triton is not installed")
    import warm

    for name, fmt in (("small", "nvfp4-a4"), (bench.layers.GPT_OSS, "nvfp4")):
        shape = bench.common.Shape(name, 4, 2, 64, 32)
        weights = bench.common.Weights.random(fmt, shape)
        timed = bench.layers.entries(["reference"], [fmt])[0].build(fmt, weights, None)
        for ours, ahead in zip(timed, warm.layers_of(shape, fmt), strict=True):
            assert ahead.key == ("nvfp4", "nvfp4" if fmt == "nvfp4-a4" else "none", 4, 2, 64, 32)
            assert (ahead.raw.w13_bias is None) == (ours._biases is None)
            assert ahead.raw.activation == ("silu" if ours._biases is None else "swigluoai")
    assert warm.layers_of(bench.common.Shape("odd", 4, 2, 72, 32), "nvfp4") == []
    del sys.modules["warm"]
