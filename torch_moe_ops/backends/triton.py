"""The `triton` backend: every NVIDIA GPU from SM80 on, and Triton's interpreter on a CPU.

Weights stay in the linear layout; nothing is prepared.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends import linear
from torch_moe_ops.backends.registry import Backend, Requirement, available, formats, register, written_for
from torch_moe_ops.backends.triton_engine.backward_pass import Decoder
from torch_moe_ops.backends.triton_engine.formats import ACT_FORMATS, SCHEMES  # plain values: Triton is not imported
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.devices import capability_of
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.tuning import tuned

# scheme -> activation formats that the kernels have
FORMATS: dict[str, tuple[str, ...]] = written_for(SCHEMES, ACT_FORMATS)
HIDDEN_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
MIN_VERSION = (3, 6)
INSTALL = f"pip install 'triton>={'.'.join(map(str, MIN_VERSION))}'"


@cache
def package_reason() -> str | None:
    """None where Triton can be imported and is new enough, else why not."""
    try:
        import triton
    except ImportError as error:
        return f"the triton package must be importable, got {error}"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_VERSION:
        return f"triton must be at least {'.'.join(map(str, MIN_VERSION))}, got {triton.__version__}"
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def device_reason(device: str, capability: tuple[int, int] | None) -> str | None:
    """None where the kernels run on this device, else why not.

    device: "cuda" or "cpu" (the latter only in Triton's interpreter); capability: of a CUDA device, None elsewhere.
    """
    if _interpreted():
        return None
    if device != "cuda":
        return f"device must be cuda (or TRITON_INTERPRET=1 be set), got {device}"
    if capability is not None and capability < MIN_CAPABILITY:
        return f"compute capability must be at least {MIN_CAPABILITY}, got {capability}"
    return None


def _dtype_reason(problem: Problem) -> str | None:
    if problem.dtype is None or problem.dtype in HIDDEN_DTYPES:
        return None
    return f"dtype must be one of {[str(d) for d in HIDDEN_DTYPES]}, got {problem.dtype}"


def _policy_reason(problem: Problem) -> str | None:
    if problem.weight_policy == "exact":
        return None
    return f'weight_policy must be "exact" (the linear layout has no exponents of rows), got "{problem.weight_policy}"'


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    from torch_moe_ops.backends.triton_engine.launch import run_experts

    if out.device.type == "cuda":
        with torch.cuda.device(out.device):
            run_experts(call, out)
    else:
        run_experts(call, out)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device."""
    capability = capability_of(device) if device.type == "cuda" else None
    return package_reason() is None and device_reason(device.type, capability) is None


def dequantize(stored: Any, scheme: str, halves: int, space: Tensor) -> Decoder | None:
    """What decodes a projection in the linear layout (Backend), by one kernel; None where it has none."""
    if not runs_on(space.device):
        return None
    from torch_moe_ops.backends.triton_engine import dequantize as engine

    return engine.decoder(stored, scheme, halves, space) if engine.serves(scheme, space.dtype) else None


def notes(problem: Problem) -> str:
    """Whether tile sizes come from the rules or were tuned on this device."""
    if problem.device != "cuda":
        return ""
    experts = (problem.num_local_experts, problem.num_experts)
    sizes = (problem.top_k, problem.hidden_size, problem.intermediate_size)
    return tuned.note(problem.scheme, problem.act_format, experts, *sizes)


# Of every backend that runs these kernels.
COMMON = (Requirement(_policy_reason), Requirement(_dtype_reason))

register(
    Backend(
        name="triton",
        layout=linear.LINEAR,
        requires=(
            available(package_reason, INSTALL),
            Requirement(lambda problem: device_reason(problem.device, problem.capability)),
            formats(FORMATS),
            *COMMON,
        ),
        prepare=linear.prepare,
        restore=linear.restore,
        run=run,
        hidden_dtypes=HIDDEN_DTYPES,
        notes=notes,
        dequantize=dequantize,
    )
)
