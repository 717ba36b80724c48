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
from torch_moe_ops.backends import BACKENDS, cuda_sm90
from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.backends.sm90 import common
from torch_moe_ops.backends.triton_engine.backward_pass import RANK_CHUNK, Pass
from torch_moe_ops.core.kernel_facts import arguments_of
from torch_moe_ops.core.schemes import ceil_div
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
BOUND = 4e-3  # measured on an H100: 2.7e-3 to 2.9e-3
BASE = Case(tokens=300, experts=5, top_k=3, hidden=256, inter=192, foreign=True, bias=True)
CASES = {
    "one token": dataclasses.replace(BASE, experts=16, top_k=4, tokens=1, foreign=False),
    "few tokens": dataclasses.replace(BASE, experts=16, top_k=2, tokens=5),
    "slim": dataclasses.replace(BASE, experts=16, top_k=2, tokens=100),
    "narrow": dataclasses.replace(BASE, experts=16, top_k=2, tokens=200),
    "wide": dataclasses.replace(BASE, tokens=900),
    "mxfp4, swigluoai": dataclasses.replace(BASE, scheme="mxfp4", activation="swigluoai"),
    "odd sizes": dataclasses.replace(BASE, scheme="mxfp4", hidden=320, inter=160, tokens=333),
    "half a tile": dataclasses.replace(BASE, scheme="mxfp4", hidden=352, inter=160, tokens=333),
    "half a tile, few": dataclasses.replace(BASE, hidden=96, inter=176, tokens=9),
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
    *((name, *ranks, "both") for name in ("slim", "narrow", "wide") for ranks in ((2, 4), (3, 20), (4, 32))),
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
    if name in KERNELS:
        monkeypatch.setattr(cuda_sm90, "_kernel", lambda *_, **__: KERNELS.index(name))

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
        assert error <= BOUND
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


def _unaligned(t: Tensor) -> Tensor:
    """The same values, of which the first lies behind a multiple of 16 bytes."""
    return torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape)


def _arguments(case: Case, tokens: int) -> dict[str, Any]:
    """Of a call of the op for GEMM2; the batch is that of `case` over and over."""
    w = moe.prepare(make_raw(case), act_format="none", backend="cuda_sm90", device="cuda")
    times = ceil_div(tokens, case.tokens)
    x, ids, weights = (t.cuda().repeat(times, 1)[:tokens] for t in make_batch(case))
    slots = tokens * case.top_k
    count = torch.ops.moeq_C.experts_sm90_rows_kept(tokens, case.top_k, case.experts, case.hidden, case.inter)
    given = {
        "out": torch.zeros_like(x), "hidden_states": x, "topk_ids": ids, "topk_weights": weights, "activation": "silu",
        "swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": float("inf"), "local_expert_offset": 0,
        "router_weight_on_input": False, "w13": w.w13, "w13_scale": w.w13_scale, "g1_alphas": w.g1_alphas, "w2": w.w2,
        "w2_scale": w.w2_scale, "g2_alphas": w.g2_alphas,
        "low": torch.ones(slots, 1, 2, RANK_CHUNK, device="cuda", dtype=torch.bfloat16),
        "factor": torch.ones(case.experts, case.hidden, 16, device="cuda", dtype=torch.bfloat16),
        "rows": torch.zeros(slots, case.hidden, device="cuda", dtype=torch.bfloat16),
        "kept": torch.zeros(count, device="cuda", dtype=torch.uint8),
        "second": True, "kernel": KERNELS.index("narrow"),
    }  # fmt: skip
    return dict.fromkeys(arguments_of("experts_sm90_rows")) | given


def _run(given: dict[str, Any]) -> Tensor:
    """Rows of both calls."""
    first = {"low": None, "factor": None, "rows": None, "second": False}
    torch.ops.moeq_C.experts_sm90_rows(**given | first)
    torch.ops.moeq_C.experts_sm90_rows(**given)
    torch.cuda.synchronize()
    rows: Tensor = given["rows"]
    return rows


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("low", lambda t: t[:-1], "low must be contiguous"),
        ("low", lambda t: None, "low and factor must be given together"),
        ("low", _unaligned, "low must start at a multiple of 16 bytes"),
        ("factor", lambda t: t[..., :12].contiguous(), "ranks must be a multiple of 8, got 12"),
        ("factor", lambda t: t[:, :-1].contiguous(), "factor must be contiguous"),
        ("rows", lambda t: None, "rows of GEMM2 given"),
        ("rows", lambda t: t.float(), "rows must be contiguous"),
        ("rows", _unaligned, "rows must start at a multiple of 16 bytes"),
        ("kept", lambda t: t[:-1], "kept must be contiguous"),
        ("kept", _unaligned, "kept must start at a multiple of 16 bytes"),
        ("kernel", lambda kernel: 0, "kernel must be one of prefill's"),
    ],
)
def test_the_op_guards_memory(name: str, given: Callable[[Any], Any], message: str) -> None:
    """What Python could pass wrongly is refused before a kernel reads or writes beyond it."""
    arguments = _arguments(BASE, BASE.tokens)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.moeq_C.experts_sm90_rows(**arguments | {name: given(arguments[name])})


@pytest.mark.parametrize("sizes", [(0, 2, 4, 256, 64), (8, 0, 4, 256, 64), (8, 2, 4, 0, 0), (8, -1, 4, 256, 64)])
def test_sizes_of_kept_are_checked(sizes: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"_kept: sizes must be from 1 to 2\^31 - 1, got"):
        torch.ops.moeq_C.experts_sm90_rows_kept(*sizes)


def test_kept_of_too_many_slots() -> None:
    with pytest.raises(RuntimeError, match=r"tokens \* top_k must be below 2\^31, got 2147483648"):
        torch.ops.moeq_C.experts_sm90_rows_kept(2**30, 2, 4, 256, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_out_has_the_sizes_alone(dtype: torch.dtype) -> None:
    """`out` is as it was, wherever it starts, and its dtype decides nothing: tokens of several pieces fit in `kept`."""
    case = Case(tokens=64, experts=8, top_k=4, hidden=8192, inter=64, foreign=False, bias=False)
    given = _arguments(case, 17000)  # a piece has 16384 where rows are counted in bfloat16, half as many in float32
    expected = _run(given).clone()
    guarded = torch.full((given["kept"].numel() + (1 << 20),), 7, device="cuda", dtype=torch.uint8)
    out = _unaligned(torch.full_like(given["out"], 3.0, dtype=dtype))
    own = {"kept": guarded[: given["kept"].numel()], "out": out, "rows": torch.zeros_like(expected)}
    assert torch.equal(_run(given | own), expected)
    assert (guarded[given["kept"].numel() :] == 7).all()
    assert (out == 3).all()
