"""shard and prepare(parallel=): the ranks' outputs add up to the whole layer's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from problems import Case, make_batch, make_raw
from tolerances import relative_l2
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.config import FusedMoEParallelConfig
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.weights.sharding import shard

# float32 sums in another order.
ADD_UP = 1e-6
# Formats whose scales along K lie inside a rank's part: the intermediate is quantized alike, sharded or not.
LOCAL_SCALES = ("none", "mxfp8", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3")
PAIRS = [(s.name, act) for s in SCHEMES.values() for act in s.act_formats]


def expert_parallel(ranks: int, rank: int) -> FusedMoEParallelConfig:
    return FusedMoEParallelConfig.make(ranks, 1, 1, 1, enable_expert_parallel=True, tp_rank=rank)


def tensor_parallel(ranks: int, rank: int) -> FusedMoEParallelConfig:
    return FusedMoEParallelConfig.make(ranks, 1, 1, 1, tp_rank=rank)


def layer(scheme: str, act: str = "none", **fields: Any) -> Case:
    static = {"input_scale": "expert"} if act in SCHEMES[scheme].static_acts else {}
    sizes = {"hidden": 64, "inter": 512, "experts": 5, "top_k": 3, "tokens": 9}
    known = {"act_format": act, "dtype": torch.float32, "bias": True, "per_half": True, **sizes, **static}
    return Case(scheme, **{**known, **fields})


def run(raw: moe.RawWeights, case: Case, **options: Any) -> Tensor:
    x, ids, weights = make_batch(case)
    w = moe.prepare(raw, act_format=case.act_format, backend="reference", **options)
    return moe.fused_moe_routed(x, ids, weights, w).double()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("scheme", "act"), PAIRS)
def test_expert_shards_add_up(scheme: str, act: str, ranks: int) -> None:
    """5 experts over 2 and 3 ranks: the first ones hold one more."""
    case = layer(scheme, act, inter=64)
    raw = make_raw(case)
    shares = [run(raw, case, parallel=expert_parallel(ranks, rank)) for rank in range(ranks)]
    assert all(share.abs().max() > 0 for share in shares)
    assert relative_l2(sum(shares), run(raw, case)) < ADD_UP  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
@pytest.mark.parametrize(("scheme", "act"), [p for p in PAIRS if p[1] in LOCAL_SCALES or p[0] == "fp8_block"])
def test_tensor_shards_add_up(scheme: str, act: str, activation: str) -> None:
    """4 ranks of 128 of the intermediate size; the bias of w2 counts once."""
    case = layer(scheme, act, activation=activation)
    raw = make_raw(case)
    shares = [run(raw, case, parallel=tensor_parallel(4, rank)) for rank in range(4)]
    assert relative_l2(sum(shares), run(raw, case)) < ADD_UP  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8", "int8"])
def test_tensor_shards_with_calibrated_scales_add_up(scheme: str) -> None:
    """A static scale is the same on every rank, so sharding changes no code."""
    act = SCHEMES[scheme].static_acts[0]
    case = layer(scheme, act)
    raw = make_raw(case)
    shares = [run(raw, case, parallel=tensor_parallel(2, rank)) for rank in range(2)]
    assert relative_l2(sum(shares), run(raw, case)) < ADD_UP  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shares_of_experts_and_intermediate_add_up(scheme: str) -> None:
    """Experts over 2 ranks and each expert over 2 more: shares of shares."""
    case = layer(scheme)
    raw, total = make_raw(case), torch.zeros(9, 64, dtype=torch.float64)
    for ep_rank in range(2):
        experts, num_experts, offset = shard(raw, expert_parallel(2, ep_rank))
        for tp_rank in range(2):
            part, _, inner_offset = shard(experts, tensor_parallel(2, tp_rank))
            assert (part.num_experts, part.intermediate_size, inner_offset) == (experts.num_experts, 256, 0)
            total += run(part, case, num_experts=num_experts, local_expert_offset=offset)
    assert relative_l2(total, run(raw, case)) < ADD_UP


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shares_mean_their_part_of_the_whole(scheme: str, ranks: int) -> None:
    raw: Any = make_raw(layer(scheme))
    w13, w2 = moe.dequantize_experts(raw)
    size = 512 // ranks
    for rank in range(ranks):
        local: Any
        local, num_experts, offset = shard(raw, tensor_parallel(ranks, rank))
        got13, got2 = moe.dequantize_experts(local)
        columns = slice(rank * size, (rank + 1) * size)
        assert torch.equal(got13, w13.unflatten(1, (2, 512))[:, :, columns].flatten(1, 2))
        assert torch.equal(got2, w2[:, :, columns])
        assert torch.equal(local.w13_bias, raw.w13_bias.unflatten(1, (2, 512))[:, :, columns].flatten(1, 2))
        assert (local.w2_bias is None) == (rank > 0)
        assert (num_experts, offset) == (5, 0)


def integer_layer(scheme: str, groups: int, zero_points: bool) -> Any:
    """Random codes with `groups` scales along K of w2 (1: whole rows)."""

    def scales(rows: int, count: int) -> Tensor:
        return torch.rand(2, rows, count) + 0.5

    sizes = {"w13": (256, 64, max(1, groups // 2)), "w2": (64, 128, groups)}
    fields: dict[str, Tensor] = {}
    for name, (rows, k, count) in sizes.items():
        stored = (torch.int32, k // 8) if scheme == "int4" else (torch.int8, k)
        info = torch.iinfo(stored[0])
        fields[name] = torch.randint(info.min, info.max, (2, rows, stored[1])).to(stored[0])
        fields[f"{name}_scale"] = scales(rows, count)
        if zero_points:
            zeros = torch.randint(0, 16, (2, rows, count))
            fields[f"{name}_zero_point"] = zeros.to(torch.uint8 if scheme == "int4" else torch.int8)
    return moe.RawWeights(scheme, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_groups_and_zero_points_go_with_their_codes(scheme: str, groups: int, zero_points: bool) -> None:
    raw = integer_layer(scheme, groups, zero_points)
    w13, w2 = moe.dequantize_experts(raw)
    for rank in range(2):
        local: Any = shard(raw, tensor_parallel(2, rank))[0]
        columns = slice(rank * 64, rank * 64 + 64)
        assert torch.equal(moe.dequantize_experts(local)[0], w13.unflatten(1, (2, 128))[:, :, columns].flatten(1, 2))
        assert torch.equal(moe.dequantize_experts(local)[1], w2[:, :, columns])
        assert local.w2_scale.shape[2] == max(1, groups // 2)


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)])
def test_one_scale_for_a_matrix_is_every_ranks(shape: tuple[int, int]) -> None:
    codes = torch.randn(2, 64, 16).to(torch.float8_e4m3fn), torch.randn(2, 16, 32).to(torch.float8_e4m3fn)
    raw: Any = moe.RawWeights("fp8", *codes, w13_scale=torch.rand(shape), w2_scale=torch.rand(2, 1))
    local: Any = shard(raw, tensor_parallel(2, 1))[0]
    assert torch.equal(local.w13_scale, raw.w13_scale) and torch.equal(local.w2_scale, raw.w2_scale)
    assert torch.equal(moe.dequantize_experts(local)[1], moe.dequantize_experts(raw)[1][:, :, 16:])


def test_no_parallelism_is_the_whole_layer() -> None:
    """One rank takes tiles as they are, also where the last one is partial."""
    raw = make_raw(Case("fp8_block", hidden=64, inter=200, bias=True))
    local, num_experts, offset = shard(raw, FusedMoEParallelConfig.make_no_parallel())
    assert local.equal(raw) and (num_experts, offset) == (4, 0)


def test_prepare_takes_the_share_and_restore_gives_it_back() -> None:
    raw = make_raw(layer("nvfp4", "nvfp4"))
    w = moe.prepare(raw, backend="reference", parallel=expert_parallel(3, 1))
    assert (w.num_experts, w.num_local_experts, w.local_expert_offset) == (5, 2, 2)
    assert moe.restore(w).equal(shard(raw, expert_parallel(3, 1))[0])
    options: list[dict[str, Any]] = [{"num_experts": 5}, {"local_expert_offset": 2}]
    for option in options:
        with pytest.raises(ValueError, match="must be left out where parallel is given"):
            moe.prepare(raw, parallel=expert_parallel(3, 1), **option)


# What a part of the intermediate size must be a multiple of: block, group, tile or packed word.
UNITS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "mxfp6_e3m2": 32, "mxfp6_e2m3": 32, "mxint4": 32}
UNITS |= {"int4": 128, "fp8": 8, "fp8_block": 128, "int8": 8, "none": 1}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_that_would_divide_a_scale_are_refused(scheme: str) -> None:
    unit = UNITS[scheme]
    inter = 3 * unit
    raw = make_raw(Case(scheme, hidden=64, inter=inter))
    text = rf"intermediate_size must be a multiple of tp_size \* {unit} = {2 * unit}, got {inter} \("
    with pytest.raises(ValueError, match=text):
        shard(raw, tensor_parallel(2, 0))
    assert shard(raw, tensor_parallel(3, 2))[0].intermediate_size == unit


def test_errors() -> None:
    raw = make_raw(Case())
    with pytest.raises(TypeError, match="parallel must be a FusedMoEParallelConfig, got int"):
        shard(raw, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_experts must be at least ep_size \(= 8\), got 4"):
        shard(raw, expert_parallel(8, 0))


def test_a_share_holds_no_foreign_experts() -> None:
    raw = dataclasses.replace(make_raw(layer("nvfp4")), a13_input_scale=torch.rand(5), a2_input_scale=torch.rand(()))
    local, _, offset = shard(raw, expert_parallel(2, 1))
    for name, tensor in local.tensors().items():
        whole = getattr(raw, name)
        expected = whole[offset:] if whole.ndim else whole
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
