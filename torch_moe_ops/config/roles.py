"""What a descriptor's `alpha_or_gscale` is, once its place in a config is known."""

from __future__ import annotations

import dataclasses

from torch_moe_ops.config._require import require
from torch_moe_ops.config.descriptors import FusedMoEQuantDesc

OWNER = "FusedMoEQuantConfig"


def as_activation(desc: FusedMoEQuantDesc, operand: str) -> FusedMoEQuantDesc:
    """The descriptor of an activation: the alias is its gscale, and it has nothing that only weights have."""
    if desc.unassigned is not None:
        desc = dataclasses.replace(desc, gscale=desc.unassigned, unassigned=None)
    for field in ("alpha", "channel_scale", "zp", "bias"):
        absent = getattr(desc, field) is None
        require(absent, OWNER, f"_{operand}.{field}", "be None: it belongs to a weight", "a Tensor")
    return desc


def as_weight(desc: FusedMoEQuantDesc, operand: str) -> FusedMoEQuantDesc:
    """The descriptor of a weight: the alias is its alpha (int4: its channel scale), and it has no gscale."""
    if desc.unassigned is not None:
        # int4 has no global scale: what the field passes there are scales per output channel.
        if desc.dtype == "int4":
            desc = dataclasses.replace(desc, channel_scale=desc.unassigned, unassigned=None)
        else:
            desc = dataclasses.replace(desc, alpha=desc.unassigned, unassigned=None)
    if desc.alpha is not None and desc.alpha.ndim == 0:
        # One expert's, squeezed by whoever multiplied scales of shape [1].
        desc = dataclasses.replace(desc, alpha=desc.alpha.reshape(1))
    require(desc.gscale is None, OWNER, f"_{operand}.gscale", "be None: it belongs to an activation", "a Tensor")
    return desc
