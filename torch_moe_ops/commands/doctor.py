"""What is installed, compiled and usable here, and why the rest is not: `python -m torch_moe_ops doctor`."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.backends.cpu_panels.isa import cpu_isa
from torch_moe_ops.backends.registry import Backend
from torch_moe_ops.core import extension
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.core.version import __version__

# Sizes that every layout takes, so that only device, packages and formats decide.
_EXPERTS, _TOP_K, _HIDDEN, _INTERMEDIATE = 8, 2, 2048, 1024
_POLICIES = ("exact", "packed", "folded")
# Optional packages and what they are for.
_PACKAGES = {
    "triton": "the `triton` backends and routing in one launch: pip install 'torch-moe-ops[triton]'",
    "flashinfer": "the `flashinfer_*` backends: pip install 'torch-moe-ops[flashinfer]'",
    "transformers": "torch_moe_ops.transformers: pip install 'torch-moe-ops[transformers]'",
}


@dataclass(frozen=True)
class Device:
    """A device as `Problem` names it. `capability`: of a CUDA device, None elsewhere."""

    name: str
    kind: str
    capability: tuple[int, int] | None


def devices() -> list[Device]:
    """The CPU and every kind of GPU that torch sees, once each."""
    found = [Device("CPU", "cpu", None)]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        device = Device(f"{name} (SM{capability[0]}{capability[1]})", "cuda", capability)
        if device not in found:
            found.append(device)
    return found


def problems(device: Device) -> Iterator[Problem]:
    """One layer of every scheme, activation format and weight policy."""
    for scheme in SCHEMES.values():
        for act_format in scheme.act_formats:
            for policy in _POLICIES if act_format == "fp8" else _POLICIES[:1]:
                yield Problem(
                    scheme=scheme.name,
                    act_format=act_format,
                    weight_policy=policy,
                    device=device.kind,
                    capability=device.capability,
                    num_experts=_EXPERTS,
                    top_k=_TOP_K,
                    hidden_size=_HIDDEN,
                    intermediate_size=_INTERMEDIATE,
                )


def usable(backend: Backend, device: Device) -> tuple[list[str], list[str]]:
    """(schemes that the backend runs on the device, why it runs none: the reasons that all problems share)."""
    runs: dict[str, None] = {}
    shared: list[str] | None = None
    for problem in problems(device):
        reasons = backend.reasons(problem)
        if not reasons:
            runs[problem.scheme] = None
        shared = reasons if shared is None else [reason for reason in shared if reason in reasons]
    return list(runs), [] if runs else shared or ["no scheme with an activation format that it runs"]


def _versions() -> Iterator[str]:
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", without CUDA"
    yield f"torch_moe_ops {__version__}, torch {torch.__version__}{cuda}"
    yield f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    for package, purpose in _PACKAGES.items():
        yield f"{package}: {_version_of(package) or f'not installed; for {purpose}'}"


def _version_of(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError as error:
        return f"installed, but does not import: {error}"


def _compiled() -> Iterator[str]:
    isa = f", instruction set {cpu_isa()}" if extension.has_cpu_extension() else ""
    yield f"CPU kernels: {extension.cpu_extension_reason() or f'loaded{isa}'}"
    yield f"CUDA kernels: {extension.cuda_extension_reason() or 'loaded'}"


def report() -> Iterator[str]:
    """The report, line by line."""
    yield from _versions()
    yield from _compiled()
    width = max(map(len, BACKENDS))
    for device in devices():
        yield f"on {device.name}:"
        for name, backend in BACKENDS.items():
            schemes, reasons = usable(backend, device)
            mark, text = ("ok", ", ".join(schemes)) if schemes else ("no", "; ".join(reasons))
            yield f"  {mark} {name:<{width}}  {text}"
