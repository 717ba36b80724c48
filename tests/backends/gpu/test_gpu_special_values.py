"""NaN, infinities and tiny values on the GPU: every format of every backend, few tokens and many."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import activation_layers
import pytest
import special_rows
import torch
from gpu_layers import FORMATS, Format, Sizes, as_reference, make_raw, needs_cuda, prepare
from special_rows import Batch

import torch_moe_ops as moe

pytestmark = [pytest.mark.gpu, needs_cuda]

SIZES = Sizes(experts=8, top_k=2, hidden=512, inter=256)


def _cases() -> Iterator[tuple[Format, str]]:
    """Every format with an activation that clamps; in kernels of our own with a plain silu and one that compares, too.

    Triton would compile each of these for each format; test_activations_of_everything has them.
    """
    for fmt in FORMATS:
        yield fmt, "swigluoai"
        if not fmt.backend.startswith("triton"):
            yield fmt, "silu"
            yield fmt, "relu2_no_mul"


# Single rows of layers this small: one code of the intermediate on the other side of a tie, or fp8 sums of 13 bits.
BOUND = 0.1


def batches(whole: Batch) -> list[list[int]]:
    """Rows: each kind alone and beside a plain row, all of them, and enough of them for the kernels of many tokens."""
    rows = list(range(len(whole.kinds)))
    alone = [[row] for row in rows[::2]]
    pairs = [[row + 1, row] for row in rows[::2]]
    return [*alone, *pairs, rows, rows * (1 + 320 // len(rows))]


@pytest.mark.parametrize(("fmt", "activation"), list(_cases()), ids=str)
def test_rows(fmt: Format, activation: str) -> None:
    raw = make_raw(fmt, dataclasses.replace(SIZES, activation=activation))
    w, oracle = prepare(raw, fmt), as_reference(raw, fmt)
    dtype = torch.bfloat16
    whole = special_rows.make_batch(w.hidden_size, SIZES.experts, SIZES.top_k, dtype, "cuda")
    want = moe.fused_moe_routed(whole.x, whole.ids, whole.weights, oracle, out_dtype=torch.float32)
    special_rows.check_oracle(whole, want)
    for rows in batches(whole):
        special_rows.check(
            lambda x, ids, weights: moe.fused_moe_routed(x, ids, weights, w, out_dtype=torch.float32),
            whole.take(rows),
            want[rows],
            BOUND,
        )


@pytest.mark.parametrize(("activation", "limit"), activation_layers.WITH_LIMITS)
@pytest.mark.parametrize(
    ("backend", "scheme"), (("triton", "none"), ("triton", "nvfp4"), ("cuda_sm90", "nvfp4"), ("cuda_sm90_bf16", "none"))
)
def test_activations_of_everything(backend: str, scheme: str, activation: str, limit: float | None) -> None:
    raw = activation_layers.layer(activation, limit, scheme, torch.bfloat16, 128, "cuda")
    against = moe.explain(raw, act_format="none", device="cuda").against.get(backend, [f"no backend {backend}"])
    if against:
        pytest.skip("; ".join(against))
    want, got = (activation_layers.outputs(raw, name, torch.bfloat16) for name in ("reference", backend))
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got[want.isfinite()], want[want.isfinite()], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_quantizer_ops_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Codes and scales of rows that are not finite, byte for byte."""
    x = special_rows.make_batch(512, 4, 2, dtype).x
    gscale = moe.dynamic_gscale_nvfp4(x)
    torch.testing.assert_close(moe.dynamic_gscale_nvfp4(x.cuda()).cpu(), gscale, rtol=0, atol=0, equal_nan=True)
    quantizers = {
        "nvfp4": lambda x: moe.quantize_nvfp4(x, 300.0),
        "nvfp4 dynamic": lambda x: moe.quantize_nvfp4(x, gscale.to(x.device)),
        "mxfp4": moe.quantize_mxfp4,
        "mxfp8": moe.quantize_mxfp8,
        "fp8": moe.quantize_fp8,
        "fp8 static": lambda x: moe.quantize_fp8(x, 20.0),
        "fp8 group": lambda x: moe.quantize_fp8(x, group=128),
        "int8": moe.quantize_int8,
        "int8 static": lambda x: moe.quantize_int8(x, 20.0),
    }
    for name, quantize in quantizers.items():
        for got, want in zip(quantize(x.cuda()), quantize(x), strict=True):
            if want.dtype == torch.float32:
                torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
            else:
                assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)), name
