"""The decode kernel without grid barriers of 9 to 32 tokens, most of whose experts may be another rank's: an expert's rows
are gathered where they are multiplied."""

from __future__ import annotations

from typing import Any

import green_contexts
import pytest
import torch
from sm90_cases import (
    LONG_ROWS,
    SHARES,
    in_tiles,
    make_call,
    of_a_checkpoint,
    relative_error,
    rounded,
    rounds,
    run_on,
    why_not_here,
)
from tolerances import layer_bound

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.kernel_facts import Sm90Few
from torch_moe_ops.core.schemes import SCHEMES

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
LIMIT = 2e-3

schemes = pytest.mark.parametrize("scheme", ("nvfp4", "mxfp4"))


def share(scheme: str, shape: tuple[int, ...], seed: int = 0, **fields: Any) -> ExpertsCall:
    """A rank's experts, of which tokens choose some; ids of others are below and above them."""
    local, everyone, top_k, hidden, inter, tokens = shape
    call = of_a_checkpoint(make_call(
        scheme, experts=local, top_k=min(top_k, local), hidden=hidden, inter=inter, tokens=tokens,
        **{"out_dtype": torch.float32} | fields,
    ))  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    first = (everyone - local) // 2
    ids = torch.rand(tokens, everyone, generator=g).topk(top_k).indices.int().to(call.topk_ids.device)
    weights = torch.rand(tokens, top_k, generator=g).to(call.topk_weights.device)
    return call._replace(topk_ids=ids, topk_weights=weights, local_expert_offset=first, num_experts=everyone)


def limit_of(call: ExpertsCall) -> float:
    if call.act_format == "none":
        return LIMIT
    values = call.topk_ids.numel() * SCHEMES[call.scheme].logical_k(call.w2.shape[2])
    return layer_bound("cuda_sm90", call.act_format, call.out_dtype, values, call.activation)


def check(call: ExpertsCall, again: int = 3) -> torch.Tensor:
    """Ids that are this rank's give what the oracle says; without any, all is zero."""
    tiled = in_tiles(call)
    out = run_on("gathered", tiled)
    assert torch.isfinite(out).all()
    if call.scheme in ("int4", "mxint4") and rounds("gathered", tiled):
        call = rounded(call)
    local = call.topk_ids - call.local_expert_offset
    if ((local >= 0) & (local < call.w13.shape[0])).any():
        assert relative_error(out, call) < limit_of(call)
    else:
        assert not out.any()
    assert all(torch.equal(run_on("gathered", tiled), out) for _ in range(again))
    return out


@schemes
@pytest.mark.parametrize("shape", (*SHARES, *LONG_ROWS), ids=str)
def test_shares(scheme: str, shape: tuple[int, ...]) -> None:
    out = check(share(scheme, shape))
    if shape[0] == shape[1]:
        assert out.any(dim=1).all()


ROUNDED = {
    "nvfp4 fp8": ("nvfp4", {"act_format": "fp8"}),
    "mxfp4 fp8": ("mxfp4", {"act_format": "fp8"}),
    "mxfp4 fp8 given": ("mxfp4", {"act_format": "fp8", "a1": 90.0, "a2": 30.0}),
    "mxfp4 fp8 given for experts": ("mxfp4", {"act_format": "fp8", "a2": "expert"}),
    "mxfp4 mxfp8": ("mxfp4", {"act_format": "mxfp8"}),
    "int4 fp8": ("int4", {"act_format": "fp8", "weights": {"group": 32}}),
}


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("shape", (*SHARES, *LONG_ROWS), ids=str)
def test_rows_that_are_rounded_where_they_are(form: str, shape: tuple[int, ...]) -> None:
    scheme, fields = ROUNDED[form]
    check(share(scheme, shape, **fields))


@pytest.mark.parametrize("shape", (SHARES[0], SHARES[4], SHARES[6], SHARES[7], SHARES[8], SHARES[13]), ids=str)
@pytest.mark.parametrize(
    ("scheme", "weights"),
    [
        ("mxint4", {}),
        ("int4", {"group": 32}),
        ("int4", {"group": 128}),
        ("int4", {"group": 32, "zero": True}),
        ("int4", {"group": 64, "zero": True}),
        ("int4", {"group": 128, "scale_dtype": torch.float16}),
        ("int4", {"group": -1, "scale_dtype": torch.float32, "zero": True}),
    ],
    ids=str,
)
def test_integers(scheme: str, weights: dict[str, Any], shape: tuple[int, ...]) -> None:
    if weights.get("group", -1) > 0 and (shape[3] % weights["group"] or shape[4] % weights["group"]):
        weights = weights | {"group": -1}
    check(share(scheme, shape, weights=weights))


