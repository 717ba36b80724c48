"""Weights other than NVFP4 on the Hopper kernels, against the oracle, on a GPU of compute capability 9.0.

MXFP4 is exact in bfloat16. INT4 is not: the kernels round each weight to it once, so they are held to the oracle with
weights that have been rounded, as to that with NVFP4, and to the exact one within ROUNDED_INT4. But some multiply sums by
scales, and round no weight, in groups of more than 32: decode where there are zero points, float16 or float32 scales, slim
tiles where there are the latter two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90_cases import KERNELS, WEIGHTS, in_tiles, make_call, of_a_checkpoint, rounded, rounds, run_on, why_not_here
from tolerances import ROUNDED_INT4, layer_bound, relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.kernel_facts import SM90_KERNELS
from torch_moe_ops.oracle.reference import experts_reference
from torch_moe_ops.weights.raw_weights import RawWeights

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

# As for NVFP4: what is left is the order of float32 sums, which rounds the intermediate and the output differently.
LIMIT = 2e-3
LIMIT_BF16 = 4e-3

F16, F32 = torch.float16, torch.float32
# Scheme and options of the int4 scales; group -1: a row.
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mxfp4", {}),
    ("mxint4", {}),
    *(("int4", {"group": group}) for group in (32, 64, 128, -1)),
    ("int4", {"group": 64, "zero": True}),
    ("int4", {"group": 128, "zero": True}),
    ("int4", {"group": 128, "scale_dtype": F16}),
    ("int4", {"group": 128, "scale_dtype": F16, "zero": True}),
    ("int4", {"group": -1, "scale_dtype": F16, "zero": True}),
    ("int4", {"group": 32, "zero": True}),
    ("int4", {"group": 32, "scale_dtype": F16}),
    ("int4", {"group": 32, "scale_dtype": F16, "zero": True}),
    ("int4", {"group": 64, "scale_dtype": F32}),
    ("int4", {"group": 128, "scale_dtype": F32, "zero": True}),
    ("int4", {"group": -1, "scale_dtype": F32, "zero": True}),
)
formats = pytest.mark.parametrize(("scheme", "weights"), FORMATS, ids=str)

# experts, top_k, hidden, inter, tokens
SHAPES = (
    (8, 2, 192, 160, 20),
    (8, 2, 96, 160, 40),
    (8, 1, 160, 64, 3),
    (16, 4, 2720, 704, 9),
    (16, 4, 2880, 704, 9),
    (16, 4, 2688, 1856, 2),
    (60, 6, 2048, 1408, 33),
    (256, 8, 1024, 256, 130),
    (512, 22, 1024, 128, 17),
)


def make(
    scheme: str, weights: dict[str, Any], shape: tuple[int, ...] = (8, 2, 256, 128, 5), **fields: Any
) -> ExpertsCall:
    """A random call; a group that does not divide a size is a row, and then it is one for both weights."""
    experts, top_k, hidden, inter, tokens = shape
    group = weights.get("group", 0)
    if group > 0 and (hidden % group or inter % group):
        weights = weights | {"group": -1}
    sizes = {"experts": experts, "top_k": top_k, "hidden": hidden, "inter": inter, "tokens": tokens}
    return of_a_checkpoint(make_call(scheme, weights=weights, **sizes | fields))


def distance(out: Tensor, want: Tensor) -> float:
    assert torch.isfinite(out).all()
    want = want.to(out.dtype)  # rounded once, as the result is
    return relative_l2(out, want)


def check(call: ExpertsCall, limit: float, kernels: tuple[str, ...] = KERNELS) -> None:
    """All kernels; the oracle takes longer than they do."""
    tiled = in_tiles(call)
    for exact in {not rounds(kernel, tiled) for kernel in kernels}:
        want = experts_reference(call if exact else rounded(call), dtype=torch.float64)
        for kernel in kernels:
            if rounds(kernel, tiled) != exact:
                assert distance(run_on(kernel, tiled), want) < limit, kernel


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(scheme: str, weights: dict[str, Any], shape: tuple[int, ...]) -> None:
    check(make(scheme, weights, shape, out_dtype=torch.float32), LIMIT)


@pytest.mark.parametrize(("scheme", "weights"), FORMATS[1:], ids=str)
def test_how_far_rounded_weights_are(scheme: str, weights: dict[str, Any]) -> None:
    call = make(scheme, weights, SHAPES[4], out_dtype=torch.float32)
    want, tiled = experts_reference(call, dtype=torch.float64), in_tiles(call)
    for kernel in KERNELS:
        far = distance(run_on(kernel, tiled), want)
        assert (LIMIT < far < ROUNDED_INT4) if rounds(kernel, tiled) else far < LIMIT, kernel


@pytest.mark.parametrize(("scheme", "weights"), FORMATS[1:], ids=str)
@pytest.mark.parametrize("tokens", (1, 2, 8, 16, 64, 300))
def test_each_shape_of_kernel(scheme: str, weights: dict[str, Any], tokens: int) -> None:
    """Every kernel at few tokens and many, those without grid barriers among them."""
    call = make(scheme, weights, (8, 2, 384, 256, tokens), out_dtype=torch.float32)
    check(call, LIMIT, (*SM90_KERNELS, "gathered"))


@pytest.mark.parametrize("weights", [w for scheme, w in FORMATS if scheme == "int4"], ids=str)
@pytest.mark.parametrize("tokens", (1, 3, 8, 33, 300))
def test_int4_beside_fp8_activations(weights: dict[str, Any], tokens: int) -> None:
    """A code of the intermediate that another order of sums moves comes on top."""
    for sizes in ((8, 2, 384, 256), (16, 4, 2880, 704)):
        call = make("int4", weights, (*sizes, tokens), out_dtype=torch.float32, act_format="fp8")
        values = tokens * sizes[1] * sizes[3]
        check(call, layer_bound("cuda_sm90", "fp8", torch.float32, values), SM90_KERNELS)


@formats
def test_biases_and_an_activation_with_constants(scheme: str, weights: dict[str, Any]) -> None:
    fields = {"bias": True, "activation": "swigluoai", "constants": (1.702, 1.0, 7.0)}
    check(make(scheme, weights, (8, 2, 320, 160, 37), **fields), LIMIT_BF16)


@formats
def test_without_gate(scheme: str, weights: dict[str, Any]) -> None:
    check(make(scheme, weights, activation="relu2_no_mul", out_dtype=torch.float32), LIMIT)


@formats
def test_foreign_ids_contribute_nothing(scheme: str, weights: dict[str, Any]) -> None:
    call = make(scheme, weights, foreign=True)
    tiled = in_tiles(call)
    for kernel in KERNELS:
        assert not run_on(kernel, tiled)[-1].any()  # every expert of the last token is foreign
    check(call._replace(topk_weights=call.topk_weights.nan_to_num(1.0)), LIMIT_BF16)


@formats
def test_runs_are_bitwise_equal(scheme: str, weights: dict[str, Any]) -> None:
    tiled = in_tiles(make(scheme, weights, (16, 4, 512, 384, 50)))
    for kernel in KERNELS:
        first = run_on(kernel, tiled)
        for _ in range(5):
            assert torch.equal(run_on(kernel, tiled), first), kernel


@formats
def test_a_layer_from_its_checkpoint_form(scheme: str, weights: dict[str, Any]) -> None:
    """prepare, the op from router logits on, both sides of the switch between the kernels, and the way back."""
    call = make(scheme, weights, (8, 2, 256, 128, 80))
    raw = RawWeights(call.scheme, **{name: getattr(call, name) for name in WEIGHTS})
    w = moe.prepare(raw, act_format="none", backend="cuda_sm90" if scheme == "mxfp4" else "cuda_sm90_int4")
    for tokens in (3, 80):
        x, ids, factors = (t[:tokens].contiguous() for t in (call.hidden_states, call.topk_ids, call.topk_weights))
        cut = call._replace(hidden_states=x, topk_ids=ids, topk_weights=factors)
        kernel = "decode" if tokens == 3 else "prefill"
        want = experts_reference(rounded(cut) if rounds(kernel, in_tiles(cut)) else cut, dtype=torch.float64)
        assert distance(moe.fused_moe_routed(x, ids, factors, w), want) < LIMIT_BF16
    back = moe.restore(w)
    for name, tensor in raw.tensors().items():
        assert torch.equal(getattr(back, name).view(torch.uint8), tensor.view(torch.uint8)), name
