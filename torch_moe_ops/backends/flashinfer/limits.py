"""Requirements shared by the FlashInfer backends. Each says what came."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from torch_moe_ops.backends.flashinfer import package, routing
from torch_moe_ops.backends.registry import Requirement
from torch_moe_ops.core.problem import Problem

Capabilities = tuple[tuple[int, int], ...]


def on_cuda(capabilities: Callable[[Problem], Capabilities]) -> Requirement:
    """A CUDA device of one of the compute capabilities that the problem's kernels are built for."""

    def unmet(problem: Problem) -> str | None:
        if problem.device != "cuda":
            return f"device must be 'cuda', got {problem.device!r}"
        allowed = capabilities(problem)
        if problem.capability is None or problem.capability in allowed:
            return None
        names = ", ".join(f"{major}.{minor}" for major, minor in allowed)
        got = f"{problem.capability[0]}.{problem.capability[1]}"
        return f"compute capability must be one of {names} for {problem.scheme} weights, got {got}"

    return Requirement(unmet)


def installed() -> Requirement:
    """A release of flashinfer that is neither too old nor known to be bad; imported only for CUDA devices."""

    def unmet(problem: Problem) -> str | None:
        return package.package_unmet(problem.scheme, importing=problem.device == "cuda")

    return Requirement(unmet, of_machine=True, mend=f"pip install 'flashinfer-python>={package.OLDEST}'")


def can_import(problem: Problem) -> bool:
    """Whether asking the package is allowed (a CUDA problem) and possible."""
    return problem.device == "cuda" and package.package_unmet(problem.scheme, importing=True) is None


def has_function(name: Callable[[Problem], str | None]) -> Requirement:
    """The installed release has the routed function that the problem needs."""

    def unmet(problem: Problem) -> str | None:
        function = name(problem)
        if function is None or not can_import(problem) or package.entry(function).function is not None:
            return None
        return f"flashinfer must have {function}, which {package.installed_version()} lacks"

    return Requirement(unmet, of_machine=True)


def has_activation(names: Mapping[str, str]) -> Requirement:
    """The installed release has the activation."""

    def unmet(problem: Problem) -> str | None:
        name = names.get(problem.activation)
        if name is None or not can_import(problem) or package.has_member("ActivationType", name):
            return None
        return f"flashinfer must have ActivationType.{name}, which {package.installed_version()} lacks"

    return Requirement(unmet, of_machine=True)


def activations(table: Mapping[str | tuple[str, str], tuple[str, ...]]) -> Requirement:
    """The activations that kernels have: {scheme, or (scheme, act_format): names}."""

    def unmet(problem: Problem) -> str | None:
        pair = problem.scheme, problem.act_format
        allowed = table.get(pair, table.get(problem.scheme))
        if allowed is None or problem.activation in allowed:
            return None
        what = f"scheme {problem.scheme!r} with act_format {problem.act_format!r}"
        return f"activation must be one of {list(allowed)} for {what}, got {problem.activation!r}"

    return Requirement(unmet)


def hidden_dtype(schemes: Mapping[str, tuple[torch.dtype, ...]]) -> Requirement:
    """Kernels that take unquantized hidden states take these dtypes: {scheme: dtypes}, where act_format is "none"."""

    def unmet(problem: Problem) -> str | None:
        allowed = schemes.get(problem.scheme, ())
        if problem.act_format != "none" or not allowed or problem.dtype is None or problem.dtype in allowed:
            return None
        return f"dtype must be one of {[str(d) for d in allowed]} for scheme {problem.scheme!r}, got {problem.dtype}"

    return Requirement(unmet)


def one_input_scale(schemes: tuple[str, ...] = ("nvfp4", "fp8")) -> Requirement:
    """One calibrated scale for the whole input: the kernels quantize a token once, for all experts that it visits.

    One scale per expert is reduced to the largest, which ranks of expert parallelism must agree on.
    """

    def unmet(problem: Problem) -> str | None:
        if problem.scheme not in schemes or problem.input_scale != "expert":
            return None
        if problem.num_local_experts == problem.num_experts:
            return None
        have = f"{problem.num_local_experts} of {problem.num_experts} experts are here"
        return f"input_scale must be 'tensor' (the largest of all ranks) where {have}, got 'expert'"

    return Requirement(unmet)


def calibrated(schemes: tuple[str, ...], why: str) -> Requirement:
    """Kernels that cannot quantize with scales of their own."""

    def unmet(problem: Problem) -> str | None:
        if problem.scheme not in schemes or problem.input_scale != "none":
            return None
        return f"input_scale must be calibrated ('tensor' or 'expert'): {why}, got 'none'"

    return Requirement(unmet)


