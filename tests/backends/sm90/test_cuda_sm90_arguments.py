"""What the ops of the Hopper kernels refuse by themselves: arguments that Python never gives, on a GPU of compute
capability 9.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sm90_cases import in_tiles, make_call, why_not_here
from torch import Tensor

from torch_moe_ops.backends import cuda_sm90
from torch_moe_ops.backends.sm90.common import NO_ROUTER
from torch_moe_ops.core.call import ExpertsCall, for_kernels
from torch_moe_ops.core.kernel_facts import own_of

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]

WHAT_ROUNDS = "quantize_hidden and quantize_intermediate must be False, and hidden_states_scale absent, unless"


def run(call: ExpertsCall, act_format: str, hidden: bool, intermediate: bool, scale: Tensor | None = None) -> Tensor:
    own: dict[str, Any] = {"act_format": act_format, "quantize_hidden": hidden, "quantize_intermediate": intermediate}
    out = torch.empty_like(call.hidden_states)
    given = for_kernels(call._replace(hidden_states_scale=scale))
    arguments = own_of["experts_sm90"](own | {"kernel": cuda_sm90.DECODE})
    torch.ops.moeq_C.experts_sm90(out, *given, *NO_ROUTER, *arguments)
    return out


def call_of(scheme: str) -> ExpertsCall:
    weights = {"weights": {"group": -1}} if scheme == "int8" else {}
    return in_tiles(make_call(scheme, hidden=128, inter=128, tokens=3, **weights))


ROUNDED = ((True, True), (True, False), (False, True))


@pytest.mark.parametrize("scheme", ("fp8", "fp8_block", "mxfp8", "int8"))
@pytest.mark.parametrize("rounded", ROUNDED)
def test_what_is_not_rounded_beside_these_weights(scheme: str, rounded: tuple[bool, bool]) -> None:
    call = call_of(scheme)
    assert run(call, "nvfp4", False, False).isfinite().all()
    for act_format in {"nvfp4", "fp8", "mxfp8"} - {scheme.removesuffix("_block")}:
        with pytest.raises(RuntimeError, match=f"experts_sm90: {WHAT_ROUNDS}"):
            run(call, act_format, *rounded)


@pytest.mark.parametrize("scheme", ("fp8", "fp8_block"))
def test_hidden_states_and_intermediate_are_rounded_together_beside_fp8(scheme: str) -> None:
    call = call_of(scheme)
    assert run(call, "fp8", True, True).isfinite().all()
    for rounded in ROUNDED[1:]:
        with pytest.raises(RuntimeError, match="experts_sm90: beside fp8 weights hidden states and intermediate must"):
            run(call, "fp8", *rounded)


def test_blocks_have_no_given_scales() -> None:
    call = call_of("fp8_block")._replace(a2_gscale=torch.tensor(30.0, device="cuda"))
    with pytest.raises(RuntimeError, match="experts_sm90: a1_gscale and a2_gscale must be absent beside weights"):
        run(call, "fp8", True, True)
    with pytest.raises(RuntimeError, match="experts_sm90: hidden_states_scale must be contiguous"):
        run(call_of("fp8_block"), "fp8", False, True, torch.ones(3, 2, device="cuda"))


@pytest.mark.parametrize("scheme", ("mxfp4", "mxfp8"))
@pytest.mark.parametrize("name", ("a1_gscale", "a2_gscale"))
def test_mxfp8_activations_have_no_given_scales(scheme: str, name: str) -> None:
    call = call_of(scheme)._replace(**{name: torch.full((call_of(scheme).w13.shape[0],), 30.0, device="cuda")})
    with pytest.raises(RuntimeError, match="experts_sm90: a1_gscale and a2_gscale must be absent where act_format"):
        run(call, "mxfp8", True, True)


@pytest.mark.parametrize(
    ("scheme", "act_format"),
    (("nvfp4", "mxfp8"), ("mxfp4", "nvfp4"), ("int4", "nvfp4"), ("int4", "mxfp8")),
)
def test_formats_that_have_no_kernel(scheme: str, act_format: str) -> None:
    with pytest.raises(RuntimeError, match=f"experts_sm90: {WHAT_ROUNDS}"):
        run(call_of(scheme), act_format, True, True)


def test_given_scales_go_with_a_rounded_intermediate() -> None:
    call, scale = call_of("nvfp4"), torch.ones(3, 1, device="cuda")
    assert run(call, "fp8", False, True, scale).isfinite().all()
    with pytest.raises(
        RuntimeError, match="experts_sm90: quantize_intermediate must be True where hidden_states_scale"
    ):
        run(call, "fp8", False, False, scale)
    assert run(call_of("fp8"), "fp8", False, True, scale).isfinite().all()
    with pytest.raises(RuntimeError, match=f"experts_sm90: {WHAT_ROUNDS}"):
        run(call_of("mxfp8"), "fp8", False, True, scale)
