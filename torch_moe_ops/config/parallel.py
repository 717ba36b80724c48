"""FusedMoEParallelConfig: how the experts of a layer are spread over ranks. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_moe_ops.config._require import require, require_bool, require_int

OWNER = "FusedMoEParallelConfig"

DEEPEP_HIGH_THROUGHPUT = "deepep_high_throughput"
DEEPEP_LOW_LATENCY = "deepep_low_latency"
NIXL_EP = "nixl_ep"
AG_RS = "allgather_reducescatter"
NAIVE_BACKENDS = ("naive", AG_RS)
# One kernel under its old and its new name.
TWO_SIDED_BACKENDS = ("flashinfer_all2allv", "flashinfer_nvlink_two_sided")
ONE_SIDED_BACKEND = "flashinfer_nvlink_one_sided"
DEEPEP_V2 = "deepep_v2"
# One library: its old name, and one for each of its two kernels.
MORI_BACKENDS = ("mori", "mori_high_throughput", "mori_low_latency")
ALL2ALL_BACKENDS = (
    *NAIVE_BACKENDS,
    DEEPEP_HIGH_THROUGHPUT,
    DEEPEP_LOW_LATENCY,
    *TWO_SIDED_BACKENDS,
    ONE_SIDED_BACKEND,
    *MORI_BACKENDS,
    NIXL_EP,
    DEEPEP_V2,
    # No property: who exchanges tokens so does it outside of the layer, or in kernels that ask for nothing here.
    "pplx",
    "moonep",
    "passthrough",
)


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """Sizes and ranks after the MoE layer has decided between tensor and expert parallelism.

    With expert parallelism every rank of tp x pcp x dp holds whole experts: `ep_size` is their
    number and `tp_size` is 1. Without it they all shard the intermediate size: `tp_size` is
    their number and `ep_size` is 1. Flat rank = (dp_rank * pcp + pcp_rank) * tp + tp_rank.

    Args:
        tp_size, pcp_size, dp_size, ep_size: tensor, prefill-context, data, expert parallel; at least 1.
        tp_rank, pcp_rank, dp_rank, ep_rank: this process, 0 <= rank < size.
        sp_size: ranks that split the sequence; it does not change where experts lie.
        use_ep: whether experts are spread: ep_size > 1.
        all2all_backend: one of ALL2ALL_BACKENDS.
        enable_eplb: whether experts are re-balanced at run time.

    Raises:
        ValueError, TypeError: naming the field, what it must be and what came.
    """

    tp_size: int
    pcp_size: int
    dp_size: int
    ep_size: int
    tp_rank: int
    pcp_rank: int
    dp_rank: int
    ep_rank: int
    sp_size: int
    use_ep: bool
    all2all_backend: str
    enable_eplb: bool

    def __post_init__(self) -> None:
        for name in ("tp", "pcp", "dp", "ep", "sp"):
            require_int(OWNER, f"{name}_size", getattr(self, f"{name}_size"), 1)
        for name in ("tp", "pcp", "dp", "ep"):
            require_int(OWNER, f"{name}_rank", getattr(self, f"{name}_rank"), 0, getattr(self, f"{name}_size") - 1)
        for name in ("use_ep", "enable_eplb"):
            require_bool(OWNER, name, getattr(self, name))
        known = isinstance(self.all2all_backend, str) and self.all2all_backend in ALL2ALL_BACKENDS
        require(known, OWNER, "all2all_backend", f"be one of {', '.join(ALL2ALL_BACKENDS)}", self.all2all_backend)
        require(
            self.use_ep == (self.ep_size > 1),
            OWNER,
            "use_ep",
            f"be {self.ep_size > 1} for ep_size {self.ep_size}",
            self.use_ep,
        )
        require(not self.use_ep or self.tp_size == 1, OWNER, "tp_size", "be 1 where use_ep is True", self.tp_size)
        self._check_flat_rank()

    def _check_flat_rank(self) -> None:
        """The flat size and rank must contain the data and context parallel ones."""
        name = "ep" if self.use_ep else "tp"
        size, rank = getattr(self, f"{name}_size"), getattr(self, f"{name}_rank")
        outer = self.dp_size * self.pcp_size
        requirement = f"be a multiple of dp_size * pcp_size (= {outer})"
        require(size % outer == 0, OWNER, f"{name}_size", requirement, size)
        inner = size // outer
        start = (self.dp_rank * self.pcp_size + self.pcp_rank) * inner
        requirement = f"lie in [{start}, {start + inner - 1}] for dp_rank {self.dp_rank} and pcp_rank {self.pcp_rank}"
        require(start <= rank < start + inner, OWNER, f"{name}_rank", requirement, rank)

    @staticmethod
    def flatten_tp_across_dp_and_pcp(
        tp_size: int, dp_size: int, dp_rank: int, pcp_size: int, pcp_rank: int, *, tp_rank: int | None = None
    ) -> tuple[int, int]:
        """(tp_size * dp_size * pcp_size, rank therein) where all of them shard the experts alike.

        Args:
            tp_rank: may be left out where tp_size is 1.
        """
        ranks = {"tp": (tp_size, tp_rank), "pcp": (pcp_size, pcp_rank), "dp": (dp_size, dp_rank)}
        tp, pcp, dp = (_rank(name, size, rank) for name, (size, rank) in ranks.items())
        return tp_size * pcp_size * dp_size, (dp * pcp_size + pcp) * tp_size + tp

    @classmethod
    def make(
        cls,
        tp_size: int,
        pcp_size: int,
        dp_size: int,
        sp_size: int,
        *,
        enable_expert_parallel: bool = False,
        all2all_backend: str = "allgather_reducescatter",
        enable_eplb: bool = False,
        tp_rank: int | None = None,
        dp_rank: int | None = None,
        pcp_rank: int | None = None,
    ) -> FusedMoEParallelConfig:
        """The layer's sizes from the sizes of the job.

        Args:
            tp_size, pcp_size, dp_size, sp_size: of the job.
            enable_expert_parallel: spread whole experts over tp x pcp x dp ranks, if there are several.
            all2all_backend, enable_eplb: see the class.
            tp_rank, dp_rank, pcp_rank: this process. Each may be left out where its size is 1; nothing
                is taken from torch.distributed here (see `from_distributed`).
        """
        require_bool(OWNER, "enable_expert_parallel", enable_expert_parallel)
        dp, pcp = _rank("dp", dp_size, dp_rank), _rank("pcp", pcp_size, pcp_rank)
        size, rank = cls.flatten_tp_across_dp_and_pcp(tp_size, dp_size, dp, pcp_size, pcp, tp_rank=tp_rank)
        use_ep = enable_expert_parallel and size > 1
        return cls(
            tp_size=1 if use_ep else size,
            tp_rank=0 if use_ep else rank,
            pcp_size=pcp_size,
            pcp_rank=pcp,
            dp_size=dp_size,
            dp_rank=dp,
            ep_size=size if use_ep else 1,
            ep_rank=rank if use_ep else 0,
            sp_size=sp_size,
            use_ep=use_ep,
            all2all_backend=all2all_backend,
            enable_eplb=enable_eplb,
        )

    @classmethod
    def make_no_parallel(cls) -> FusedMoEParallelConfig:
        """One process: every size 1."""
        return cls.make(1, 1, 1, 1)

    @classmethod
    def from_distributed(
        cls,
        *,
        tp_group: Any = None,
        pcp_group: Any = None,
        dp_group: Any = None,
        sp_size: int = 1,
        enable_expert_parallel: bool = False,
        all2all_backend: str = "allgather_reducescatter",
        enable_eplb: bool = False,
    ) -> FusedMoEParallelConfig:
        """`make` with sizes and ranks read from process groups.

        Args:
            tp_group, pcp_group, dp_group: torch.distributed process groups; a group that is None
                counts as size 1. If all are None, the whole world is the tensor parallel group.
            sp_size, enable_expert_parallel, all2all_backend, enable_eplb: as in `make`.

        Raises:
            ValueError: torch.distributed is not initialised, or this process is not in a group.
        """
        import torch.distributed as dist

        ready = dist.is_available() and dist.is_initialized()
        require(ready, OWNER, "torch.distributed", "be initialised", "no process group")
        if tp_group is None and pcp_group is None and dp_group is None:
            tp_group = dist.group.WORLD
        sizes, ranks = {}, {}
        for name, group in (("tp", tp_group), ("pcp", pcp_group), ("dp", dp_group)):
            ranks[name] = 0 if group is None else dist.get_rank(group)
            sizes[name] = 1 if group is None else dist.get_world_size(group)
            require(ranks[name] >= 0, OWNER, f"{name}_group", "contain this process", f"rank {ranks[name]}")
        return cls.make(
            sizes["tp"],
            sizes["pcp"],
            sizes["dp"],
            sp_size,
            enable_expert_parallel=enable_expert_parallel,
            all2all_backend=all2all_backend,
            enable_eplb=enable_eplb,
            tp_rank=ranks["tp"],
            dp_rank=ranks["dp"],
            pcp_rank=ranks["pcp"],
        )

    # -- this rank's share -------------------------------------------------------------------------

    def local_experts(self, num_experts: int) -> tuple[int, int]:
        """(offset, count) of this rank's experts: contiguous, the first ranks get one more of a remainder."""
        require_int(OWNER, "num_experts", num_experts, 1)
        text = f"be at least ep_size (= {self.ep_size})"
        require(num_experts >= self.ep_size, OWNER, "num_experts", text, num_experts)
        base, remainder = divmod(num_experts, self.ep_size)
        offset = self.ep_rank * base + min(self.ep_rank, remainder)
        return offset, base + (self.ep_rank < remainder)

    def local_intermediate(self, intermediate_size: int, multiple: int = 1) -> tuple[int, int]:
        """(offset, size) of this rank's part of the intermediate size: equal parts over tp_size ranks.

        Args:
            intermediate_size: of the whole expert, after gating.
            multiple: each part must be a multiple of this (the block of the weight scheme along K of w2),
                so that no scale is shared by two ranks.
        """
        require_int(OWNER, "intermediate_size", intermediate_size, 1)
        require_int(OWNER, "multiple", multiple, 1)
        text = f"be a multiple of tp_size * {multiple} (= {self.tp_size * multiple})"
        require(intermediate_size % (self.tp_size * multiple) == 0, OWNER, "intermediate_size", text, intermediate_size)
        size = intermediate_size // self.tp_size
        return self.tp_rank * size, size

    # -- what exchanges tokens between ranks ---------------------------------------------------------

    @property
    def is_sequence_parallel(self) -> bool:
        return self.sp_size > 1

    @property
    def use_all2all_kernels(self) -> bool:
        """Whether tokens travel to their experts: needs several data parallel ranks and expert parallelism."""
        return self.dp_size > 1 and self.use_ep

    def _exchanges_by(self, *backends: str) -> bool:
        return self.use_all2all_kernels and self.all2all_backend in backends

    @property
    def use_deepep_ht_kernels(self) -> bool:
        return self._exchanges_by(DEEPEP_HIGH_THROUGHPUT)

    @property
    def use_deepep_ll_kernels(self) -> bool:
        return self._exchanges_by(DEEPEP_LOW_LATENCY)

    @property
    def use_fi_all2allv_kernels(self) -> bool:
        """FlashInfer's two-sided NVLink exchange, by either of its names."""
        return self._exchanges_by(*TWO_SIDED_BACKENDS)

    @property
    def use_fi_nvl_two_sided_kernels(self) -> bool:
        """The later name of `use_fi_all2allv_kernels`."""
        return self.use_fi_all2allv_kernels

    @property
    def use_fi_nvl_one_sided_kernels(self) -> bool:
        return self._exchanges_by(ONE_SIDED_BACKEND)

    @property
    def use_naive_all2all_kernels(self) -> bool:
        return self._exchanges_by(*NAIVE_BACKENDS)

    @property
    def use_mori_kernels(self) -> bool:
        return self._exchanges_by(*MORI_BACKENDS)

    @property
    def use_nixl_ep_kernels(self) -> bool:
        return self._exchanges_by(NIXL_EP)

    @property
    def use_deepep_v2_kernels(self) -> bool:
        return self._exchanges_by(DEEPEP_V2)

    @property
    def use_ag_rs_all2all_kernels(self) -> bool:
        """All-gather and reduce-scatter; `use_naive_all2all_kernels` also counts "naive"."""
        return self._exchanges_by(AG_RS)

    @property
    def use_batched_activation_format(self) -> bool:
        """Whether tokens arrive grouped by expert, [num_local_experts, max tokens, hidden]."""
        return self.use_deepep_ll_kernels or self.use_nixl_ep_kernels


def _rank(name: str, size: int, rank: int | None) -> int:
    """A rank that was given, or 0 where the size leaves no choice."""
    require_int(OWNER, f"{name}_size", size, 1)
    if rank is None:
        text = f"be given where {name}_size is {size} (from_distributed reads it from a process group)"
        require(size == 1, OWNER, f"{name}_rank", text, None)
        return 0
    require_int(OWNER, f"{name}_rank", rank, 0, size - 1)
    return rank
