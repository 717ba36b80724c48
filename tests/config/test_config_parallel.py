"""FusedMoEParallelConfig: the truth table, derived properties, placement, errors."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch.distributed as dist

from torch_moe_ops.config import ALL2ALL_BACKENDS, FusedMoEParallelConfig

make = FusedMoEParallelConfig.make

# (tp, dp, ep flag) -> per flat rank: (tp_size, tp_rank), (dp_size, dp_rank), (ep_size, ep_rank)
TRUTH_TABLE = {
    (1, 1, False): [((1, 0), (1, 0), (1, 0))],
    (1, 1, True): [((1, 0), (1, 0), (1, 0))],
    (2, 1, False): [((2, 0), (1, 0), (1, 0)), ((2, 1), (1, 0), (1, 0))],
    (1, 2, False): [((2, 0), (2, 0), (1, 0)), ((2, 1), (2, 1), (1, 0))],
    (2, 2, False): [
        ((4, 0), (2, 0), (1, 0)),
        ((4, 1), (2, 0), (1, 0)),
        ((4, 2), (2, 1), (1, 0)),
        ((4, 3), (2, 1), (1, 0)),
    ],
    (2, 1, True): [((1, 0), (1, 0), (2, 0)), ((1, 0), (1, 0), (2, 1))],
    (1, 2, True): [((1, 0), (2, 0), (2, 0)), ((1, 0), (2, 1), (2, 1))],
    (2, 2, True): [
        ((1, 0), (2, 0), (4, 0)),
        ((1, 0), (2, 0), (4, 1)),
        ((1, 0), (2, 1), (4, 2)),
        ((1, 0), (2, 1), (4, 3)),
    ],
}
ROWS = [(*key, rank, row) for key, rows in TRUTH_TABLE.items() for rank, row in enumerate(rows)]


@pytest.mark.parametrize("axis", ["dp", "pcp"])  # PCP behaves like DP
@pytest.mark.parametrize(("tp", "outer", "flag", "flat_rank", "expected"), ROWS)
def test_make_truth_table(axis: str, tp: int, outer: int, flag: bool, flat_rank: int, expected: Any) -> None:
    outer_rank, tp_rank = divmod(flat_rank, tp)
    sizes = {"dp_size": 1, "pcp_size": 1, f"{axis}_size": outer}
    ranks = {"dp_rank": 0, "pcp_rank": 0, f"{axis}_rank": outer_rank}
    config = make(tp_size=tp, sp_size=1, enable_expert_parallel=flag, tp_rank=tp_rank, **sizes, **ranks)  # type: ignore[arg-type]
    (tp_size, want_tp), (outer_size, want_outer), (ep_size, want_ep) = expected
    assert (config.tp_size, config.tp_rank) == (tp_size, want_tp)
    assert (getattr(config, f"{axis}_size"), getattr(config, f"{axis}_rank")) == (outer_size, want_outer)
    assert (config.ep_size, config.ep_rank) == (ep_size, want_ep)
    assert config.use_ep == (flag and tp * outer > 1)


@pytest.mark.parametrize("flag", [False, True])
def test_flat_rank_with_all_three_axes(flag: bool) -> None:
    seen = []
    for dp, pcp, tp in itertools.product(range(3), range(2), range(4)):
        config = make(4, 2, 3, 1, enable_expert_parallel=flag, tp_rank=tp, pcp_rank=pcp, dp_rank=dp)
        flat = FusedMoEParallelConfig.flatten_tp_across_dp_and_pcp(4, 3, dp, 2, pcp, tp_rank=tp)
        assert flat == ((config.ep_size, config.ep_rank) if flag else (config.tp_size, config.tp_rank))
        assert flat == (24, dp * 8 + pcp * 4 + tp)
        assert (config.dp_rank, config.pcp_rank) == (dp, pcp)
        seen.append(flat[1])
    assert seen == list(range(24))


def test_make_no_parallel() -> None:
    config = FusedMoEParallelConfig.make_no_parallel()
    sizes = [getattr(config, f"{name}_size") for name in ("tp", "pcp", "dp", "ep", "sp")]
    assert sizes == [1] * 5 and config.all2all_backend == "allgather_reducescatter"
    assert not config.use_ep and not config.use_all2all_kernels and not config.is_sequence_parallel


# backend -> the properties that it turns on where tokens are exchanged
KERNELS = {
    "naive": {"use_naive_all2all_kernels"},
    "allgather_reducescatter": {"use_naive_all2all_kernels", "use_ag_rs_all2all_kernels"},
    "deepep_high_throughput": {"use_deepep_ht_kernels"},
    "deepep_low_latency": {"use_deepep_ll_kernels", "use_batched_activation_format"},
    "flashinfer_all2allv": {"use_fi_all2allv_kernels", "use_fi_nvl_two_sided_kernels"},
    "flashinfer_nvlink_two_sided": {"use_fi_all2allv_kernels", "use_fi_nvl_two_sided_kernels"},
    "flashinfer_nvlink_one_sided": {"use_fi_nvl_one_sided_kernels"},
    "mori": {"use_mori_kernels"},
    "mori_high_throughput": {"use_mori_kernels"},
    "mori_low_latency": {"use_mori_kernels"},
    "deepep_v2": {"use_deepep_v2_kernels"},
    "pplx": set(),
    "moonep": set(),
    "passthrough": set(),
    "nixl_ep": {"use_nixl_ep_kernels", "use_batched_activation_format"},
}


@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
def test_kernel_properties_by_backend(backend: str) -> None:
    names = set().union(*KERNELS.values())
    exchanging = make(1, 1, 2, 1, enable_expert_parallel=True, dp_rank=1, all2all_backend=backend)
    assert exchanging.use_all2all_kernels
    assert {name for name in names if getattr(exchanging, name)} == KERNELS[backend]
    tp_only = make(2, 1, 1, 2, enable_expert_parallel=True, tp_rank=1, all2all_backend=backend)
    pcp_only = make(1, 2, 1, 1, enable_expert_parallel=True, pcp_rank=1, all2all_backend=backend)
    dp_without_ep = make(1, 1, 2, 1, dp_rank=0, all2all_backend=backend)
    for config in (tp_only, pcp_only, dp_without_ep):
        assert not config.use_all2all_kernels and not any(getattr(config, name) for name in names)
    assert tp_only.is_sequence_parallel and not exchanging.is_sequence_parallel


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"tp_size": 0}, ValueError, "FusedMoEParallelConfig: tp_size must be at least 1, got 0"),
        ({"sp_size": 0}, ValueError, "FusedMoEParallelConfig: sp_size must be at least 1, got 0"),
        ({"tp_rank": 2}, ValueError, "FusedMoEParallelConfig: tp_rank must lie in [0, 1], got 2"),
        ({"dp_rank": -1}, ValueError, "FusedMoEParallelConfig: dp_rank must lie in [0, 2], got -1"),
        ({"pcp_rank": 1}, ValueError, "FusedMoEParallelConfig: pcp_rank must lie in [0, 0], got 1"),
        ({"dp_size": 2.0}, TypeError, "FusedMoEParallelConfig: dp_size must be an int, got float"),
        ({"enable_eplb": 1}, TypeError, "FusedMoEParallelConfig: enable_eplb must be a bool, got int"),
        ({"enable_expert_parallel": "yes"}, TypeError, "FusedMoEParallelConfig: enable_expert_parallel must be a bool"),
        ({"all2all_backend": "deepep"}, ValueError, "all2all_backend must be one of naive, allgather_reducescatter"),
        ({"all2all_backend": None}, ValueError, "all2all_backend must be one of"),
        ({"tp_rank": None}, ValueError, "tp_rank must be given where tp_size is 2 (from_distributed reads it"),
    ],
)
def test_make_rejects(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"tp_size": 2, "pcp_size": 1, "dp_size": 3, "sp_size": 1, "tp_rank": 0, "dp_rank": 0}
    with pytest.raises(error) as caught:
        make(**{**arguments, **change})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_ep": False}, "use_ep must be True for ep_size 4, got False"),
        ({"tp_size": 4}, "tp_size must be 1 where use_ep is True, got 4"),
        ({"ep_size": 3, "ep_rank": 0}, "ep_size must be a multiple of dp_size * pcp_size (= 2), got 3"),
        ({"ep_rank": 0}, "ep_rank must lie in [2, 3] for dp_rank 1 and pcp_rank 0, got 0"),
    ],
)
def test_contradicting_fields_are_rejected(change: dict[str, Any], text: str) -> None:
    config = make(2, 1, 2, 1, enable_expert_parallel=True, tp_rank=0, dp_rank=1)
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(config, **change)
    assert str(caught.value) == f"FusedMoEParallelConfig: {text}"


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FusedMoEParallelConfig.make_no_parallel().tp_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(("experts", "ranks"), [(8, 1), (8, 4), (10, 4), (60, 7), (2048, 3), (5, 5)])
def test_local_experts_partition_all_experts(experts: int, ranks: int) -> None:
    shares = [
        make(ranks, 1, 1, 1, enable_expert_parallel=True, tp_rank=rank).local_experts(experts) for rank in range(ranks)
    ]
    ids = [e for offset, count in shares for e in range(offset, offset + count)]
    assert ids == list(range(experts))
    counts = [count for _, count in shares]
    # The first `experts % ranks` ranks have one more.
    assert counts == sorted(counts, reverse=True) and max(counts) - min(counts) <= 1
    assert counts.count(max(counts)) == (experts % ranks or ranks)


def test_local_experts_without_expert_parallelism_is_everything() -> None:
    assert make(4, 1, 1, 1, tp_rank=3).local_experts(10) == (0, 10)
    with pytest.raises(ValueError, match=r"num_experts must be at least ep_size \(= 4\), got 3"):
        make(4, 1, 1, 1, enable_expert_parallel=True, tp_rank=3).local_experts(3)


def test_local_intermediate() -> None:
    parts = [make(2, 1, 2, 1, tp_rank=tp, dp_rank=dp).local_intermediate(768, 32) for dp in (0, 1) for tp in (0, 1)]
    assert parts == [(0, 192), (192, 192), (384, 192), (576, 192)]
    whole = make(2, 1, 2, 1, enable_expert_parallel=True, tp_rank=1, dp_rank=1)
    assert whole.local_intermediate(768, 128) == (0, 768)
    with pytest.raises(ValueError, match=r"intermediate_size must be a multiple of tp_size \* 32 \(= 128\), got 720"):
        make(4, 1, 1, 1, tp_rank=0).local_intermediate(720, 32)


def test_make_reads_nothing_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise AssertionError("make must not ask torch.distributed")

    monkeypatch.setattr(dist, "get_rank", refuse)
    monkeypatch.setattr(dist, "is_initialized", refuse)
    assert make(2, 1, 1, 1, tp_rank=1).tp_rank == 1


def test_from_distributed_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed must be initialised"):
        FusedMoEParallelConfig.from_distributed()


def test_from_distributed_reads_groups() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=6, store=FakeStore())
    try:
        # rank 5 of 6 = dp_rank 2 of 3, tp_rank 1 of 2
        tp = [dist.new_group([2 * i, 2 * i + 1]) for i in range(3)][2]
        dp = [dist.new_group([i, i + 2, i + 4]) for i in range(2)][1]
        config = FusedMoEParallelConfig.from_distributed(tp_group=tp, dp_group=dp, enable_expert_parallel=True)
        assert config == make(2, 1, 3, 1, enable_expert_parallel=True, tp_rank=1, dp_rank=2)
        assert (config.ep_size, config.ep_rank) == (6, 5)
        assert FusedMoEParallelConfig.from_distributed() == make(6, 1, 1, 1, tp_rank=5)
        foreign = dist.new_group([0, 1])
        with pytest.raises(ValueError, match="tp_group must contain this process, got 'rank -1'"):
            FusedMoEParallelConfig.from_distributed(tp_group=foreign)
    finally:
        dist.destroy_process_group()
