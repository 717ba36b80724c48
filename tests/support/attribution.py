"""Which backends, schemes and activation formats a test runs: seen from the calls that it makes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from paths import TESTS

from torch_moe_ops.backends import BACKENDS

# Every way that tests take to a kernel: the ops, and the functions behind them that tests call by themselves. Each is
# called with an ExpertsCall first, which names its backend.
HOOKS = (
    ("torch_moe_ops.ops.run", "run_experts"),
    ("torch_moe_ops.backends.cpu", "run"),
    ("torch_moe_ops.backends.cuda_sm90", "run_kernel"),
    ("torch_moe_ops.backends.cuda_sm90_bf16", "run_kernel"),
    ("torch_moe_ops.backends.cuda_sm90_w4a8", "run"),
    ("torch_moe_ops.backends.sm90.fp8_products", "run"),
    ("torch_moe_ops.backends.triton_engine.launch", "run_experts"),
)


class Ran(NamedTuple):
    """A kind of call. where: "cpu", "sm90" and the like; "simulator" or "interpreter" of a GPU's backend on a CPU."""

    backend: str
    scheme: str
    act_format: str
    weight_policy: str
    where: str


class Watch:
    """Watches the HOOKS from when it is made until `end`."""

    def __init__(self) -> None:
        self.seen: set[Ran] = set()
        self.before: list[tuple[Any, str, Any]] = []
        for module, name in HOOKS:
            try:
                owner = importlib.import_module(module)
            except ImportError:  # Triton is not there
                continue
            self._put(owner, name, _watched(getattr(owner, name), self.seen))
        # Calls that are like an accepted one take none of these ways.
        owner = importlib.import_module("torch_moe_ops.prepared.accepted")
        self._put(owner, "run", _watched_accepted(owner.run, self.seen))

    def _put(self, owner: Any, name: str, watched: Any) -> None:
        self.before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, watched)

    def taken(self) -> set[Ran]:
        """What ran since this was asked before."""
        now = set(self.seen)
        self.seen.clear()
        return now

    def end(self) -> None:
        for owner, name, function in self.before:
            setattr(owner, name, function)


def _watched(function: Callable[..., Any], seen: set[Ran]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = next((a for a in args if hasattr(a, "act_format")), None)
        if call is not None:
            device = call.hidden_states.device
            seen.add(
                Ran(call.backend, call.scheme, call.act_format, call.weight_policy, where_of(call.backend, device))
            )
        return function(*args, **kwargs)

    return watched


def _watched_accepted(function: Callable[..., Any], seen: set[Ran]) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(w: Any, *args: Any) -> Any:
        result = function(w, *args)
        if result is not None:
            where = where_of(w.backend, result.device)
            seen.add(Ran(w.backend, w.scheme, w.act_format, w.weight_policy, where))
        return result

    return watched


def where_of(backend: str, device: torch.device) -> str:
    """What stands for the hardware that ran a call."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm{major}{minor}"
    if backend.startswith("flashinfer"):
        return "simulator"
    return "interpreter" if backend.startswith("triton") else "cpu"


# Folder in tests/backends -> how the names of its backends begin.
FOLDERS = {"cpu": "cpu", "sm90": "cuda_sm90", "triton": "triton", "flashinfer": "flashinfer"}


def backends_of(path: Path, parameters: dict[str, Any]) -> frozenset[str]:
    """Which backends a test says it is of: by its parameters, else by the folder of its file. Empty: it does not say."""
    values = (getattr(value, "backend", value) for value in parameters.values())
    named = frozenset(value for value in values if isinstance(value, str) and value in BACKENDS)
    if named or path.parent.parent != TESTS / "backends" or path.parent.name not in FOLDERS:
        return named
    return frozenset(name for name in BACKENDS if name.startswith(FOLDERS[path.parent.name]))


def named_by(parameters: dict[str, Any]) -> Iterator[Ran]:
    """What a test's parameters say that it would have run, for tests that are skipped or fail before they run it."""
    for value in parameters.values():
        if hasattr(value, "backend") and hasattr(value, "act_format"):
            policy = getattr(value, "weight_policy", "exact")
            yield Ran(value.backend, value.scheme, value.act_format, policy, _here())


def _here() -> str:
    return where_of("", torch.device("cuda" if torch.cuda.is_available() else "cpu"))
