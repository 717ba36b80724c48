"""MXFP4, MXINT4 and INT4 weights on the Hopper kernels against the oracle, on a GPU of compute capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90_cases import KERNELS, error_of, in_tiles, make_call, relative_error, run_on, why_not_here

import torch_moe_ops as moe
from torch_moe_ops.backends import Problem

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]
kernels = pytest.mark.parametrize("kernel", KERNELS)

FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mxfp4", {}),
    ("mxint4", {}),
    ("int4", {"group": 32}),
    ("int4", {"group": 64}),
    ("int4", {"group": 128}),
    ("int4", {"group": -1}),
    ("int4", {"group": 64, "zero": True}),
    ("int4", {"group": 128, "scale_dtype": torch.float16}),
    ("int4", {"group": -1, "zero": True, "scale_dtype": torch.float16}),
)
formats = pytest.mark.parametrize(("scheme", "weights"), FORMATS, ids=str)
# MXFP4: codes and scales are exact; what is left is the order of float32 sums. The others: code times scale is rounded
# to bfloat16 (1.7e-3 relative in the mean), in both GEMMs.
LIMITS = {"mxfp4": 2e-3, "mxint4": 4e-3, "int4": 4e-3}
LIMIT_BF16 = 4e-3

# experts, top_k, hidden, inter, tokens
SHAPES = ((8, 2, 128, 128, 5), (16, 4, 2880, 704, 9), (60, 6, 2048, 1408, 33), (64, 8, 1024, 256, 300))


def fits(weights: dict[str, Any], *sizes: int) -> bool:
    group = weights.get("group", -1)
    return group < 0 or all(size % group == 0 for size in sizes)


@kernels
@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(kernel: str, scheme: str, weights: dict[str, Any], shape: tuple[int, ...]) -> None:
    fields: dict[str, Any] = dict(zip(("experts", "top_k", "hidden", "inter", "tokens"), shape, strict=True))
    if not fits(weights, fields["hidden"], fields["inter"]):
        fields |= {"hidden": 2816, "inter": 640}
    assert error_of(kernel, scheme=scheme, weights=weights, **fields, out_dtype=torch.float32) < LIMITS[scheme]
    assert error_of(kernel, scheme=scheme, weights=weights, **fields) < LIMIT_BF16


@kernels
@formats
@pytest.mark.parametrize("activation", ("silu", "swigluoai", "gelu", "relu2_no_mul"))
def test_activations_and_biases(kernel: str, scheme: str, weights: dict[str, Any], activation: str) -> None:
    fields = {"hidden": 128, "inter": 128, "tokens": 11, "activation": activation, "bias": True}
    fields |= {"out_dtype": torch.float32, "weights": weights}
    assert error_of(kernel, scheme=scheme, **fields) < LIMITS[scheme]


@kernels
@formats
def test_foreign_ids_and_equal_runs(kernel: str, scheme: str, weights: dict[str, Any]) -> None:
    call = make_call(scheme, hidden=256, inter=128, tokens=40, top_k=3, foreign=True, weights=weights)
    tiled = in_tiles(call)
    out = run_on(kernel, tiled)
    assert not out[-1].any()  # every expert of the last token is foreign
    assert relative_error(out, call._replace(topk_weights=call.topk_weights.nan_to_num(1.0))) < LIMIT_BF16
    for _ in range(3):
        assert torch.equal(run_on(kernel, tiled), out)


@pytest.mark.parametrize("scheme", ("mxfp4", "mxint4", "int4"))
@pytest.mark.parametrize("tokens", (0, 1, 9, 300))
def test_the_op_against_the_reference_backend(scheme: str, tokens: int) -> None:
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(8, 256, 256, generator=g) / 16, torch.randn(8, 256, 128, generator=g) / 11
    raw = moe.quantize_experts(w13.bfloat16(), w2.bfloat16(), scheme).to("cuda")
    x = torch.randn(tokens, 256, generator=g).bfloat16().cuda()
    logits, routing = torch.randn(tokens, 8, generator=g).cuda(), moe.Routing("renormalize", 2)
    out = moe.fused_moe(x, logits, moe.prepare(raw, backend="cuda_sm90"), routing=routing)
    expected = moe.fused_moe(x, logits, moe.prepare(raw, backend="reference"), routing=routing).double()
    assert out.shape == (tokens, 256)
    assert (out.double() - expected).norm() <= LIMIT_BF16 * expected.norm()


@pytest.mark.parametrize("scheme", ("mxfp4", "mxint4", "int4"))
def test_auto_takes_it(scheme: str) -> None:
    sizes = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128}
    problem = Problem(scheme, device="cuda", capability=(9, 0), **sizes)
    assert moe.explain(problem).chosen == "cuda_sm90", str(moe.explain(problem))
