"""vLLM's stacks of adapters on a GPU, without vLLM: read by captured kernels where vLLM writes them between replays."""

from __future__ import annotations

from types import SimpleNamespace as Namespace

import pytest
import torch
from cuda_graphs import captured
from gpu_layers import needs_cuda
from problems import Case, make_batch, make_raw
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.vllm.adapters import Adapters
from torch_moe_ops.weights.lora_layouts import from_vllm

pytestmark = [pytest.mark.gpu, needs_cuda]
BOUND = 6e-3
ADAPTERS, RANKS = 3, 8


def _stacks(raw: moe.RawWeights) -> dict[str, tuple[Tensor, ...]]:
    """Of gate and up, and of w2, by vLLM's names; on a CPU."""
    g = torch.Generator().manual_seed(1)
    e, h, i = raw.num_experts, raw.hidden_size, raw.intermediate_size

    def drawn(*size: int) -> Tensor:
        return (torch.randn(ADAPTERS, e, *size, generator=g) / 8).bfloat16()

    return {
        "w13_lora_a_stacked": (drawn(RANKS, h), drawn(RANKS, h)),
        "w13_lora_b_stacked": (drawn(i, RANKS), drawn(i, RANKS)),
        "w2_lora_a_stacked": (drawn(RANKS, i),),
        "w2_lora_b_stacked": (drawn(h, RANKS),),
    }


def _expected(raw: moe.RawWeights, stacks: dict[str, tuple[Tensor, ...]], batch: list[Tensor], ids: Tensor) -> Tensor:
    """By the reference, from copies of the stacks."""
    a13, b13 = from_vllm(stacks["w13_lora_a_stacked"], stacks["w13_lora_b_stacked"])
    a2, b2 = from_vllm(stacks["w2_lora_a_stacked"], stacks["w2_lora_b_stacked"])
    lora = moe.Lora(a13, b13, a2, b2, torch.ones(ADAPTERS))
    w = moe.prepare(raw, act_format="none", backend="reference")
    return moe.fused_moe_routed(*batch, w, lora=lora, lora_ids=ids)


@pytest.mark.parametrize("tokens", [1, 9, 200])
@pytest.mark.parametrize("backend", ["triton", "cuda_sm90"])
def test_adapters_that_change_between_replays(backend: str, tokens: int) -> None:
    case = Case(tokens=tokens, experts=6, top_k=3, hidden=256, inter=128, foreign=True)
    raw, batch = make_raw(case), list(make_batch(case))
    against = moe.explain(raw, act_format="none", device="cuda").against[backend]
    if against:
        pytest.skip("; ".join(against))
    w = moe.prepare(raw, act_format="none", backend=backend, device="cuda")
    kept = _stacks(raw)
    on_gpu = {name: tuple(t.cuda() for t in stack) for name, stack in kept.items()}
    mapping = torch.zeros(tokens, dtype=torch.int64, device="cuda")  # as vLLM's, -1 where a token has none
    context = Namespace(**on_gpu, max_loras=ADAPTERS, punica_wrapper=Namespace(_token_lora_indices=mapping))
    adapters, given = Adapters(context), [t.cuda() for t in batch]

    def run() -> Tensor:
        return moe.fused_moe_routed(*given, w, lora=adapters.lora, lora_ids=adapters.ids(tokens))

    graph, out = captured(run)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(-1, ADAPTERS, (tokens,), generator=g, dtype=torch.int32)
        mapping.copy_(ids)
        if seed:  # another adapter is loaded into a slot, of fewer ranks, and one is cleared
            for name in kept:
                for stack, mine in zip(on_gpu[name], kept[name], strict=True):
                    for tensor in (stack, mine):
                        tensor[seed] = 0
                    some = (torch.randn(mine[0].shape, generator=g) / 8).bfloat16()
                    some[
                        (slice(None), slice(RANKS // 2, None)) if "_a_" in name else (..., slice(RANKS // 2, None))
                    ] = 0
                    stack[0].copy_(some)
                    mine[0].copy_(some)
        graph.replay()
        assert relative_l2(out, _expected(raw, kept, batch, ids)) <= BOUND
