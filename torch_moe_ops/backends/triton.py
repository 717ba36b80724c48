"""The `triton` backend: every NVIDIA GPU from SM80 on, and Triton's interpreter on a CPU.

Weights stay in the linear layout; nothing is prepared.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from torch_moe_ops.ops.call import ExpertsCall

# scheme -> activation formats that the kernels have
FORMATS: dict[str, tuple[str, ...]] = {"nvfp4": ("nvfp4", "none"), "none": ("none",)}
HIDDEN_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
MIN_VERSION = (3, 6)


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


def reasons(
    scheme: str,
    act_format: str,
    device: str,
    capability: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Every reason why this backend cannot run such a layer; empty where it can.

    dtype: of the hidden states, if known.
    """
    found = [reason for reason in (package_reason(), device_reason(device, capability)) if reason is not None]
    if scheme not in FORMATS:
        found.append(f"scheme must be one of {list(FORMATS)}, got {scheme!r}")
    elif act_format not in FORMATS[scheme]:
        found.append(f"act_format must be one of {list(FORMATS[scheme])} for scheme {scheme!r}, got {act_format!r}")
    if dtype is not None and dtype not in HIDDEN_DTYPES:
        found.append(f"hidden_states must have one of the dtypes {[str(d) for d in HIDDEN_DTYPES]}, got {dtype}")
    return found


def run(call: ExpertsCall, out: Tensor) -> None:
    """Fill `out` [num_tokens, hidden_size] (bfloat16, float16 or float32, contiguous) from a checked call."""
    from torch_moe_ops.kernels.triton.launch import run_experts

    if out.device.type == "cuda":
        with torch.cuda.device(out.device):
            run_experts(call, out)
    else:
        run_experts(call, out)
