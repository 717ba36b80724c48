"""torch.compile and opcheck over the FlashInfer-backed ops: one graph where FlashInfer's own functions break it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw
from torch._dynamo.testing import CompileCounter

import torch_moe_ops as moe

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
from flashinfer_cutlass_cases import CASES as CUTLASS_CASES
from flashinfer_cutlass_cases import raw_of
from flashinfer_sim import seam
from flashinfer_trtllm_cases import CASES, NVFP4, layers
from samples import as_bytes, overload

ROUTING = moe.Routing("renormalize", 2)


def prepared(monkeypatch: pytest.MonkeyPatch, backend: str) -> moe.PreparedWeights:
    seam.allow_cpu(monkeypatch, backend)
    seam.install(monkeypatch)
    if backend == "flashinfer_cutlass":
        seam.install_cutlass(monkeypatch, (10, 0))
    return moe.prepare(make_raw(NVFP4), act_format="nvfp4", backend=backend)


BACKENDS = pytest.mark.parametrize("backend", ["flashinfer_trtllm", "flashinfer_cutlass"])


@BACKENDS
def test_one_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = prepared(monkeypatch, backend)
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        routed = moe.fused_moe_routed(x * 2, ids, weights, w)
        return routed + moe.fused_moe(x, logits, w, routing=ROUTING)

    for tokens in (5, 9):
        batch = make_batch(dataclasses.replace(NVFP4, tokens=tokens))
        logits = torch.randn(tokens, NVFP4.experts)
        eager = moe.fused_moe_routed(batch[0] * 2, *batch[1:], w) + moe.fused_moe(batch[0], logits, w, routing=ROUTING)
        assert torch.equal(layer(*batch, logits), eager)
    assert counter.frame_count == 1


@BACKENDS
def test_inductor(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = prepared(monkeypatch, backend)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, i, g: moe.fused_moe_routed(x * 2, i, g, w) + 1, fullgraph=True)
    x, ids, weights = make_batch(NVFP4)
    assert torch.equal(compiled(x, ids, weights), moe.fused_moe_routed(x * 2, ids, weights, w) + 1)


def test_flashinfers_own_function_does_not_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ops are for. If this starts to pass, say so in the docs."""
    from torch_moe_ops.backends.flashinfer import package

    w = prepared(monkeypatch, "flashinfer_trtllm")
    entry = package.entry("trtllm_fp4_block_scale_routed_moe")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(entry, "function", lambda **arguments: seen.update(arguments) or torch.zeros(5, 256))
    moe.fused_moe_routed(*make_batch(NVFP4), w)
    monkeypatch.undo()
    seam.install(monkeypatch)
    torch._dynamo.reset()
    from flashinfer.fused_moe import core

    with pytest.raises(Exception, match=r"(?i)unsupported|graph break|trac"):
        torch.compile(lambda: core.trtllm_fp4_block_scale_routed_moe(**seen), fullgraph=True, backend="eager")()


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        "nvfp4 half alphas",
        "nvfp4 dynamic",
        "mxfp4 gpt-oss",
        "mxint4",
        "fp8",
        "fp8 channel",
        "fp8_block",
        "none",
    ],
)
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seam.allow_cpu(monkeypatch, "flashinfer_trtllm")
    seam.install(monkeypatch)
    w, _ = layers(CASES[name])
    check(w, CASES[name])


@pytest.mark.parametrize("name", ["bf16 bias", "fp8", "fp8_block", "nvfp4", "mxfp4 mxfp8", "mxfp8"])
def test_opcheck_of_cutlass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, case = CUTLASS_CASES[name]
    seam.allow_cpu(monkeypatch, "flashinfer_cutlass", capability)
    seam.install_cutlass(monkeypatch, capability)
    check(moe.prepare(raw_of(case), act_format=case.act_format, backend="flashinfer_cutlass"), case)


def check(w: moe.PreparedWeights, case: Case) -> None:
    """opcheck of the three overloads of a scheme."""
    x, ids, weights = make_batch(case)
    prefix = {"none": ""}.get(case.scheme, f"{case.scheme}_")
    options = {"act_format": w.act_format, "activation": w.activation}
    tensors = tuple(as_bytes(t) for t in w.op_weights())  # opcheck cannot compare float8 on a CPU
    routed = (x, None, ids, weights, *tensors, w.backend)
    torch.library.opcheck(overload(f"{prefix}moe_routed"), routed, options)
    out = torch.zeros(case.tokens, case.hidden, dtype=case.dtype)
    torch.library.opcheck(overload(f"{prefix}moe_routed.out"), routed, {**options, "out": out})
    logits = torch.randn(case.tokens, case.experts)
    monolithic = (x, None, logits, None, *tensors, w.backend, "renormalize", case.top_k)
    torch.library.opcheck(overload(f"{prefix}moe"), monolithic, options)


def test_warmup_runs_every_step_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    import flashinfer

    from torch_moe_ops.flashinfer import warmup

    w = prepared(monkeypatch, "flashinfer_trtllm")
    tuned: list[bool] = []

    @contextlib.contextmanager
    def autotune(tune_mode: bool) -> Any:
        tuned.append(tune_mode)
        yield

    monkeypatch.setattr(flashinfer, "autotune", autotune)
    said: list[str] = []
    warmup(w, top_k=2, tokens=(1, 7), progress=said.append)
    assert tuned == [True, True]
    assert [text.rsplit(", ", 1)[1] for text in said] == ["1 tokens", "7 tokens"]


def test_calls_take_what_warmup_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's own tuner, told times instead of measuring them: the best tactic of each GEMM, looked up once."""
    from flashinfer.autotuner import AutoTuner
    from flashinfer_sim import cutlass

    from torch_moe_ops.flashinfer import warmup

    capability, case = CUTLASS_CASES["bf16"]
    seam.allow_cpu(monkeypatch, "flashinfer_cutlass", capability)
    calls = seam.install_cutlass(monkeypatch, capability)
    times, measured = {0: 3.0, 1: 1.0, 2: 2.0, 3: 5.0, 4: 0.5}, []

    def profile(self: Any, runner: Any, inputs: Any, tactic: int, *rest: Any, **options: Any) -> float:
        measured.append(tactic)
        return times[tactic]

    for name, value in (("get_gemm1_tactic_count", 3), ("get_gemm2_tactic_count", 2), ("get_tactic_occupancy", 1)):
        monkeypatch.setattr(cutlass.Runner, name, lambda self, *a, value=value: value, raising=False)
    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    w = moe.prepare(raw_of(case), act_format="none", backend="flashinfer_cutlass")
    try:
        warmup(w, case.top_k, tokens=(4,), progress=lambda text: None)
        assert set(measured) == set(times)
        found = len(measured)
        warmup(w, case.top_k, tokens=(4, 64), progress=lambda text: None)
        assert len(measured) == found
        moe.fused_moe_routed(*make_batch(case), w)
        assert list(calls[-1]["profile_ids"]) == [1, 4]
    finally:
        AutoTuner.get().clear_cache()
