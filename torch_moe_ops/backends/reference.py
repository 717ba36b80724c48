"""Backend `reference`: the oracle as a backend. Runs everything, on any device, slowly."""

from __future__ import annotations

from torch import Tensor

from torch_moe_ops.backends import linear
from torch_moe_ops.backends.registry import Backend, formats, one_of, register, written_for
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.oracle.operands import ACT_FORMATS, WEIGHTS
from torch_moe_ops.oracle.reference import experts_reference


def run(call: ExpertsCall, out: Tensor) -> None:
    """Every rounding step of the contract, in float32."""
    out.copy_(experts_reference(call))


register(
    Backend(
        name="reference",
        layout=linear.LINEAR,
        requires=(
            formats(written_for(WEIGHTS, ACT_FORMATS)),
            one_of("activation", *ACTIVATIONS),
        ),
        prepare=linear.prepare,
        restore=linear.restore,
        run=run,
        notes=lambda problem: "pure torch, one expert at a time: for checking, not for speed",
        auto=False,
    )
)
