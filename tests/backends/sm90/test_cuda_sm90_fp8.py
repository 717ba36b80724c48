"""The `cuda_sm90_fp8` backend against the emulating oracle, on a GPU of compute capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90_cases import SHAPES_OF_BYTES, error_over_bound, fp8_in_tiles, make_call, relative_error, why_not_here
from torch import Tensor
from triton_cases import packed_input

from torch_moe_ops.backends import cuda_sm90_fp8
from torch_moe_ops.core.call import ExpertsCall

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
NAME = "cuda_sm90_fp8"
schemes = pytest.mark.parametrize("scheme", ("fp8", "fp8_block"))

# experts, top_k, hidden, inter, tokens
SHAPES = ((8, 2, 200, 136, 20), *SHAPES_OF_BYTES)


def run(tiled: ExpertsCall) -> Tensor:
    """The output, from a buffer full of NaN."""
    out = torch.full(tiled.hidden_states.shape, float("nan"), dtype=tiled.out_dtype, device="cuda")
    cuda_sm90_fp8.run_cuda(tiled, out)
    return out


def case(scheme: str, **fields: Any) -> ExpertsCall:
    usual: dict[str, Any] = {"hidden": 128, "inter": 64, "out_dtype": torch.float32}
    return make_call(scheme, "fp8", **usual | fields)


def check(call: ExpertsCall) -> None:
    out = run(fp8_in_tiles(call))
    print(f"{call.scheme} {call.w2.shape[1]} {relative_error(out, call):.2e}")
    assert error_over_bound(out, call) < 1


@schemes
@pytest.mark.parametrize("out_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(scheme: str, shape: tuple[int, ...], out_dtype: torch.dtype) -> None:
    fields = dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))
    check(case(scheme, **fields, out_dtype=out_dtype))


def uneven(count: int, tokens: int = 600, **fields: Any) -> ExpertsCall:
    """So many tokens of one expert, none of the next one, the others of the last one."""
    call = case("fp8_block", experts=3, top_k=1, tokens=tokens, **fields)
    ids = torch.full_like(call.topk_ids, 2)
    ids[torch.randperm(tokens, generator=torch.Generator().manual_seed(count))[:count]] = 0
    return call._replace(topk_ids=ids)


# What an expert has beyond a multiple of 64 tokens: nothing, up to 16, more, each in a tile of 64 and of 128.
COUNTS = (1, 8, 64, 65, 80, 81, 128, 129, 136, 144, 145, 192, 200, 208, 209, 300)


@pytest.mark.parametrize("count", COUNTS)
def test_tiles_of_many_tokens(count: int) -> None:
    """Sizes that fill neither blocks of 256 rows nor of 128, nor a step of 128 in K."""
    check(uneven(count, hidden=328, inter=176))
    check(uneven(count, hidden=704, inter=320, out_dtype=torch.bfloat16))


@pytest.mark.parametrize("count", (128, 129, 136, 144, 145, 272))
def test_tiles_of_large_experts(count: int) -> None:
    """Up to 144 tokens a tile."""
    check(uneven(count, hidden=2056, inter=2048))
    check(uneven(count, hidden=2056, inter=2048, bias=True, activation="swigluoai", out_dtype=torch.bfloat16))


@pytest.mark.parametrize("activation", ("silu", "swigluoai"))
@pytest.mark.parametrize("count", (72, 140, 190))
def test_tiles_of_many_tokens_with_biases(count: int, activation: str) -> None:
    check(uneven(count, hidden=392, inter=176, bias=True, activation=activation))


@pytest.mark.parametrize("count", (72, 140, 190))
def test_many_tokens_are_as_few_at_a_time(count: int) -> None:
    """Other kernels multiply few tokens, in the same order along K."""
    tiled = fp8_in_tiles(uneven(count, hidden=2056, inter=2048))
    names = ("hidden_states", "topk_ids", "topk_weights")
    pieces = (slice(at, at + 50) for at in range(0, 600, 50))
    few = [run(tiled._replace(**{name: getattr(tiled, name)[piece] for name in names})) for piece in pieces]
    assert torch.equal(run(tiled), torch.cat(few))


@schemes
@pytest.mark.parametrize("activation", ("silu", "gelu", "swigluoai", "situ", "relu2_no_mul", "silu_no_mul"))
def test_activations(scheme: str, activation: str) -> None:
    check(case(scheme, activation=activation, bias=True, inter=176, hidden=264, tokens=40))


@pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
@pytest.mark.parametrize(
    ("a1", "a2", "scales"),
    ((90.0, 30.0, "channel"), ("expert", "expert", "half"), (None, 30.0, "tensor"), ("expert", None, "channel")),
)
def test_scales(a1: Any, a2: Any, scales: str, activation: str) -> None:
    check(case("fp8", a1=a1, a2=a2, weights={"scales": scales}, activation=activation, inter=176, tokens=30))


@pytest.mark.parametrize(("scheme", "a2"), (("fp8", None), ("fp8", 30.0), ("fp8", "expert"), ("fp8_block", None)))
@pytest.mark.parametrize(("activation", "inter"), (("gelu", 14080), ("silu", 17408)))
def test_rows_that_are_quantized_piece_by_piece(scheme: str, a2: Any, activation: str, inter: int) -> None:
    """A block cannot hold two of the first in shared memory, and has not a thread for each piece of the second."""
    check(case(scheme, a2=a2, activation=activation, inter=inter, tokens=30))


@schemes
def test_block_scales_that_differ_widely(scheme: str) -> None:
    call = case(scheme, hidden=640, inter=512, tokens=50)
    for scale in (call.w13_scale, call.w2_scale):
        assert scale is not None
        scale.mul_(2.0 ** torch.randint(-6, 7, scale.shape, generator=torch.Generator().manual_seed(1)).to(scale))
    check(call)


@schemes
@pytest.mark.parametrize("tokens", (5, 300))
def test_tokens_that_came_quantized(scheme: str, tokens: int) -> None:
    check(packed_input(case(scheme, tokens=tokens, hidden=392)))


@schemes
def test_foreign_ids_and_router_weight(scheme: str) -> None:
    call = case(scheme, tokens=30, foreign=True)
    out = run(fp8_in_tiles(call))
    assert not out[-1].any()  # every expert of the last token is foreign
    assert error_over_bound(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < 1
    check(case(scheme, tokens=30, top_k=1, router_weight_on_input=True))


@schemes
def test_runs_are_bitwise_equal(scheme: str) -> None:
    tiled = fp8_in_tiles(case(scheme, hidden=1024, inter=320, experts=16, top_k=4, tokens=700))
    first = run(tiled)
    for _ in range(5):
        assert torch.equal(run(tiled), first)


def test_a_check_names_the_op() -> None:
    with pytest.raises(RuntimeError, match="moeq_C::experts_sm90_w4a8: activation must be a known name, got 'x'"):
        run(fp8_in_tiles(case("fp8"))._replace(activation="x"))


@schemes
def test_a_nan_row_disturbs_no_other(scheme: str) -> None:
    tiled = fp8_in_tiles(case(scheme, tokens=6))
    clean = run(tiled)
    tiled.hidden_states[3] = float("nan")
    assert torch.equal(run(tiled)[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_a_nan_row_among_many_disturbs_no_other(bad: float) -> None:
    """Of a tile's tokens one in each kind of place, and of what is left beyond 128."""
    tiled = fp8_in_tiles(uneven(140, hidden=2056, inter=2048))
    clean = run(tiled)
    rows = (tiled.topk_ids[:, 0] == 0).nonzero()[:, 0][[0, 70, 130]]
    tiled.hidden_states[rows] = bad
    others = torch.ones(600, dtype=torch.bool, device=rows.device)
    others[rows] = False
    out = run(tiled)
    assert torch.equal(out[others], clean[others])
    assert out[rows].isnan().any(1).all()
