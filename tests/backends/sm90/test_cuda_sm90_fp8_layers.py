"""Whole layers of fp8 activations, or of 8-bit weights, through prepare and the ops, on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from samples import overload
from sm90_cases import why_not_here
from sm90_layers import batch, check_graph, random_raw
from tolerances import layer_bound
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import cuda_sm90, cuda_sm90_fp8, cuda_sm90_w4a8

REASON = why_not_here()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "it is there")]


class Kind(NamedTuple):
    """tiles: what the backend's `prepare` makes of weights; None where that cannot be undone."""

    scheme: str
    backend: str
    policy: str = "exact"
    tiles: Callable[[moe.RawWeights], dict[str, Tensor]] | None = None
    act_format: str = "fp8"

    def prepare(self, raw: moe.RawWeights, backend: str) -> moe.PreparedWeights:
        return moe.prepare(raw, act_format=self.act_format, weight_policy=self.policy, backend=backend)

    def layer(self, seed: int = 0) -> tuple[moe.RawWeights, moe.PreparedWeights]:
        raw = random_raw(self.scheme, seed)
        return raw, self.prepare(raw, self.backend)


KINDS = {
    "packed": Kind("nvfp4", "cuda_sm90_packed", "packed", lambda raw: cuda_sm90_w4a8.prepare(False, raw)),
    "folded": Kind("nvfp4", "cuda_sm90_folded", "folded"),
    "packed-mxfp4": Kind("mxfp4", "cuda_sm90_packed", "packed", lambda raw: cuda_sm90_w4a8.prepare(False, raw)),
    "folded-mxfp4": Kind("mxfp4", "cuda_sm90_folded", "folded"),
    "fp8": Kind("fp8", "cuda_sm90_fp8", tiles=cuda_sm90_fp8.prepare),
    "fp8_block": Kind("fp8_block", "cuda_sm90_fp8", tiles=cuda_sm90_fp8.prepare),
    **{
        f"{scheme}-a16": Kind(scheme, "cuda_sm90", tiles=cuda_sm90.prepare, act_format="none")
        for scheme in ("fp8", "fp8_block", "mxfp8", "int8")
    },
    "mxfp8": Kind("mxfp8", "cuda_sm90", tiles=cuda_sm90.prepare, act_format="mxfp8"),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
@pytest.mark.parametrize("tokens", (0, 1, 7, 500))
def test_the_op_against_the_reference_backend(kind: Kind, tokens: int) -> None:
    raw, w = kind.layer()
    x, ids, weights = batch(tokens)
    out = moe.fused_moe_routed(x, ids, weights, w)
    expected = moe.fused_moe_routed(x, ids, weights, kind.prepare(raw, "reference")).double()
    assert out.shape == (tokens, 256)
    bound = layer_bound(kind.backend, kind.act_format, out.dtype, ids.numel() * w.intermediate_size)
    assert (out.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("tokens", (400, 700))  # up to 160 an expert in the mean, and more: tokens first, or wide tiles
@kinds
def test_a_captured_graph_replays_other_routings_and_weights(kind: Kind, tokens: int) -> None:
    _, w = kind.layer()
    check_graph(w, tokens, lambda seed: random_raw(kind.scheme, seed))


@kinds
def test_opcheck(kind: Kind) -> None:
    _, w = kind.layer()
    x, ids, weights = batch(5)
    keywords = {"act_format": kind.act_format, "weight_policy": kind.policy, "backend": kind.backend}
    torch.library.opcheck(overload(f"{kind.scheme}_moe_routed"), (x, None, ids, weights, *w.op_weights()), keywords)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.tiles])
def test_prepare_is_the_same_on_both_devices_and_comes_back(name: str) -> None:
    kind = KINDS[name]
    raw, w = kind.layer()
    assert kind.tiles is not None
    for field, tensor in kind.tiles(raw.to("cpu")).items():
        assert torch.equal(tensor, getattr(w, field).cpu()), field
    for field, tensor in moe.restore(w).tensors().items():
        assert torch.equal(tensor.view(torch.uint8), getattr(raw, field).contiguous().view(torch.uint8)), field
