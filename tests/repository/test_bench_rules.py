"""The benchmark of rules: under each name a call takes that kernel and no other, and the rules come back."""

from __future__ import annotations

from typing import Any

import benchmark_modules
import pytest
import torch
from sm90_cases import fp8_in_tiles
from triton_cases import make_call

from torch_moe_ops.backends import cuda_sm90, cuda_sm90_fp8, cuda_sm90_w4a8, triton
from torch_moe_ops.backends.sm90 import fp8_products
from torch_moe_ops.tuning.tuned_kernels import KERNELS


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    with benchmark_modules.importable(monkeypatch):
        import bench_rules

        yield bench_rules


def test_globals_come_back_whatever_happens(rules: Any) -> None:
    before = {(m, n): getattr(m, n) for rule in rules.RULES.values() for kind in rule.kinds.values() for m, n in kind}
    assert before
    for rule in rules.RULES.values():
        for kind in rule.kinds.values():
            with pytest.raises(KeyError), rules.replaced(kind):
                assert all(getattr(m, n) is value for (m, n), value in kind.items())
                raise KeyError
    assert all(getattr(m, n) is value for (m, n), value in before.items())


@pytest.mark.parametrize(("kind", "tokens"), (("decode", 16), ("prefill", 0)))
def test_packed(rules: Any, kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cuda_sm90_w4a8, "run", lambda weights, call, out, decode_tokens: asked.append(decode_tokens))
    call = make_call("nvfp4", "fp8", experts=4)
    for k_tiles in (1, 1 << 20):
        w2 = torch.empty((4, 1, k_tiles, 1), dtype=torch.uint8, device="meta")
        with rules.replaced(rules.RULES["packed"].kinds[kind]):
            cuda_sm90_w4a8.run_packed(call._replace(w2=w2), torch.empty(0))
    assert asked == [tokens, tokens]


@pytest.mark.parametrize(
    ("kind", "kernels"),
    (
        ("default", ["triton", "decode up to 8", "slim", "decode up to 8"]),
        ("triton", ["triton"] * 4),
        ("prefill", ["decode up to 0"] * 4),
    ),
)
def test_fp8(rules: Any, kind: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(triton, "package_reason", lambda: None)
    monkeypatch.setattr(triton, "run", lambda call, out: ran.append("triton"))
    monkeypatch.setattr(cuda_sm90, "run_kernel", lambda call, out, kernel: ran.append(KERNELS[kernel]))
    monkeypatch.setattr(cuda_sm90_w4a8, "run", lambda weights, call, out, most: ran.append(f"decode up to {most}"))
    for tokens in (1, 2, 60, 500):
        call = fp8_in_tiles(make_call("fp8_block", "fp8", tokens=tokens, experts=8, hidden=128, inter=128, top_k=2))
        with rules.replaced(rules.RULES["fp8"].kinds[kind]):
            cuda_sm90_fp8.run(call, torch.empty(0))
    assert ran == kernels


@pytest.mark.parametrize(("kind", "fp8"), (("fp8", True), ("bf16", False)))
def test_int4(rules: Any, kind: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_products, "takes", lambda call: True)
    for tokens in (1, 1000):
        call = make_call("int4", "fp8", tokens=tokens, experts=4, weights={"group": 128}, hidden=128, inter=128)
        with rules.replaced(rules.RULES["int4"].kinds[kind]):
            assert fp8_products.are_faster(call) == fp8
