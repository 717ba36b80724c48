"""The transports that there are, and which of them a layer gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.transports import nccl, p2p
from torch_moe_ops.transports.exchange import Combine, Exchange, Rows
from torch_moe_ops.transports.members import Wanted
from torch_moe_ops.transports.symmetric import prepare_buffers


class Transport(NamedTuple):
    """A way to exchange rows.

    reason: why it cannot serve such a layer, None where it can; the same on every rank.
    dispatch, combine: see nccl.py; both are called on checked arguments and return new memory.
    how: what dispatch and combine do, for `explain`.
    prepare: called by all ranks together when a layer is made: process group, device.
    """

    name: str
    description: str
    reason: Callable[[Wanted], str | None]
    dispatch: Callable[[Rows, Exchange], tuple[Rows, Tensor]]
    combine: Callable[[Tensor, Exchange, Combine], Tensor]
    how: tuple[str, str]
    prepare: Callable[[Any, torch.device], None] = lambda group, device: None


# The order in which "auto" asks.
TRANSPORTS: dict[str, Transport] = {
    t.name: t
    for t in (
        Transport(
            "p2p",
            "kernels on the memory of the other GPUs of one host",
            p2p.reason_against,
            p2p.dispatch,
            p2p.combine,
            (
                "each rank reads the rows of the others, or writes few rows to them",
                "each rank writes partial rows to where they are added",
            ),
            prepare_buffers,
        ),
        Transport(
            "nccl",
            "collectives of torch.distributed, within and across hosts",
            lambda wanted: None,
            nccl.dispatch,
            nccl.combine,
            ("all-gather", "all-to-all of partial rows"),
        ),
    )
}


def check_name(requested: str) -> None:
    if requested != "auto" and requested not in TRANSPORTS:
        raise ValueError(f"ExpertParallel: transport must be one of {['auto', *TRANSPORTS]}, got {requested!r}")


def choose(requested: str, wanted: Wanted) -> tuple[Transport, dict[str, str]]:
    """The transport of a layer, and for each one that was asked and cannot serve it, why; the same on every rank.

    Raises ValueError: it cannot serve the layer.
    """
    against: dict[str, str] = {}
    for transport in TRANSPORTS.values() if requested == "auto" else (TRANSPORTS[requested],):
        reason = transport.reason(wanted)
        if reason is None:
            return transport, against
        against[transport.name] = reason
    raise ValueError(f"ExpertParallel: transport {requested!r} cannot serve this layer: {against[requested]}")
