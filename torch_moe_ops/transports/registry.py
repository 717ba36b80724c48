"""The transports that there are, and which of them a layer gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from torch_moe_ops.transports import nccl
from torch_moe_ops.transports.exchange import Combine, Exchange, Rows


class Transport(NamedTuple):
    """A way to exchange rows.

    reason: world size, device type -> why it cannot serve such a group, None where it can.
    dispatch, combine: see nccl.py; both are called on checked arguments and return new memory.
    """

    name: str
    description: str
    reason: Callable[[int, str], str | None]
    dispatch: Callable[[Rows, Exchange], tuple[Rows, Tensor]]
    combine: Callable[[Tensor, Exchange, Combine], Tensor]


# The order in which "auto" asks.
TRANSPORTS: dict[str, Transport] = {
    t.name: t
    for t in (
        Transport(
            "nccl",
            "collectives of torch.distributed, within and across hosts",
            lambda world_size, device: None,
            nccl.dispatch,
            nccl.combine,
        ),
    )
}


def choose(requested: str, world_size: int, device: str) -> tuple[Transport, dict[str, str]]:
    """The transport of a group, and for each one that was asked and cannot serve it, why.

    Raises ValueError: no transport of that name, or it cannot serve the group.
    """
    if requested != "auto" and requested not in TRANSPORTS:
        raise ValueError(f"ExpertParallel: transport must be one of {['auto', *TRANSPORTS]}, got {requested!r}")
    against: dict[str, str] = {}
    for transport in TRANSPORTS.values() if requested == "auto" else (TRANSPORTS[requested],):
        reason = transport.reason(world_size, device)
        if reason is None:
            return transport, against
        against[transport.name] = reason
    raise ValueError(f"ExpertParallel: transport {requested!r} cannot serve {world_size} ranks on {device}: {against}")
