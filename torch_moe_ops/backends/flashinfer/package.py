"""The installed flashinfer: found without importing it, imported when first needed, never trusted by number.

Functions are called with keywords only, because releases insert parameters in the middle. Enums are read by
name, because their numbers move: routing method 8 was Unspecified in 0.6.8 and is Sigmoid in 0.7.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

# The releases that the contract tests run against; newer ones than NEWEST are used, and said to be so.
OLDEST, NEWEST = "0.6.8", "0.7.4"
# (first release, last release, schemes that it concerns, what is wrong)
KNOWN_BAD = (("0.6.16rc5", "0.6.17.post99", ("nvfp4",), "its 192-token tiles give NaN (flashinfer issue 4486)"),)

# Where this is 1, releases from FOUR_OVER_SIX_SINCE on quantize NVFP4 intermediates by another rule (a block's largest
# magnitude becomes 4 or 6, by the error of each, and the largest scale may be 256). From 0.7.4 on the
# rule is an argument, and None means the usual one, whatever the environment says.
FOUR_OVER_SIX, FOUR_OVER_SIX_SINCE = "FLASHINFER_NVFP4_4OVER6", "0.6.12rc1"
USUAL_NVFP4: dict[str, Any] = {"nvfp4_4over6": None}

Version = tuple[int, int, int, int, int]


def parse_version(text: str) -> Version:
    """(major, minor, patch, stage, number): stage 0 is a release candidate or dev build, 1 a release, 2 a post one."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(a|b|rc|dev|post)(\d+))?", text)
    if found is None:
        raise ValueError(f"flashinfer's version must look like 0.7.2 or 0.7.2.post1, got {text!r}")
    major, minor, patch, kind, number = found.groups()
    stage = 1 if kind is None else 2 if kind == "post" else 0
    return int(major), int(minor), int(patch or 0), stage, int(number or 0)


def installed_version() -> str | None:
    """The version of the installed package, without importing it; None where there is none."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return getattr(module("flashinfer"), "__version__", None)


def package_unmet(scheme: str, importing: bool) -> str | None:
    """Why the installed package cannot serve a scheme, or None.

    importing: also import it, which takes seconds and needs packages of its own.
    """
    version = installed_version()
    if version is None:
        return f"flashinfer-python (at least {OLDEST}) must be installed, got none"
    if parse_version(version) < parse_version(OLDEST):
        return f"flashinfer-python must be at least {OLDEST}, got {version}"
    for first, last, schemes, what in KNOWN_BAD:
        if scheme in schemes and parse_version(first) <= parse_version(version) <= parse_version(last):
            return f"flashinfer-python must not be one of {first} to {last} for {scheme} ({what}), got {version}"
    error = import_error() if importing else None
    return None if error is None else f"flashinfer must be importable, got {error}"


def four_over_six_unmet(function: str) -> str | None:
    """Why the environment makes a function quantize intermediates by another rule than ours, or None."""
    version = installed_version()
    asked = os.environ.get(FOUR_OVER_SIX) == "1"
    if not asked or version is None or parse_version(version) < parse_version(FOUR_OVER_SIX_SINCE):
        return None
    if USUAL_NVFP4.keys() <= entry(function).parameters:
        return None
    return (
        f"{FOUR_OVER_SIX} must not be 1: {function} of flashinfer {version} then quantizes intermediates by another "
        "rule, and cannot be told not to"
    )


@cache
def import_error() -> str | None:
    """What importing flashinfer's MoE functions raises, or None."""
    try:
        module("flashinfer.fused_moe.core")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@cache
def module(name: str) -> Any:
    """A module of the installed package, imported now."""
    return importlib.import_module(name)


@cache
def enum(name: str) -> Any:
    """An enum class of the installed release; None where it has none of this name."""
    for path in ("flashinfer.tllm_enums", "flashinfer.fused_moe.core"):
        found = getattr(module(path), name, None)
        if found is not None:
            return found
    return None


def has_member(name: str, member: str) -> bool:
    """Whether the installed release has this enum and this member of it."""
    return hasattr(enum(name), member)


def number(name: str, member: str) -> int:
    """The number of an enum's member in the installed release."""
    if not has_member(name, member):
        raise RuntimeError(f"flashinfer {installed_version()} has no {name}.{member}")
    return int(getattr(enum(name), member))


def is_built(name: str) -> bool:
    """Whether a compiled module lies where the installed release looks for it: made ahead of time, or by a call."""
    env = module("flashinfer.jit.env")
    folders = (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR)
    return any((folder / name / f"{name}.so").exists() for folder in folders)


class Entry:
    """One of FlashInfer's functions, called with the keywords that the installed release knows.

    accepts_pairs: a routed function that takes (topk_ids, topk_weights); older ones only take both packed in one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.function: Callable[..., Any] | None = getattr(module("flashinfer.fused_moe.core"), name, None)
        parameters = {} if self.function is None else dict(inspect.signature(self.function).parameters)
        self.parameters = frozenset(parameters)
        ids = parameters.get("topk_ids")
        self.accepts_pairs = ids is not None and "uple" in str(ids.annotation)

    def value(self, optional: dict[str, Any], **arguments: Any) -> Any:
        """Call with all `arguments`, and with those `optional` ones that the release has."""
        if self.function is None:
            raise RuntimeError(f"flashinfer {installed_version()} has no {self.name}")
        known = {name: value for name, value in optional.items() if name in self.parameters}
        return self.function(**arguments, **known)

    def __call__(self, optional: dict[str, Any], **arguments: Any) -> Any:
        """value(), as the output tensor.

        Some functions return a list, some a tensor, some change from one to the other between releases.
        """
        result = self.value(optional, **arguments)
        return result[0] if isinstance(result, (list, tuple)) else result


@cache
def entry(name: str) -> Entry:
    """The function of this name in flashinfer.fused_moe.core, which may be absent."""
    return Entry(name)


def forget() -> None:
    """Look everything up anew; for tests that replace the package."""
    for cached in (import_error, module, enum, entry):
        cached.cache_clear()
