"""with_shared_experts: which values the joined experts have, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import Case, make_raw
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.same_bits import same_bits
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.weights.quantize_experts import quantized

PARTS = 3


def _case(scheme: str, **changes: Any) -> Case:
    sizes = {"hidden": 256, "inter": 128} if scheme in ("fp8_block", "int4") else {"hidden": 64, "inter": 32}
    return Case(scheme=scheme, **sizes, **changes)


def _shared(case: Case, parts: int, experts: int = 1, **changes: Any) -> moe.RawWeights:
    return make_raw(dataclasses.replace(case, experts=experts, inter=parts * case.inter, seed=5, **changes))


@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_divided_expert_has_the_values_of_the_whole_one(scheme: str, activation: str) -> None:
    case = _case(scheme, activation=activation)
    raw, shared = make_raw(case), _shared(case, PARTS)
    joined = moe.with_shared_experts(raw, shared)
    assert (joined.num_experts, joined.num_shared_experts) == (case.experts + PARTS, PARTS)
    assert joined.intermediate_size == raw.intermediate_size and joined.activation == activation
    own13, own2 = moe.dequantize_experts(joined)
    for mine, theirs in zip((own13, own2), moe.dequantize_experts(raw), strict=True):
        assert same_bits(mine[: case.experts], theirs)
    whole13, whole2 = (t[0] for t in moe.dequantize_experts(shared))
    halves = whole13.unflatten(0, (-1, PARTS, case.inter))
    for part in range(PARTS):
        assert same_bits(own13[case.experts + part], halves[:, part].flatten(0, 1))
        assert same_bits(own2[case.experts + part], whole2[:, part * case.inter : (part + 1) * case.inter])


def test_several_shared_experts_each_in_parts() -> None:
    case = _case("nvfp4", bias=True)
    raw, shared = make_raw(case), _shared(case, 2, experts=3)
    joined = moe.with_shared_experts(raw, shared)
    assert joined.num_shared_experts == 6
    # Part by part: the experts of a part are neighbours, and only the first part has the second bias.
    assert torch.equal(joined.w2_bias[4:], torch.cat([shared.w2_bias, torch.zeros(3, case.hidden)]))
    assert torch.equal(joined.w13_bias[4:7], shared.w13_bias.unflatten(1, (2, 2, -1))[:, :, 0].flatten(1))
    assert same_bits(joined.w2[7:], shared.w2[:, :, case.inter // 2 :])


def test_nothing_shares_memory() -> None:
    raw, shared = make_raw(_case("nvfp4")), _shared(_case("nvfp4"), 1)
    taken = {t.untyped_storage().data_ptr() for r in (raw, shared) for t in r.tensors().values()}
    joined = moe.with_shared_experts(raw, shared)
    assert not taken & {t.untyped_storage().data_ptr() for t in joined.tensors().values()}


def _scales(case: Case, mine: Tensor, theirs: Tensor) -> Tensor:
    raw = dataclasses.replace(make_raw(case), a13_input_scale=mine, a2_input_scale=mine)
    shared = dataclasses.replace(_shared(case, 2), a13_input_scale=theirs, a2_input_scale=theirs)
    joined = moe.with_shared_experts(raw, shared)
    assert torch.equal(joined.a13_input_scale, joined.a2_input_scale)
    return joined.a13_input_scale


def test_input_scales_become_one_an_expert_only_where_they_differ() -> None:
    case, two, three = _case("nvfp4"), torch.tensor(2.0), torch.tensor(3.0)
    assert torch.equal(_scales(case, two, two.clone()), two)
    assert _scales(case, two, three).tolist() == [2.0] * 4 + [3.0] * 2
    assert _scales(case, torch.arange(1.0, 5.0), three).tolist() == [1.0, 2.0, 3.0, 4.0, 3.0, 3.0]
    assert _scales(case, two, torch.tensor([3.0])).tolist() == [2.0] * 4 + [3.0] * 2
    assert torch.equal(_scales(case, two, torch.tensor([2.0])), two)


def test_one_global_scale_beside_one_for_each_half() -> None:
    case = _case("nvfp4")
    raw, shared = make_raw(dataclasses.replace(case, per_half=True)), _shared(case, 1)
    one = dataclasses.replace(shared, w13_scale_2=shared.w13_scale_2[:, :1].contiguous())
    joined = moe.with_shared_experts(raw, one)
    assert torch.equal(joined.w13_scale_2, torch.cat([raw.w13_scale_2, one.w13_scale_2.expand(1, 2)]))


def test_what_is_said_of_the_activation_is_said_of_all() -> None:
    case = _case("nvfp4")
    silent = [dataclasses.replace(r, activation=None) for r in (make_raw(case), _shared(case, 1))]
    limited = dataclasses.replace(_shared(case, 1), swiglu_limit=7.0)
    joined = moe.with_shared_experts(silent[0], limited)
    assert (joined.activation, joined.swiglu_limit) == ("silu", 7.0)
    assert moe.with_shared_experts(make_raw(case), silent[1]).activation == "silu"
    with pytest.raises(ValueError, match="activation of shared must be"):
        moe.with_shared_experts(make_raw(case), limited)  # the routed experts have no limit


NVFP4 = _case("nvfp4")
WRONG: dict[str, tuple[Any, str]] = {
    "scheme": (lambda: make_raw(_case("mxfp4", experts=1)), "scheme of shared must be nvfp4"),
    "hidden": (lambda: make_raw(dataclasses.replace(NVFP4, experts=1, hidden=96)), "hidden_size of shared must be 64"),
    "gated": (lambda: _shared(NVFP4, 1, activation="relu2_no_mul"), "is_gated of shared must be True"),
    "size": (lambda: make_raw(dataclasses.replace(NVFP4, experts=1, inter=48)), "must be a multiple of the routed"),
    "bias": (lambda: _shared(NVFP4, 1, bias=True), "w13_bias of shared must be absent"),
    "input": (lambda: _shared(NVFP4, 1, input_scale="tensor"), "a13_input_scale of shared must be absent"),
    "twice": (lambda: moe.with_shared_experts(make_raw(NVFP4), _shared(NVFP4, 1)), "shared must be without shared"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(ValueError, match=f"with_shared_experts: .*{text}"):
        moe.with_shared_experts(make_raw(NVFP4), make())


def test_scales_of_another_kind_are_refused() -> None:
    case = _case("fp8")
    shared = _shared(case, 1)
    matrix = dataclasses.replace(shared, w2_scale=shared.w2_scale[:, 0].contiguous())
    with pytest.raises(ValueError, match=r"dimensions of w2_scale of shared must be 3, .* got 2"):
        moe.with_shared_experts(make_raw(case), matrix)
    with pytest.raises(TypeError, match="shared must be RawWeights, got Tensor"):
        moe.with_shared_experts(make_raw(case), shared.w2)  # type: ignore[arg-type]


def test_a_size_that_would_divide_a_tile_is_refused() -> None:
    whole = make_raw(Case(scheme="fp8_block", hidden=128, inter=64))
    with pytest.raises(ValueError, match="must be a multiple of 128, what shares a scale"):
        moe.with_shared_experts(whole, _shared(Case(scheme="fp8_block", hidden=128, inter=64), 2))


@pytest.mark.parametrize("number", [-1, 4, True, 1.0])
def test_the_number_must_leave_routed_experts(number: Any) -> None:
    with pytest.raises(ValueError, match=r"num_shared_experts must be in 0 ... 3, fewer than the experts, got"):
        dataclasses.replace(make_raw(NVFP4), num_shared_experts=number)


def test_kept_by_files_and_by_what_makes_new_weights(tmp_path: Path) -> None:
    joined = moe.with_shared_experts(make_raw(NVFP4), _shared(NVFP4, 2))
    joined.save(tmp_path / "raw.safetensors")
    assert moe.RawWeights.load(tmp_path / "raw.safetensors").equal(joined)
    assert not joined.equal(dataclasses.replace(joined, num_shared_experts=1))
    a2, b2 = torch.randn(6, 2, 32), torch.randn(6, 64, 2)
    assert moe.merge_lora(joined, a2=a2, b2=b2, scaling=1.0).num_shared_experts == 2


def test_shares_of_tensor_parallel_ranks_add_up_to_the_whole() -> None:
    joined = moe.with_shared_experts(make_raw(NVFP4), _shared(NVFP4, 2))
    x, logits, routing = torch.randn(3, 64).bfloat16(), torch.randn(3, 4), moe.Routing("renormalize", 2)

    def run(**options: Any) -> Tensor:
        w = moe.prepare(joined, act_format="none", **options)
        assert (w.num_shared_experts, w.num_local_experts) == (2, 6)
        return moe.fused_moe(x, logits, w, routing=routing, out_dtype=torch.float32)

    ranks = [moe.config.FusedMoEParallelConfig.make(2, 1, 1, 1, tp_rank=rank) for rank in (0, 1)]
    both = run(parallel=ranks[0]) + run(parallel=ranks[1])
    torch.testing.assert_close(both, run(), rtol=1e-5, atol=1e-5)
    spread = moe.config.FusedMoEParallelConfig.make(2, 1, 1, 1, enable_expert_parallel=True, tp_rank=1)
    with pytest.raises(ValueError, match="ep_size must be 1 where there are shared experts"):
        moe.prepare(joined, parallel=spread)


def test_quantizing_keeps_their_number() -> None:
    raw = moe.with_shared_experts(make_raw(_case("none")), _shared(_case("none"), 1))
    assert quantized(raw, "nvfp4").num_shared_experts == 1
