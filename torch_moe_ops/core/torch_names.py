"""What the package uses of torch that torch promises nobody: where a release lacks one, importing the package says so.

Otherwise it would be an AttributeError somewhere, at import or in the one call that needs the name.
"""

from __future__ import annotations

import importlib

import torch

from torch_moe_ops.core.version import __version__

TESTED = ("2.11", "2.15")  # the oldest and the newest release that tests have run with

Names = dict[str, tuple[str, ...]]  # by module

NEEDED: Names = {
    "torch": ("_check",),
    "torch._C": (
        "DispatchKey",
        "_AutoDispatchBelowAutograd",
        "_after_ADInplaceOrView_keyset",
        "_after_autograd_keyset",
        "_any_requires_grad",
        "_get_tracing_state",
        "_increment_version",
        "_len_torch_dispatch_stack",
        "_overlaps",
        "_parse_dispatch_key",
        "_set_grad_enabled",
        "is_grad_enabled",
        "parse_schema",
    ),
    "torch._C._autograd": ("_profiler_enabled",),
    "torch._C._functorch": ("maybe_current_level",),
    "torch._functorch.utils": ("enable_single_level_autograd_function",),
    "torch._subclasses": ("FakeTensor",),
    "torch.autograd.forward_ad": ("_current_level",),
    "torch.autograd.function": ("_SingleLevelFunction",),
    "torch.distributed.distributed_c10d": ("_resolve_process_group",),
}
# Of the transport p2p, which a layer can do without.
SYMMETRIC_MEMORY: Names = {"torch.distributed._symmetric_memory": ("empty", "rendezvous")}


def missing(wanted: Names) -> list[str]:
    """Those that this torch does not have."""
    return [f"{module}.{name}" for module, names in wanted.items() for name in names if not _has(module, name)]


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def require() -> None:
    """Raise ImportError where this torch lacks a name."""
    if names := missing(NEEDED):
        raise ImportError(
            f"torch_moe_ops {__version__} needs {', '.join(names)}, which torch {torch.__version__} does not have: "
            f"install torch {TESTED[0]} to {TESTED[1]}, or a newer torch-moe-ops"
        )


require()