def has_parameter(name: str, function: Callable[[Problem], str | None], why: str) -> Requirement:
    """The installed release's function has a parameter. function: the one that needs it, None where none does."""

    def unmet(problem: Problem) -> str | None:
        found = function(problem)
        if found is None or not can_import(problem):
            return None
        entry = package.entry(found)
        if entry.function is None or name in entry.parameters:
            return None
        return f"{why} needs {found}({name}=...), which flashinfer {package.installed_version()} lacks"

    return Requirement(unmet, of_machine=True)


def usual_nvfp4(function: Callable[[Problem], str | None]) -> Requirement:
    """No environment variable changes how a function quantizes to NVFP4. function: one that does so, or None."""

    def unmet(problem: Problem) -> str | None:
        found = function(problem)
        return package.four_over_six_unmet(found) if found is not None and can_import(problem) else None

    return Requirement(unmet, of_machine=True, mend=f"unset {package.FOUR_OVER_SIX}")


def since(release: str, what: Callable[[Problem], str | None]) -> Requirement:
    """Releases from `release` on do `what`, where the problem asks for it (None: it does not)."""

    def unmet(problem: Problem) -> str | None:
        text, version = what(problem), package.installed_version()
        if text is None or version is None or package.parse_version(version) >= package.parse_version(release):
            return None
        return f"{text} needs flashinfer-python {release} or newer, got {version}"

    return Requirement(unmet, of_machine=True)


def at_most(attribute: str, most: int) -> Requirement:
    """problem.<attribute> is not larger, or unknown."""

    def unmet(problem: Problem) -> str | None:
        value = getattr(problem, attribute)
        return None if value is None or value <= most else f"{attribute} must be at most {most}, got {value}"

    return Requirement(unmet)


def no_bias(schemes: tuple[str, ...]) -> Requirement:
    """Kernels without biases."""

    def unmet(problem: Problem) -> str | None:
        if not problem.has_bias or problem.scheme not in schemes:
            return None
        return f"has_bias must be False: the routed kernels of {problem.scheme} weights take none, got True"

    return Requirement(unmet)


def weight_scales(*allowed: str, dynamic: tuple[str, ...] = ()) -> Requirement:
    """What shares a scale of FP8 weights, with calibrated activations and with others."""

    def unmet(problem: Problem) -> str | None:
        if problem.scheme != "fp8":
            return None
        fitting = allowed if problem.input_scale != "none" else dynamic or allowed
        if problem.weight_scales in (None, *fitting):
            return None
        return (
            f"weight_scales must be one of {list(fitting)} for fp8 weights with input_scale "
            f"{problem.input_scale!r}, got {problem.weight_scales!r}"
        )

    return Requirement(unmet)


def even_experts(schemes: tuple[str, ...], multiple: int) -> Requirement:
    """The expert counts that a launcher asks for, whatever routes."""

    def unmet(problem: Problem) -> str | None:
        scheme = problem.scheme
        if scheme not in schemes:
            return None
        if problem.num_experts % multiple:
            return f"num_experts must be a multiple of {multiple} for {scheme}, got {problem.num_experts}"
        if problem.top_k is not None and problem.top_k >= problem.num_experts:
            return f"top_k must be less than num_experts = {problem.num_experts} for {scheme}, got {problem.top_k}"
        return None

    return Requirement(unmet)


def release_noted() -> str:
    """That the installed release is newer than any that the contract tests ran with, or ""."""
    version = package.installed_version()
    if version is None or package.parse_version(version) <= package.parse_version(package.NEWEST):
        return ""
    return f"flashinfer {version} is newer than {package.NEWEST}, the newest that the contract tests ran with"


def sizes_noted(problem: Problem, hidden: int, inter: int) -> str:
    """ "pads hidden_size 2880 -> 2944", or "" where nothing is padded."""
    pairs = (("hidden_size", problem.hidden_size, hidden), ("intermediate_size", problem.intermediate_size, inter))
    changed = ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
    return f"pads {changed}" if changed else ""


def routing_noted(problem: Problem) -> str:
    """Who routes in the monolithic op, where the method is known."""
    method, experts, top_k = problem.routing_method, problem.num_experts, problem.top_k
    if method is None:
        return ""
    if method not in routing.METHODS:
        return f"moeq::route does {method} routing"
    if routing.sizes_unmet(problem.scheme, method, experts, top_k or 1) is None:
        return ""
    return f"moeq::route does {method} routing of {experts} experts" + (f", top_k {top_k}" if top_k else "")
