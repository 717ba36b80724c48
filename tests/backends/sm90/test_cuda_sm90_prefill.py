"""The shapes of the Hopper prefill kernel: which one runs depends on the tokens that an expert has in the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90_cases import ACTIVATIONS, in_tiles, make_call, of_a_checkpoint, relative_error, run_on, why_not_here
from tolerances import ROUNDED_INT4, layer_bound

from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.core.kernel_facts import Sm90Few
from torch_moe_ops.tuning import tuned_kernels

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

LIMIT = 2e-3
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nvfp4", {}),
    ("mxfp4", {}),
    ("mxint4", {}),
    ("int4", {"group": 64}),
    ("int4", {"group": 64, "zero": True}),
    ("int4", {"group": 64, "scale_dtype": torch.float16, "zero": True}),
)
formats = pytest.mark.parametrize(("scheme", "weights"), FORMATS, ids=str)
MANY_EXPERTS: dict[str, Any] = {"experts": 128, "top_k": 8, "hidden": 2048, "inter": 64}
FEW_EXPERTS: dict[str, Any] = {"experts": 4, "top_k": 2, "hidden": 320, "inter": 192}


def check(scheme: str, **fields: Any) -> None:
    call = of_a_checkpoint(make_call(scheme, out_dtype=torch.float32, **fields))
    out = run_on("prefill", in_tiles(call))
    assert torch.isfinite(out).all()
    assert relative_error(out, call) < (ROUNDED_INT4 if "int4" in scheme else LIMIT)


@formats
@pytest.mark.parametrize("tokens", (7, 96, 256))
def test_two_blocks_a_multiprocessor(scheme: str, weights: dict[str, Any], tokens: int) -> None:
    check(scheme, weights=weights, tokens=tokens, **MANY_EXPERTS)


@formats
@pytest.mark.parametrize("tokens", (30, 101, 160))
def test_four_warpgroups(scheme: str, weights: dict[str, Any], tokens: int) -> None:
    check(scheme, weights=weights, tokens=tokens, **FEW_EXPERTS)


@formats
@pytest.mark.parametrize("tokens", (161, 320, 333, 1000))
def test_wide_tiles(scheme: str, weights: dict[str, Any], tokens: int) -> None:
    check(scheme, weights=weights, tokens=tokens, **FEW_EXPERTS)


@formats
@pytest.mark.parametrize("hidden", (64, 192, 320))
@pytest.mark.parametrize("inter", (32, 64, 96, 160))
def test_stages_of_one_step(scheme: str, weights: dict[str, Any], hidden: int, inter: int) -> None:
    """Odd numbers of steps in K, and tiles of rows that no block of four fills."""
    if scheme == "int4":
        weights = weights | {"group": -1}  # a row: 64 divides not all of these
    check(scheme, weights=weights, tokens=50, experts=4, top_k=2, hidden=hidden, inter=inter)


@pytest.mark.parametrize("a2", (None, 300.0, "expert"), ids=str)
@pytest.mark.parametrize("sizes", (MANY_EXPERTS, FEW_EXPERTS), ids=("many", "few"))
@pytest.mark.parametrize("tokens", (40, 200))
@pytest.mark.parametrize("activation", ("silu", "relu2_no_mul"))
def test_quantized_activations(a2: float | str | None, sizes: dict[str, Any], tokens: int, activation: str) -> None:
    call = make_call("nvfp4", "nvfp4", tokens=tokens, a1=a2, a2=a2, activation=activation, **sizes)
    out = run_on("prefill", in_tiles(call))
    assert relative_error(out, call) < 2 * LIMIT


@pytest.mark.parametrize("tokens", (100, 300))
def test_all_tokens_at_few_experts(tokens: int) -> None:
    """Tiles of the narrow and of the slim shape where experts have many times the mean."""
    call = make_call("nvfp4", tokens=tokens, out_dtype=torch.float32, **MANY_EXPERTS)
    ids = torch.arange(8, dtype=torch.int32, device=call.topk_ids.device).expand_as(call.topk_ids).contiguous()
    call = call._replace(topk_ids=ids)
    out = run_on("prefill", in_tiles(call))
    assert relative_error(out, call) < LIMIT


@pytest.mark.parametrize("top_k", (1, 7, 8, 9, 22, 32, 33, 64, 70))
@pytest.mark.parametrize("hidden", (64, 320, 2112))
@pytest.mark.parametrize("out_dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_sum_over_any_number_of_slots(top_k: int, hidden: int, out_dtype: torch.dtype) -> None:
    """What is added at a time is 8 of up to 32 slots that a block knows at a time, and a row has one block or two."""
    sizes: dict[str, Any] = {"experts": 72, "top_k": top_k, "hidden": hidden, "inter": 64}
    call = make_call("nvfp4", tokens=41, out_dtype=out_dtype, foreign=True, **sizes)
    out = run_on("prefill", in_tiles(call))
    bound = layer_bound("cuda_sm90", "none", out_dtype, call.topk_ids.numel() * 64, "silu")
    assert relative_error(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < bound


@pytest.mark.parametrize("kernel", tuned_kernels.KERNELS[1:])
@pytest.mark.parametrize("sizes", (MANY_EXPERTS, FEW_EXPERTS), ids=("many", "few"))
@pytest.mark.parametrize("tokens", (1, 60, 700))
@pytest.mark.parametrize("act_format", ("none", "nvfp4"))
def test_every_shape_runs_at_every_size(kernel: str, sizes: dict[str, Any], tokens: int, act_format: str) -> None:
    """A table may choose any; nvfp4 activations without a scale of their own take two launches."""
    call = make_call("nvfp4", act_format, tokens=tokens, out_dtype=torch.float32, **sizes)
    assert relative_error(run_on(kernel, in_tiles(call)), call) < LIMIT


@pytest.mark.parametrize("kernel", tuned_kernels.KERNELS[1:])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_shape_has_every_activation(activation: str, kernel: str) -> None:
    """With biases, ends of rows, and each rounding of the intermediate."""
    sizes: dict[str, Any] = {"experts": 3, "top_k": 2, "hidden": 320, "activation": activation, "bias": True}
    for scheme, act_format in (("nvfp4", "none"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp8"), ("mxint4", "none")):
        for inter, tokens in ((64, 9), (160, 70), (416, 400)):
            call = make_call(scheme, act_format, inter=inter, tokens=tokens, out_dtype=torch.float32, **sizes)
            out = run_on(kernel, in_tiles(call))
            bound = layer_bound("cuda_sm90", act_format, torch.float32, call.topk_ids.numel() * inter, activation)
            assert torch.isfinite(out).all()
            assert relative_error(out, call) < (ROUNDED_INT4 if scheme == "mxint4" else bound), (scheme, inter, tokens)


def test_what_no_kernel_takes_is_refused() -> None:
    tiled = in_tiles(make_call("nvfp4", tokens=1025, **FEW_EXPERTS))
    with pytest.raises(RuntimeError, match="kernel decode takes up to 1024 tokens with top_k 2, got 1025"):
        run_on("decode", tiled)
    out = torch.empty(1025, 320, dtype=torch.bfloat16, device="cuda")
    last = Sm90Few.GATHERED_KERNEL
    assert last == len(tuned_kernels.KERNELS)
    for number in (-1, last + 1):
        with pytest.raises(RuntimeError, match=f"kernel must be 0 to below {last}, or {last}, got {number}"):
            cuda_sm90.run_kernel(tiled, out, number)
