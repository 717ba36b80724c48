"""Adapters in the Hopper kernels of many tokens (Backend.rows_by_slot), against the same pass by torch in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_layers import needs_cuda
from lora_cases import factors_of
from problems import Case, make_batch, make_raw
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.backends.sm90 import common
from torch_moe_ops.backends.triton_engine.backward_pass import Pass
from torch_moe_ops.core.kernel_facts import arguments_of
from torch_moe_ops.gradients import experts, layer_pass, lora_layer, on_gpu
from torch_moe_ops.gradients import lora as lora_factors
from torch_moe_ops.ops import lora as lora_op
from torch_moe_ops.tuning.tuned_kernels import KERNELS

pytestmark = [
    pytest.mark.gpu,
    needs_cuda,
    pytest.mark.skipif(
        torch.cuda.is_available() and not common.runs_on(torch.device("cuda")), reason="needs the kernels for Hopper"
    ),
]
BOUND, BOUND_OF_HALVES = 6e-3, 8e-3  # as tests/backends/triton/test_triton_lora.py has them
BASE = Case(tokens=300, experts=5, top_k=3, hidden=256, inter=192, foreign=True, bias=True)
CASES = {
    "narrow": dataclasses.replace(BASE, experts=16, top_k=2, tokens=200),
    "wide": dataclasses.replace(BASE, tokens=900),
    "mxfp4, swigluoai": dataclasses.replace(BASE, scheme="mxfp4", activation="swigluoai"),
    "odd sizes": dataclasses.replace(BASE, scheme="mxfp4", hidden=320, inter=160, tokens=333),
    "alphas of halves": dataclasses.replace(BASE, per_half=True, bias=False, tokens=1111),
    "one expert each": dataclasses.replace(BASE, top_k=1, experts=3, tokens=257, foreign=False),
    "none of them here": dataclasses.replace(BASE, experts=40, top_k=1, tokens=641),
}


def _forward(case: Case, w: moe.PreparedWeights, lora: moe.Lora, seed: int) -> Tensor:
    x, ids, weights = (t.cuda() for t in make_batch(dataclasses.replace(case, seed=seed)))
    lora_ids = None
    if isinstance(lora.scaling, Tensor) and lora.scaling.numel() > 1:
        lora_ids = (torch.arange(case.tokens, device="cuda") % 3 - 1).int()
    return moe.fused_moe_routed(x, ids, weights, w, lora=lora, lora_ids=lora_ids)


RUNS = [
    *((name, 1, 16, "both") for name in CASES),
    *((name, 1, 16, only) for name in ("narrow", "wide") for only in ("13", "2")),
    *((name, *ranks, "both") for name in ("narrow", "wide") for ranks in ((2, 4), (3, 20))),
]


@pytest.mark.parametrize(("name", "adapters", "rank", "only"), RUNS)
def test_beside_float32(name: str, adapters: int, rank: int, only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    raw = make_raw(case)
    w = moe.prepare(raw, act_format="none", backend="cuda_sm90", device="cuda", activation=case.activation)
    lora = factors_of(raw, adapters, rank, torch.bfloat16).to("cuda")
    if only != "both":
        left_out = ("a2", "b2") if only == "13" else ("a13", "b13")
        lora = dataclasses.replace(lora, **dict.fromkeys(left_out))
    assert case.tokens * case.top_k > on_gpu.FEW_ROWS_BY_SLOT * case.experts  # else few.py runs
    own, calls = BACKENDS["cuda_sm90"], []

    def counted(p: Pass) -> object:
        calls.append(p)
        assert own.rows_by_slot is not None
        return own.rows_by_slot(p)

    _use(dataclasses.replace(own, rows_by_slot=counted), monkeypatch)
    found = {seed: [_forward(case, w, lora, seed) for _ in range(2)] for seed in (1, 2)}
    assert len(calls) == 4
    _use(dataclasses.replace(own, dequantize=None), monkeypatch)
    monkeypatch.setattr(experts, "triton_serves", lambda rows: False)
    for module in (layer_pass, lora_factors):
        monkeypatch.setattr(module, "product_dtype", lambda rows: torch.float32)
    for seed, (once, again) in found.items():
        error = relative_l2(once, _forward(case, w, lora, seed))
        print(f"{name} {only} {adapters} x {rank}: {error:.2e}")
        assert error <= (BOUND_OF_HALVES if case.per_half else BOUND)
        assert torch.equal(once, again)


def _use(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lora_op, "lora_layer", lambda call, _, sizes, given: lora_layer.lora_layer(call, backend, sizes, given)
    )


def test_more_tokens_than_a_piece_has() -> None:
    """Rows by slot begin where a piece of the tokens does: an expert's rows are the same as in a call of its own."""
    case = Case(tokens=70000, experts=2, top_k=1, hidden=8192, inter=64, foreign=False, bias=False)  # 1.1 GB of rows
    raw = make_raw(dataclasses.replace(case, tokens=1))
    w = moe.prepare(raw, act_format="none", backend="cuda_sm90", device="cuda")
    lora = factors_of(raw, 1, 16, torch.bfloat16).to("cuda")
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(case.tokens, case.hidden, device="cuda", dtype=torch.bfloat16, generator=g)
    ids = torch.randint(0, 2, (case.tokens, 1), device="cuda", dtype=torch.int32, generator=g)
    weights = torch.rand(case.tokens, 1, device="cuda", generator=g)
    whole = moe.fused_moe_routed(x, ids, weights, w, lora=lora)
    for part in (slice(0, 2000), slice(66000, 70000)):
        alone = moe.fused_moe_routed(x[part], ids[part], weights[part], w, lora=lora)
        assert relative_l2(whole[part], alone) <= 1e-3


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("low", lambda t: t[:-1], "low must be contiguous"),
        ("low", lambda t: None, "low and factor must be given together"),
        ("factor", lambda t: t[..., :12].contiguous(), "ranks must be a multiple of 8, got 12"),
        ("factor", lambda t: t[:, :-1].contiguous(), "factor must be contiguous"),
        ("rows", lambda t: None, "rows of GEMM2 given"),
        ("rows", lambda t: t.float(), "rows must be contiguous"),
        ("kept", lambda t: t[:-1], "kept must be contiguous"),
        ("kernel", lambda kernel: 0, "kernel must be one of prefill's"),
    ],
)
def test_the_op_guards_memory(name: str, given: Callable[[Any], Any], message: str) -> None:
    """What Python could pass wrongly is refused before a kernel reads or writes beyond it."""
    case = BASE
    raw = make_raw(case)
    w = moe.prepare(raw, act_format="none", backend="cuda_sm90", device="cuda")
    x, ids, weights = (t.cuda() for t in make_batch(case))
    slots = case.tokens * case.top_k
    own = {
        "low": torch.zeros(slots, 1, 2, 32, device="cuda", dtype=torch.bfloat16),
        "factor": torch.zeros(case.experts, case.hidden, 16, device="cuda", dtype=torch.bfloat16),
        "rows": torch.zeros(slots, case.hidden, device="cuda", dtype=torch.bfloat16),
        "kept": torch.zeros(
            torch.ops.moeq_C.experts_sm90_rows_kept(case.tokens, case.top_k, case.experts, case.hidden, case.inter),
            device="cuda",
            dtype=torch.uint8,
        ),
        "second": True,
        "kernel": KERNELS.index("narrow"),
    }
    arguments = {
        "out": x, "hidden_states": x, "topk_ids": ids, "topk_weights": weights, "activation": "silu", "swiglu_alpha": 1.0,
        "swiglu_beta": 0.0, "swiglu_limit": float("inf"), "local_expert_offset": 0, "router_weight_on_input": False,
        "w13": w.w13, "w13_scale": w.w13_scale, "g1_alphas": w.g1_alphas, "w2": w.w2, "w2_scale": w.w2_scale,
        "g2_alphas": w.g2_alphas,
    }  # fmt: skip
    absent = dict.fromkeys(arguments_of("experts_sm90_rows"))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.moeq_C.experts_sm90_rows(**absent | arguments | own | {name: given(own[name])})
