"""Loads the compiled extensions, where they exist, and remembers why one is absent.

The package works without them (pure torch); with them, importing registers their ops under ``torch.ops.moeq_C``.
An extension that exists but cannot be loaded is a fault of the installation: it is reported by a warning and by its
reason, and never mistaken for one that was not compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_moe_ops.core.kernel_facts import ARGUMENTS

_SOURCES = Path(__file__).resolve().parents[2]
_INSTALL = "pip install --force-reinstall --no-deps --no-build-isolation "
_INSTALL += str(_SOURCES) if (_SOURCES / "setup.py").exists() else "<folder of torch-moe-ops' sources>"
# Shell commands that compile the extensions.
BUILD_CPU = f"MOEQ_CUDA=0 {_INSTALL}"
BUILD_CUDA = f"MOEQ_CUDA=1 {_INSTALL}"


@dataclass(frozen=True)
class Extension:
    """Outcome of loading one extension module; `reason` says why it is absent and is empty when it is loaded."""

    module: str
    reason: str

    @property
    def loaded(self) -> bool:
        """Whether the extension's ops are registered."""
        return not self.reason


def load(module: str, build_hint: str) -> Extension:
    """Import an extension module by its full name.

    Args:
        module: such as "torch_moe_ops._C".
        build_hint: how to compile it, for the reason that an absent file gives.
    """
    if importlib.util.find_spec(module) is None:
        return Extension(module, f"{module} was not compiled ({build_hint})")
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        reason = f"{module} exists but does not load in torch {torch.__version__}: {error}"
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
        return Extension(module, reason)
    return Extension(module, "")


def of_these_sources(extension: Extension, build: str, needs: tuple[str, ...] = ()) -> Extension:
    """The same, or absent where its ops take other arguments than Python gives, as calls would mix them up, or where it
    lacks one that it needs to have."""
    for op in needs:
        if extension.loaded and not hasattr(torch.ops.moeq_C, op):
            reason = f"{extension.module} was compiled from other sources (it has no moeq_C::{op}): {build}"
            warnings.warn(reason, RuntimeWarning, stacklevel=2)
            return Extension(extension.module, reason)
    for op, arguments in ARGUMENTS.items():
        compiled = getattr(torch.ops.moeq_C, op, None) if extension.loaded else None
        if compiled is None:
            continue
        if tuple(a.name for a in compiled.default._schema.arguments) != arguments:
            reason = f"{extension.module} was compiled from other sources (moeq_C::{op} has other arguments): {build}"
            warnings.warn(reason, RuntimeWarning, stacklevel=2)
            return Extension(extension.module, reason)
    return extension


def _load_cpu() -> Extension:
    loaded = load("torch_moe_ops._C", "it is built by pip where a C++17 compiler and torch are found")
    return of_these_sources(loaded, BUILD_CPU, ("experts_accepted", "accept_experts", "new_accepted_names"))


def _load_cuda() -> Extension:
    module = "torch_moe_ops._C_cuda"
    # It links against torch's CUDA libraries, so that a CPU-only torch could but fail to load it.
    if torch.version.cuda is None:
        return Extension(module, f"torch {torch.__version__} was built without CUDA")
    loaded = load(module, "it is built by pip where nvcc is found and a GPU is visible, or MOEQ_CUDA=1 is set")
    return of_these_sources(loaded, BUILD_CUDA)


_CPU = _load_cpu()
_CUDA = _load_cuda()


def has_cpu_extension() -> bool:
    """Whether the C++ ops of the CPU are registered."""
    return _CPU.loaded


def has_cuda_extension() -> bool:
    """Whether the CUDA ops are registered; says nothing about whether a GPU is visible."""
    return _CUDA.loaded


def cuda_extension_file() -> str | None:
    """The library that holds the CUDA ops; None where it is not loaded."""
    return sys.modules[_CUDA.module].__file__ if _CUDA.loaded else None


def cpu_extension_reason() -> str:
    """Why the CPU extension is absent; empty when it is loaded."""
    return _CPU.reason


def cuda_extension_reason() -> str:
    """Why the CUDA extension is absent; empty when it is loaded."""
    return _CUDA.reason
