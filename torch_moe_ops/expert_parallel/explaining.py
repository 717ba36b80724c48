"""explain(ep): what exchanges tokens, what it sends, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_moe_ops.expert_parallel.payload import bytes_of_row
from torch_moe_ops.prepared.explaining import explain as explain_weights
from torch_moe_ops.transports import p2p
from torch_moe_ops.transports.partial_rows import GROUP, WIRE_DTYPES, bytes_of_partial_row
from torch_moe_ops.transports.registry import TRANSPORTS


@dataclass(frozen=True)
class ExpertParallelExplanation:
    """What `explain(ep)` says. `str()` is the text.

    transport: its name; against: reasons of the transports that "auto" would have taken before it. lines: the text
    about the exchange; weights: the explanation of the backend of this rank's experts.
    """

    transport: str
    requested: str
    against: dict[str, str]
    lines: tuple[str, ...]
    weights: Any

    def __str__(self) -> str:
        return "\n".join((*self.lines, str(self.weights)))


def explain(ep: Any) -> ExpertParallelExplanation:
    return ExpertParallelExplanation(ep.transport, ep.requested, ep.against, tuple(_lines(ep)), explain_weights(ep.w))


def _lines(ep: Any) -> list[str]:
    ranks, placement = ep.ranks, ep.placement
    tp = f" x {ranks.tp_size} tensor parallel ones" if ranks.tp_size > 1 else ""
    backend = dist.get_backend(ranks.group)
    lines = [f"expert parallel: rank {ranks.rank} of {ranks.size}{tp}, {backend} on {ep.w.device.type}"]
    lines.append(f"transport: {ep.transport} ({TRANSPORTS[ep.transport].description}), {_why(ep)}")
    lines += [f"    not {name}: {reason}" for name, reason in ep.against.items()]
    lines.append(f"dispatch: {_dispatch(ep)}")
    row = bytes_of_row(ep.w, ep.payload, torch.bfloat16)
    lines.append(f"payload: {ep.payload.name}, {row} bytes a row of bfloat16 hidden states: {ep.payload.reason}")
    lines.append(f"combine: {_combine(ep)}, added in float32 in ascending rank order")
    if ep.in_one_op:
        kib = p2p.REMOTE_FROM // 1024
        lines.append(
            f"from {kib} KiB a rank on, prefill's kernels read other ranks' tokens and write their partial rows"
        )
    replicas = f", replicas: {placement.replicas}" if placement.has_replicas else ""
    slots = f"{placement.num_experts} experts in {placement.num_slots} slots, {placement.slots_of_ranks} on the ranks"
    lines.append(f"placement: {slots}{replicas}")
    return lines


def _why(ep: Any) -> str:
    if ep.requested != "auto":
        return "as asked"
    return "chosen as the first that serves the group"


def _combine(ep: Any) -> str:
    dtype = str(ep.partial_dtype).removeprefix("torch.")
    scales = f" with a float32 scale for {GROUP} values" if ep.partial_dtype in WIRE_DTYPES else ""
    row = bytes_of_partial_row(ep.w.hidden_size, ep.partial_dtype)
    return f"{TRANSPORTS[ep.transport].how[1]}, {dtype}{scales}, {row} bytes a row"


def _dispatch(ep: Any) -> str:
    if ep.capacity:
        return f"all-to-all, eager only; more than {ep.capacity} rows from a rank to a rank are an error on every rank"
    how, rows = TRANSPORTS[ep.transport].how[0], ep.max_tokens_per_rank
    return f"{how}, {rows} rows a rank, {ep.ranks.size * rows} for the experts"
