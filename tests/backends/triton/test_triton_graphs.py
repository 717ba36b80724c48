"""The Triton engine in CUDA graphs: captured once, replayed with other routings, bitwise equal to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from triton_cases import empty_output, make_call

from torch_moe_ops.backends import triton as backend
from torch_moe_ops.core.call import ExpertsCall

pytestmark = pytest.mark.gpu
TOKENS = 24


def routings(call: ExpertsCall) -> list[torch.Tensor]:
    """Other random ids, all tokens to one expert, half of the experts empty, nobody local."""
    experts, like = call.w13.shape[0], call.topk_ids
    g = torch.Generator().manual_seed(9)
    shuffled = torch.randint(0, experts, like.shape, generator=g).to(like)
    return [shuffled, torch.full_like(like, experts - 1), shuffled // 2, torch.full_like(like, -1)]


@pytest.mark.parametrize(
    ("scheme", "fields"),
    (
        ("nvfp4", {}),
        ("nvfp4", {"act_format": "nvfp4", "a1": 500.0, "a2": 300.0}),
        ("nvfp4", {"act_format": "nvfp4", "a1": "expert", "a2": "expert"}),
        ("nvfp4", {"act_format": "nvfp4"}),
        ("none", {}),
        ("mxfp4", {}),
        ("mxfp4", {"act_format": "mxfp8"}),
        ("fp8", {"act_format": "fp8"}),
        ("fp8_block", {"act_format": "fp8"}),
        ("int8", {"act_format": "int8", "weights": {"group": -1}}),
        ("int4", {"weights": {"group": 64, "zero": True}}),
    ),
)
@pytest.mark.parametrize("tokens", (1, TOKENS))
def test_replay_follows_the_routing(scheme: str, fields: dict[str, Any], tokens: int) -> None:
    call = make_call(scheme, tokens=tokens, experts=8, top_k=4, hidden=256, inter=128, **fields)
    backend.run(call, empty_output(call))  # compiles
    torch.cuda.synchronize()
    captured = empty_output(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(call, captured)
    for ids in (call.topk_ids.clone(), *routings(call)):
        call.topk_ids.copy_(ids)
        call.hidden_states.normal_()
        captured.fill_(float("nan"))
        graph.replay()
        eager = empty_output(call)
        backend.run(call, eager)
        assert torch.isfinite(eager).all()
        assert torch.equal(captured, eager)


def test_runs_on_the_current_stream() -> None:
    call = make_call("nvfp4", tokens=TOKENS, hidden=256, inter=128)
    expected = empty_output(call)
    backend.run(call, expected)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    out = empty_output(call)
    gate = torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        call.topk_weights.mul_(2.0)  # seen only by work that waits for this stream
        backend.run(call, out)
        gate.record()
    gate.synchronize()
    assert torch.equal(out.float(), (expected.float() * 2).to(out.dtype).float())


def test_no_synchronization() -> None:
    call = make_call("nvfp4", "nvfp4", tokens=TOKENS, hidden=256, inter=128)
    out = empty_output(call)
    backend.run(call, out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.run(call, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
