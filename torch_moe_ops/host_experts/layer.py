"""HostExperts: one layer whose experts lie partly on a GPU and partly on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import BACKENDS
from torch_moe_ops.core.host_layers import name_layer
from torch_moe_ops.host_experts import explaining
from torch_moe_ops.host_experts.host_share import HostShare
from torch_moe_ops.host_experts.moving import move_experts
from torch_moe_ops.host_experts.split import Split, checked_ids, coldest, split_of
from torch_moe_ops.host_experts.staging import Staging, staging_of
from torch_moe_ops.prepared.fused import fused_moe_routed, over_rows, route_rows
from torch_moe_ops.prepared.prepare import prepare
from torch_moe_ops.prepared.prepared_weights import PreparedWeights
from torch_moe_ops.prepared.same_tokens import check_tokens
from torch_moe_ops.prepared.shared_experts import check_router_columns
from torch_moe_ops.routing.options import Routing
from torch_moe_ops.weights.raw_weights import RawWeights

MAX_TOKENS = 256


class HostExperts:
    """One MoE layer for a GPU that does not hold all of its experts: the others stay in host memory, and the CPU runs
    them on their tokens while the GPU runs its own. Both results are float32, added there and rounded once.

    Made once a layer, outside of CUDA graphs. Hidden states, expert ids and weights cross once a call, by copies on a
    stream of their own; a host function in that stream runs the CPU's kernels, so that a call can be captured: a
    replayed graph runs them again, without Python. The layer must outlive the graphs that hold it: one that is
    dropped leaves the host's part of their results as it was. Calls take turns, from whatever threads and streams; a
    replay must follow other replays and calls of the GPU's layers, on one stream or ordered by events. Traces under
    torch.compile(fullgraph=True). Inference only; cannot be copied or pickled.

    Args:
        raw: the layer's experts, on any device. Not modified, and no memory is shared with it.
        host_experts: the experts on the host: ids, or how many of them. Shared experts are always on the device.
        load: [num_experts] how often each expert is asked for (`HostExperts.load` of an earlier run), with a number:
            the least asked for go to the host; without it the last ones.
        device: of hidden states and results; None: raw's own. On a CPU both parts run there, one after the other.
        max_tokens: rows that cross at once. Calls of more rows cross in several steps, each of which reads the
            weights of the host's experts again.
        backend: of the experts on the device, as in `prepare`. Those on the host run by backend "cpu", or where the
            device is a CPU by what `prepare` takes there.
        prepare_options: given to `prepare` for both parts (activation, act_format, ...).

    Attributes: device, num_experts, num_shared_experts, hidden_size, intermediate_size; split; on_device and on_host,
        the PreparedWeights of both parts, None for a part without experts; name, for the op; `load`, int64
        [num_experts] on the device: how often calls have asked for each expert.

    Raises: TypeError, ValueError for arguments that do not fit, or weights that either part has no backend for.
    """

    def __init__(
        self,
        raw: RawWeights,
        host_experts: int | Sequence[int],
        *,
        load: Tensor | Sequence[int] | None = None,
        device: torch.device | str | None = None,
        max_tokens: int = MAX_TOKENS,
        backend: str = "auto",
        **prepare_options: Any,
    ) -> None:
        _check(raw, max_tokens)
        self.split = split_of(raw, host_experts, load)
        self.device = _with_index(torch.device(device) if device is not None else raw.device)
        self.num_experts, self.num_shared_experts = raw.num_experts, raw.num_shared_experts
        self.hidden_size, self.intermediate_size = raw.hidden_size, raw.intermediate_size
        self.on_device, self.on_host = self._prepared(raw, backend, prepare_options)
        taken = [BACKENDS[w.backend].hidden_dtypes for w in self.parts]
        self.hidden_dtypes = tuple(dtype for dtype in taken[0] if all(dtype in others for others in taken))
        with torch.inference_mode(False):  # written later, in that mode and outside of it
            self._first, self._count, self._slots = (t.to(self.device) for t in self.split.tables().values())
            self.load = torch.zeros(self.num_experts, dtype=torch.int64, device=self.device)
        self.staging: Staging | None = None
        self._host: HostShare | None = None
        if self.on_host is not None and self.on_host.backend == "cpu":
            self.staging = staging_of(self.device, max_tokens, self.hidden_size)
            self._host = HostShare(self.on_host, self.staging)
        self.name = name_layer(self)

    def __call__(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The experts' weighted results: `torch.ops.moeq.host_experts`.

        Args:
            hidden_states: [num_tokens, hidden_size] or [batch, sequence, hidden_size], as the backends take them.
            topk_ids: like it, [..., top_k] int32 or int64; what is no expert's number contributes nothing.
            topk_weights: like topk_ids, float, final multipliers.
            out_dtype: None: that of the hidden states.

        Returns: like hidden_states, a new tensor.
        """
        if hidden_states.ndim > 2:
            run = lambda rows, ids, weights: self(rows, ids, weights, out_dtype)  # noqa: E731
            return over_rows("HostExperts", run, hidden_states, topk_ids, topk_weights)
        places = torch.ops.moeq.ep_place(topk_ids, self._first, self._count, self._slots, self.load, 0)
        return torch.ops.moeq.host_experts(hidden_states, places, topk_weights.to(torch.float32), self.name, out_dtype)

    def fused(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        routing: Routing,
        out_dtype: torch.dtype | None = None,
        shared_expert_weights: Tensor | None = None,
    ) -> Tensor:
        """Router and experts: `self(hidden_states, *route(router_logits, routing))`, with the shared experts.

        Args:
            router_logits: [..., routed experts], any float dtype. Shared experts have no column.
            routing: method, top_k and options.
            shared_expert_weights: as in `route`.
        """
        routed, shared = self.num_experts - self.num_shared_experts, self.num_shared_experts
        check_router_columns(router_logits, routed, shared, "HostExperts")
        given: dict[str, Any] = {"router_logits": router_logits, "shared_expert_weights": shared_expert_weights}
        check_tokens("HostExperts", hidden_states, **given)
        return self(hidden_states, *route_rows(router_logits, routing, shared, shared_expert_weights), out_dtype)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("HostExperts: must not be copied or pickled, as its op knows it by name: make another one")

    def run(self, hidden_states: Tensor, places: Tensor, topk_weights: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Of the op, on checked arguments."""
        given = (hidden_states, places, topk_weights)
        if self.on_host is None:
            assert self.on_device is not None
            return fused_moe_routed(*given, self.on_device, out_dtype=out_dtype)
        if self._host is None:  # on a CPU without the compiled kernels
            there = fused_moe_routed(*given, self.on_host, out_dtype=torch.float32)
            return self._added(self._on_device(*given), there, out_dtype)
        there = hidden_states.new_empty(hidden_states.shape, dtype=torch.float32)
        stream = self._host.staging.stream
        if stream is None:
            self._host.start(*given, there)
            return self._added(self._on_device(*given), there, out_dtype)
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    self._host.start(*given, there)
                here = self._on_device(*given)
            finally:  # before anything of this call is read, or freed, as where the device lacks memory
                current.wait_stream(stream)
            return self._added(here, there, out_dtype)

    def _on_device(self, hidden_states: Tensor, places: Tensor, topk_weights: Tensor) -> Tensor | None:
        if self.on_device is None:
            return None
        return fused_moe_routed(hidden_states, places, topk_weights, self.on_device, out_dtype=torch.float32)

    @staticmethod
    def _added(here: Tensor | None, there: Tensor, out_dtype: torch.dtype) -> Tensor:
        if here is None:
            return there.to(out_dtype)
        return torch.add(here, there, out=torch.empty_like(there, dtype=out_dtype))

    @torch.no_grad()
    def rebalance(self, host_experts: Sequence[int] | None = None) -> None:
        """Exchange experts between device and host, outside of CUDA graphs.

        No tensor changes its address: what was compiled or captured computes with the new split from then on. `load`
        keeps counting. Needs host memory for the layer's weights in the checkpoint's layout, twice.

        Args:
            host_experts: as many ids as before; None: those that were asked for least, by `load`.

        Raises ValueError: another number of ids, no routed experts, or a backend that cannot restore its weights.
        """
        routed = self.num_experts - self.num_shared_experts
        wanted = len(self.split.host)
        ids = coldest(self.load, wanted, routed) if host_experts is None else checked_ids(host_experts, routed)
        if len(ids) != wanted:
            raise ValueError(f"HostExperts: host_experts must be {wanted} ids as before, got {len(ids)}")
        new = Split(self.num_experts, ids)
        if new == self.split or self.on_device is None or self.on_host is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the host's kernels read what is written here
        move_experts(self.on_device, self.on_host, self.split, new)
        for table, values in zip((self._first, self._count, self._slots), new.tables().values(), strict=True):
            table.copy_(values)
        self.split = new
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # whatever stream the next call is on

    @property
    def parts(self) -> tuple[PreparedWeights, ...]:
        """The weights on the device and on the host, those that there are."""
        return tuple(w for w in (self.on_device, self.on_host) if w is not None)

    def explain(self) -> explaining.HostExpertsExplanation:
        """Which experts lie where, what crosses, and which backends run them. Print it."""
        return explaining.explain(self)

    def _prepared(
        self, raw: RawWeights, backend: str, options: dict[str, Any]
    ) -> tuple[PreparedWeights | None, PreparedWeights | None]:
        """The weights on the device and on the host."""
        split, host_backend = self.split, "cpu" if self.device.type == "cuda" else "auto"
        here = there = None
        if split.device:
            share = split.share(raw, split.device)
            here = prepare(share, backend=backend, device=self.device, num_experts=raw.num_experts, **options)
        if split.host:
            share = split.share(raw, split.host)
            ids: dict[str, Any] = {"num_experts": raw.num_experts, "local_expert_offset": len(split.device)}
            there = prepare(share, backend=host_backend, device="cpu", **ids, **options)
        return here, there


def _with_index(device: torch.device) -> torch.device:
    """As tensors say theirs."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check(raw: Any, max_tokens: Any) -> None:
    if not isinstance(raw, RawWeights):
        raise TypeError(f"HostExperts: raw must be RawWeights, got {type(raw).__name__}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"HostExperts: max_tokens must be at least 1, got {max_tokens!r}")
