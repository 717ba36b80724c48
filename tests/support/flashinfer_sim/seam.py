"""Putting the simulator in the place of the compiled module, in every supported release."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from . import cutlass, trtllm


class CompiledModule:
    """Any attribute exists: the front reads about 20 of them when it loads the module."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*values: Any) -> Any:
            self._calls.append(name)
            return trtllm.simulate(name, values)

        return call


class _Spec:
    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def build_and_load(self) -> CompiledModule:
        return CompiledModule(self._calls)

    def get_library_paths(self) -> tuple[str, ...]:
        return ()

    def get_library_path(self) -> str:
        return ""


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace what flashinfer would compile. Returns the list in which calls of the module are noted."""
    from flashinfer.fused_moe import core

    calls: list[str] = []
    monkeypatch.setattr(core, "gen_trtllm_gen_fused_moe_sm100_module", lambda *a, **k: _Spec(calls))
    if hasattr(core, "_get_trtllm_moe_sm100_module_impl"):
        core._get_trtllm_moe_sm100_module_impl.cache_clear()
        monkeypatch.setattr(core, "get_trtllm_moe_sm100_module", lambda: core._get_trtllm_moe_sm100_module_impl(False))
    else:
        core.get_trtllm_moe_sm100_module.cache_clear()
    # Each of these exists in some releases only: the loader of kernels, and questions to the device.
    monkeypatch.setattr(core, "setup_cubin_loader", lambda *a: None, raising=False)
    monkeypatch.setattr(core, "device_support_pdl", lambda device: False, raising=False)
    monkeypatch.setattr(core, "_device_support_moe_pdl", lambda device: False, raising=False)
    return calls


class _CutlassSpec(_Spec):
    def build_and_load(self) -> cutlass.Module:  # type: ignore[override]
        return cutlass.Module(self._calls)  # type: ignore[arg-type]


def install_cutlass(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> list[dict[str, Any]]:
    """The same for the CUTLASS module of a device. Returns the list in which the bound arguments are kept."""
    from flashinfer.fused_moe import core

    from torch_moe_ops.backends.flashinfer import workspace

    calls: list[dict[str, Any]] = []
    for name in ("90", "100", "103", "120", "89"):
        monkeypatch.setattr(
            core, f"gen_cutlass_fused_moe_sm{name}_module", lambda *a: _CutlassSpec(calls), raising=False
        )
    core.get_cutlass_fused_moe_module.cache_clear()
    monkeypatch.setattr(core, "get_compute_capability", lambda device: capability)
    monkeypatch.setattr(core, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(core, "is_cuda_version_at_least", lambda version: True, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    workspace._bytes_needed.cache_clear()
    return calls


def allow_cpu(monkeypatch: pytest.MonkeyPatch, backend: str, capability: tuple[int, int] = (10, 0)) -> None:
    """Let `prepare` choose a backend on a CPU: its requirements of the device are dropped, the others stay."""
    import dataclasses

    from torch_moe_ops.backends import BACKENDS
    from torch_moe_ops.backends.registry import Requirement
    from torch_moe_ops.core.problem import Problem

    as_blackwell = {"device": "cuda", "capability": capability}

    def elsewhere(requirement: Requirement) -> Requirement:
        def unmet(problem: Problem) -> str | None:
            on_cpu = problem.device == "cpu"
            return requirement.unmet(dataclasses.replace(problem, **as_blackwell) if on_cpu else problem)

        return Requirement(unmet, requirement.of_machine)

    real = BACKENDS[backend]
    fake = dataclasses.replace(real, requires=tuple(elsewhere(r) for r in real.requires), auto=False)
    monkeypatch.setitem(BACKENDS, backend, fake)
