"""The `triton_fp8` backend: the `triton` backend's kernels with e4m3 codes multiplied on fp8 tensor cores.

Hopper's keep about 14 bits of such a sum, which starts anew every 128 values of K. The result is off by what
docs/numerics.md says: `accuracy="strict"` leaves this backend out.
"""

from __future__ import annotations

from torch_moe_ops.backends import linear, triton
from torch_moe_ops.backends.registry import Backend, Requirement, available, formats, register
from torch_moe_ops.core.problem import STANDARD, Problem

FORMATS: dict[str, tuple[str, ...]] = {"fp8": ("fp8",), "fp8_block": ("fp8",)}
MIN_CAPABILITY = (8, 9)


def _device_reason(problem: Problem) -> str | None:
    """None where the kernels and the GPU's tensor cores do it, else why not."""
    reason = triton.device_reason(problem.device, problem.capability)
    if reason is None and problem.capability is not None and problem.capability < MIN_CAPABILITY:
        return f"compute capability must be at least {MIN_CAPABILITY}, got {problem.capability}"
    return reason


register(
    Backend(
        name="triton_fp8",
        layout=linear.LINEAR,
        requires=(
            available(triton.package_reason, triton.INSTALL),
            Requirement(_device_reason),
            formats(FORMATS),
            *triton.COMMON,
        ),
        prepare=linear.prepare,
        restore=linear.restore,
        run=triton.run,
        hidden_dtypes=triton.HIDDEN_DTYPES,
        notes=lambda problem: "sums of fp8 products keep about 14 bits",
        dequantize=triton.dequantize,
        accuracy=STANDARD,
    )
)