@pytest.mark.parametrize("tokens", (9, 32))
def test_an_intermediate_size_that_fills_no_tile(tokens: int) -> None:
    check(share("nvfp4", (5, 7, 6, 192, 176, tokens)))


@pytest.mark.parametrize("activation", ("silu", "swigluoai"))
def test_outputs_and_activations(activation: str) -> None:
    for dtype, limit in ((torch.bfloat16, 4e-3), (torch.float16, LIMIT)):
        call = share("nvfp4", SHARES[1], out_dtype=dtype, activation=activation)
        assert relative_error(run_on("gathered", in_tiles(call)), call) < limit


@schemes
def test_all_of_them_at_one_expert(scheme: str) -> None:
    """A rank that gets every pair: an expert with 32 rows is multiplied several times, and another one's are eight."""
    call = share(scheme, (32, 128, 8, 2048, 768, 32))
    call.topk_ids[:] = call.local_expert_offset + 7
    check(call)
    call.topk_ids[:] = torch.arange(8, device=call.topk_ids.device) + call.local_expert_offset
    check(call)


@pytest.mark.parametrize("tokens", (9, 32))
def test_nobody_s_tokens(tokens: int) -> None:
    """Of tokens that have no expert here nothing is read, and zeros are written."""
    call = share("nvfp4", (32, 128, 8, 2048, 768, tokens))
    call.topk_ids[::2] = call.local_expert_offset - 1
    call.hidden_states[::2] = float("nan")
    call.topk_weights[::2] = float("nan")
    out = check(
        call._replace(hidden_states=call.hidden_states.nan_to_num(0.0), topk_weights=call.topk_weights.nan_to_num(0.0))
    )
    assert torch.equal(run_on("gathered", in_tiles(call)), out)
    assert not out[::2].any()
    call.topk_ids[:] = -1
    assert not run_on("gathered", in_tiles(call)).any()
    call.topk_ids[3, 2], call.topk_ids[4, 0], call.topk_ids[5, 1] = 2**31 - 1, -(2**31), call.local_expert_offset
    out = run_on(
        "decode",
        in_tiles(
            call._replace(
                hidden_states=call.hidden_states.nan_to_num(1.0), topk_weights=call.topk_weights.nan_to_num(1.0)
            )
        ),
    )
    assert out.any(dim=1).nonzero().tolist() == [[5]]


@pytest.mark.parametrize("multiprocessors", (8, 16))
def test_rows_that_wait_for_room_in_a_part_of_the_device(multiprocessors: int) -> None:
    """Each block changes its expert many times."""
    call = share("nvfp4", LONG_ROWS[0])
    tiled = in_tiles(call)
    (part,) = green_contexts.split(multiprocessors, 1)
    stream = part.stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        out = [run_on("gathered", tiled) for _ in range(3)]
    torch.cuda.synchronize()
    assert relative_error(out[0], call) < LIMIT
    assert all(torch.equal(again, out[0]) for again in out)


def test_a_row_of_nan_stays_alone() -> None:
    call = share("nvfp4", (32, 32, 8, 2048, 768, 32))
    want = run_on("gathered", in_tiles(call))
    call.hidden_states[13] = float("nan")
    out = run_on("gathered", in_tiles(call))
    assert out[13].isnan().all()
    others = [row for row in range(32) if row != 13]
    assert torch.equal(out[others], want[others])


def test_other_routings_in_a_graph_and_between_other_launches() -> None:
    """Launches that gather rows have an exchange of their own beside that of fewer tokens; each kind takes turns at its halves."""
    calls = [
        in_tiles(share("nvfp4", (32, 128, 8, 2048, 768, tokens), seed)) for seed, tokens in enumerate((32, 5, 17, 1, 9))
    ]
    want = [run_on("gathered", call) for call in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [run_on("gathered", call) for call in calls for _ in range(2)]
    for _ in range(20):
        graph.replay()
    assert all(torch.equal(a, want[at // 2]) for at, a in enumerate(out))
    other = share("nvfp4", (32, 128, 8, 2048, 768, 32), seed=9)
    calls[0].topk_ids.copy_(other.topk_ids)
    graph.replay()
    assert torch.equal(out[0], run_on("gathered", calls[0]))
    assert not torch.equal(out[0], want[0])


def test_up_to_the_most_tokens_and_slots() -> None:
    for tokens in range(7, Sm90Few.GATHERED_TOKENS + 3):
        check(share("nvfp4", (4, 16, 8, 128, 64, tokens)), again=1)
    check(share("nvfp4", (4, 40, 9, 128, 64, 29)), again=1)  # more slots
