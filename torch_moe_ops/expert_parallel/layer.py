"""ExpertParallel: one layer whose experts lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.config.parallel import FusedMoEParallelConfig
from torch_moe_ops.core.call import FIELDS
from torch_moe_ops.expert_parallel import explaining, rebalancing
from torch_moe_ops.expert_parallel.adapters import check_adapters, share_of_lora, with_owners, without_owners
from torch_moe_ops.expert_parallel.agreement import agreed, agreed_placement, told_to_all
from torch_moe_ops.expert_parallel.arguments import check_arguments, check_call, computed_and_sent
from torch_moe_ops.expert_parallel.groups import Ranks, check_config, ranks_of, transport_of_config
from torch_moe_ops.expert_parallel.payload import payload_of
from torch_moe_ops.expert_parallel.placement import ExpertPlacement, as_placement
from torch_moe_ops.expert_parallel.share import prepared_share
from torch_moe_ops.prepared.fused import fused_moe_routed, over_rows, route_rows
from torch_moe_ops.prepared.lora import Lora
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.same_tokens import check_owners, check_tokens
from torch_moe_ops.prepared.shared_experts import check_router_columns
from torch_moe_ops.routing.options import Routing
from torch_moe_ops.transports import p2p
from torch_moe_ops.transports.members import Wanted, member
from torch_moe_ops.transports.registry import choose
from torch_moe_ops.transports.symmetric import prepare_heap
from torch_moe_ops.weights.raw_weights import RawWeights


class ExpertParallel:
    """One MoE layer over the ranks of a group; every rank calls it with its own tokens and gets their results.

    Made once a layer, by all ranks of the group together, outside of CUDA graphs. Calls are collective: every rank
    makes the same calls in the same order, with any number of tokens from 0 to max_tokens_per_rank (another one on each
    rank), the same top_k and the same dtypes; calls of a group's layers follow one another on each GPU, on one stream
    or ordered by events. Inference only. Traces under torch.compile(fullgraph=True); capturable in CUDA graphs, which
    all ranks replay equally often.

    Args:
        group: a process group of torch.distributed; or a DeviceMesh, of one dimension, or with dimensions "ep" and "tp"
            for experts whose intermediate size is divided among "tp" ranks, which all give the same tokens.
        w: this rank's share: `prepare(share, num_experts=, local_expert_offset=)`, `prepare(raw, parallel=)`, or see
            `from_raw`. Experts are numbered by slots (see ExpertPlacement) where there is a placement.
        max_tokens_per_rank: the largest number of rows of a call on any rank. Every call exchanges this many rows
            a rank, whatever their number is, unless it says max_tokens.
        transport: "auto", or a name of `transports.registry.TRANSPORTS`: "p2p" (GPUs of one host), "nccl" (any).
        placement: an ExpertPlacement or its slots; None: each expert once, in order, as w was prepared.
        partial_dtype: torch.float32, torch.bfloat16 or torch.float8_e4m3fn (with a scale for 128 values, "nccl" alone),
            in which the ranks' partial results travel. They are added in float32 in ascending rank order in any case.
        payload: what of the hidden states travels. "plain": as they are; "quantized": as codes and scales, where the
            layer quantizes them anyway; "auto": quantized where one launch does it. The result is the same.
        capacity: rows that one rank sends to another one at most, at most max_tokens_per_rank. Rows then go only
            where their experts are. More of them are an error on every rank, which the host has to wait for: for eager
            use only. None: every row goes to every rank.

    Attributes: w, placement, transport (a name); `load`, int64 [num_experts] on the device: how often this rank's
    tokens have asked for each expert.

    Raises: ValueError, the same on every rank, where the ranks say different things or their shares do not fit.
        TypeError, ValueError for arguments of one rank that are wrong, and a ValueError on the others that tells so.
    """

    def __init__(
        self,
        group: Any,
        w: PreparedWeights,
        max_tokens_per_rank: int,
        transport: str = "auto",
        *,
        placement: ExpertPlacement | Sequence[Sequence[int]] | None = None,
        partial_dtype: torch.dtype = torch.float32,
        payload: str = "auto",
        capacity: int | None = None,
    ) -> None:
        self.ranks: Ranks = ranks_of(group)
        with told_to_all(self.ranks.group):
            check_arguments(w, max_tokens_per_rank, transport, partial_dtype, capacity)
            self.payload = payload_of(w, payload)
            given = None if placement is None else as_placement(placement)
            mine = member(w.device)
        members = tuple(agreed(self.ranks.group, w.device, mine))
        self.w = w
        self.requested = transport
        self.max_tokens_per_rank = max_tokens_per_rank
        self.partial_dtype = partial_dtype
        self._computed, self._wire = computed_and_sent(partial_dtype)
        self.capacity = capacity or 0
        chosen, self.against = choose(transport, Wanted(members, w.hidden_size, self.capacity, self._wire))
        self.transport = chosen.name
        settings = {
            "max_tokens_per_rank": max_tokens_per_rank,
            "transport": chosen.name,
            "partial_dtype": partial_dtype,
            "payload": self.payload.name,
            "capacity": capacity,
        }
        self.placement = agreed_placement(self.ranks.group, w, given, settings)
        chosen.prepare(self.ranks.group, w.device)
        self.in_one_op = self._prepare_remote()
        with torch.inference_mode(False):  # they are written later, in that mode and outside of it
            self._first, self._count, self._slots = (
                table.to(w.device, copy=True) for table in self.placement.tables(self.ranks.rank).values()
            )
            self.load = torch.zeros(self.placement.num_experts, dtype=torch.int64, device=w.device)
        # What the ops take: names and numbers.
        self._exchange = (self.transport, self.ranks.name, self.ranks.size)
        self._sent = (self.placement.slots_of_ranks if self.capacity else (), self.capacity)

    @classmethod
    def from_raw(
        cls,
        group: Any,
        raw: RawWeights,
        max_tokens_per_rank: int,
        transport: str = "auto",
        *,
        placement: ExpertPlacement | Sequence[Sequence[int]] | None = None,
        partial_dtype: torch.dtype = torch.float32,
        payload: str = "auto",
        capacity: int | None = None,
        **prepare_options: Any,
    ) -> ExpertParallel:
        """Takes this rank's share of `raw`, which holds all experts whole, and prepares it.

        Shared experts of `raw` lie on every rank, and a rank's tokens go to its own.

        Args: as of the class; prepare_options: of `prepare` (activation, act_format, backend, device, ...).
        """
        ranks = ranks_of(group)
        every = (raw.num_experts, ranks.size, raw.num_shared_experts)
        with told_to_all(ranks.group):
            given = as_placement(ExpertPlacement.contiguous(*every) if placement is None else placement)
            w = prepared_share(raw, given, ranks, prepare_options)
        return cls(
            group,
            w,
            max_tokens_per_rank,
            transport,
            placement=given,
            partial_dtype=partial_dtype,
            payload=payload,
            capacity=capacity,
        )

    @classmethod
    def from_config(
        cls,
        parallel: FusedMoEParallelConfig,
        w: PreparedWeights,
        max_tokens_per_rank: int,
        group: Any = None,
        **options: Any,
    ) -> ExpertParallel:
        """As a FusedMoEParallelConfig says, for `w = prepare(raw, parallel=parallel)`.

        Args:
            parallel: use_ep must be True. all2all_backend "allgather_reducescatter" and "naive" mean transport "nccl";
                the others are names of other libraries' kernels, for which "auto" stands.
            group: the ranks of ep_size; None: all.
            options: of the class, but transport.

        Raises ValueError: no expert parallelism, or a group of another size or order.
        """
        group = dist.group.WORLD if group is None else group
        ranks = ranks_of(group)
        with told_to_all(ranks.group):
            check_config(parallel, ranks)
        return cls(group, w, max_tokens_per_rank, transport_of_config(parallel), **options)

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out_dtype: torch.dtype | None = None,
        *,
        max_tokens: int | None = None,
        lora: Lora | None = None,
        lora_ids: Tensor | None = None,
    ) -> Tensor:
        """The experts' weighted results of this rank's tokens.

        Args:
            hidden_states: [num_tokens, hidden_size] bfloat16, float16 or float32 (as the backend of w takes them);
                or [batch, sequence, hidden_size].
            topk_ids: [num_tokens, top_k] int32 or int64 experts as the router numbers them; what is no expert's number
                contributes nothing.
            topk_weights: like topk_ids, float, final multipliers.
            out_dtype: None: that of the hidden states.
            max_tokens: the largest number of rows on any rank in this call, where it is known to be less than
                max_tokens_per_rank. The same on every rank.
            lora, lora_ids: adapters of this rank's experts (`share_lora`), and each of its own tokens' adapter, as in
                `fused_moe_routed`. Every rank gives each of them, or none does; hidden states are sent as they are.

        Returns: like hidden_states, a new tensor.
        Raises: RuntimeError naming op and argument; before anything is exchanged, so on this rank alone, but for an
            overflow of the capacity, which every rank raises.
        """
        if hidden_states.ndim > 2:
            check_owners("ExpertParallel", hidden_states, lora_ids)
            own = None if lora_ids is None else lora_ids.flatten()
            options: dict[str, Any] = {"max_tokens": max_tokens, "lora": lora, "lora_ids": own}
            run = lambda rows, ids, weights: self(rows, ids, weights, out_dtype, **options)  # noqa: E731
            return over_rows("ExpertParallel", run, hidden_states, topk_ids, topk_weights)
        most = self.max_tokens_per_rank
        rows_of_a_rank = check_call(hidden_states, self.w.hidden_size, most, max_tokens, self.capacity)
        check_adapters(lora, lora_ids, hidden_states, self.w)
        topk_weights = topk_weights.to(torch.float32)
        if self.in_one_op and lora is None:
            return self._in_one_op(hidden_states, topk_ids, topk_weights, rows_of_a_rank, out_dtype)
        places = torch.ops.moeq.ep_place(topk_ids, *self._tables(), self.ranks.rank)
        if lora_ids is not None:
            places, topk_weights = with_owners(places, topk_weights, lora_ids)
        quantize = self.payload.quantize if lora is None else None  # adapters see what is not quantized
        codes, scale = (hidden_states, None) if quantize is None else quantize(hidden_states)
        x, x_scale, ids, weights, positions = torch.ops.moeq.ep_dispatch(
            codes, scale, places, topk_weights, *self._exchange, rows_of_a_rank, *self._sent
        )
        adapters: dict[str, Any] = {} if lora is None else {"lora": lora}
        if lora_ids is not None:
            ids, weights, adapters["lora_ids"] = without_owners(ids, weights)
        partial_rows = fused_moe_routed(
            x,
            ids,
            weights,
            self.w,
            hidden_states_scale=None if scale is None else x_scale,
            out_dtype=self._computed,
            **adapters,
        )
        return torch.ops.moeq.ep_combine(
            partial_rows,
            positions,
            hidden_states.shape[0],
            *self._exchange,
            rows_of_a_rank,
            hidden_states.dtype if out_dtype is None else out_dtype,
            *self._sent,
            self.ranks.tp_name,
            self.ranks.tp_size,
            self._wire,
        )

    def _prepare_remote(self) -> bool:
        """Whether the experts may exchange rows by themselves; then with memory for it. Collective."""
        plain = self.payload.quantize is None and not self.capacity and self._wire is None and not self.ranks.tp_name
        if self.transport != "p2p" or not plain:
            return False
        able = BACKENDS[self.w.backend].remote is not None
        if not all(agreed(self.ranks.group, self.w.device, able)):
            return False
        wanted = p2p.room(self.w.hidden_size, self.max_tokens_per_rank, self.ranks.size, self._computed)
        prepare_heap(self.ranks.group, self.w.device, wanted)
        return True

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._first, self._count, self._slots, self.load

    def _in_one_op(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        rows_of_a_rank: int,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        w = self.w
        return torch.ops.moeq.ep_experts(
            hidden_states,
            topk_ids,
            topk_weights,
            *self._tables(),
            *(getattr(w, name) for name in FIELDS[FIELDS.index("w13") : FIELDS.index("backend")]),
            self.ranks.rank,
            *self._exchange,
            rows_of_a_rank,
            self.placement.slots_of_ranks,
            self._computed,
            *w.settings_of_any_scheme(),
            hidden_states.dtype if out_dtype is None else out_dtype,
        )

    def fused(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        routing: Routing,
        out_dtype: torch.dtype | None = None,
        max_tokens: int | None = None,
        shared_expert_weights: Tensor | None = None,
        lora: Lora | None = None,
        lora_ids: Tensor | None = None,
    ) -> Tensor:
        """Router and experts: `self(hidden_states, *route(router_logits, routing))`, with the shared experts of w.

        Args:
            router_logits: [num_tokens, num_experts] or [batch, sequence, num_experts], any float dtype. Shared experts
                have no column.
            routing: method, top_k and options.
            shared_expert_weights: as in `route`. lora, lora_ids: as of a call.
        """
        shared = self.w.num_shared_experts
        check_router_columns(router_logits, self.placement.num_experts - shared, shared, "ExpertParallel")
        given: dict[str, Any] = {"router_logits": router_logits, "shared_expert_weights": shared_expert_weights}
        check_tokens("ExpertParallel", hidden_states, **given)
        ids, weights = route_rows(router_logits, routing, shared, shared_expert_weights)
        return self(hidden_states, ids, weights, out_dtype, max_tokens=max_tokens, lora=lora, lora_ids=lora_ids)

    def share_lora(self, lora: Lora) -> Lora:
        """This rank's share of adapters of all experts: those of its slots, and its part of the intermediate size.

        Made anew where experts were moved (`rebalance`). `lora`: factors [num_experts, ...], as the router counts.
        """
        return share_of_lora(lora, self.placement, self.ranks, self.w)

    @torch.no_grad()
    def rebalance(self, placement: ExpertPlacement | Sequence[Sequence[int]]) -> None:
        """Move experts between the ranks; by all ranks together, outside of CUDA graphs.

        No tensor changes its address: what was compiled or captured computes with the new map from then on. `load`
        keeps counting. Each rank needs memory for the experts that come to it, besides those that it has.

        Args:
            placement: of the same experts, with as many slots on each rank as before.

        Raises ValueError, the same on every rank: another number of experts or slots, or not the same on every rank.
        """
        new = as_placement(placement)
        rebalancing.move_experts(self.ranks, self.w, self.placement, new)
        for table, values in zip(
            (self._first, self._count, self._slots), new.tables(self.ranks.rank).values(), strict=True
        ):
            table.copy_(values)
        self.placement = new

    def total_load(self) -> Tensor:
        """`load` summed over the ranks: int64 [num_experts]. By all ranks together."""
        total = self.load.clone()
        dist.all_reduce(total, group=self.ranks.group)
        return total

    def explain(self) -> explaining.ExpertParallelExplanation:
        """Which transport exchanges what, and why. Print it."""
        return explaining.explain(self)
