"""Backends as data: what they need, which layout they read, what runs them.

A requirement returns the reason why a problem does not fit, or None: condition and text are one.
`explain` evaluates every requirement of every backend; `select` picks from the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.schemes import FLOATS, SCHEMES, Scheme
from torch_moe_ops.weights.raw_weights import RawWeights


@dataclass(frozen=True)
class Problem:
    """One MoE layer as a backend sees it: no tensors, only what decides who can run it.

    `capability` is the CUDA compute capability, None off CUDA. `top_k`, `routing_method` and
    `dtype` (of the hidden states) are None where the caller has not said: they then decide nothing.
    `input_scale` is "none" (weight-only or dynamic), "tensor" or "expert". `constants` are the activation's
    alpha, beta and limit where they are not (1, 0, infinity). `weight_scales` says of fp8 weights what shares
    a scale: "tensor" (a matrix), "half" (of w13) or "channel"; of int8: "channel" or "group"; of int4: what
    `int4_scales_of` says.
    """

    scheme: str
    act_format: str = "none"
    activation: str = "silu"
    device: str = "cpu"
    capability: tuple[int, int] | None = None
    num_experts: int = 1
    num_local_experts: int = 0
    local_expert_offset: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    top_k: int | None = None
    dtype: torch.dtype | None = None
    routing_method: str | None = None
    has_bias: bool = False
    per_half_alphas: bool = False
    input_scale: str = "none"
    router_weight_on_input: bool = False
    weight_policy: str = "exact"
    constants: tuple[float, float, float] | None = None
    weight_scales: str | None = None

    def __post_init__(self) -> None:
        if not self.num_local_experts:
            object.__setattr__(self, "num_local_experts", self.num_experts - self.local_expert_offset)

    def __str__(self) -> str:
        shown = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _ALWAYS_SHOWN or value != f.default:
                shown.append(f"{f.name}={value!r}")
        return f"Problem({', '.join(shown)})"


_ALWAYS_SHOWN = ("scheme", "act_format", "activation", "device", "num_experts", "hidden_size", "intermediate_size")


@dataclass(frozen=True)
class Requirement:
    """A condition with its reason: `unmet(problem)` is None where it holds, else a clause that says why not.

    of_machine: it asks what is installed here, not what the problem is.
    mend: a shell command after which such a one holds; "" where there is none.
    of_format: it asks for scheme and activation format alone; an op refuses a backend that lacks them.
    """

    unmet: Callable[[Problem], str | None]
    of_machine: bool = False
    mend: str = ""
    of_format: bool = False


@dataclass(frozen=True)
class Sizes:
    """The logical sizes that decide the shape of every weight tensor of a layer."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    weight_dtype: torch.dtype


# The allowed shapes and the allowed dtypes of one argument.
Spec = tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]


@dataclass(frozen=True)
class Layout:
    """Where the codes and block scales of a prepared layer lie.

    specs: sizes -> {argument: (shapes, dtypes)} for w13, w2 and their scales; one of each must match.
        Zero points are shaped like the scales.
    intermediate_size: shape of w2 -> intermediate size, padding of the layout included.
    stored: scheme -> dtype of the codes where it is not the scheme's own.
    """

    name: str
    specs: Callable[[Scheme, Sizes], dict[str, Spec]]
    intermediate_size: Callable[[Scheme, tuple[int, ...]], int]
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)

    def weight_dtypes(self, scheme: Scheme) -> tuple[torch.dtype, ...]:
        """Dtypes of w13 and w2."""
        own = self.stored.get(scheme.name)
        return scheme.weight_dtypes if own is None else (own,)


@dataclass(frozen=True)
class BiasLayout:
    """How a layout orders biases. `name` is "w13_bias" or "w2_bias"; the dtype is float32.

    arrange: (name, bias [E, rows], halves) -> as the layout has it. undo: its inverse, on padded rows.
    The halves of w13_bias are padded already; rows of w2_bias may be added.
    """

    arrange: Callable[[str, Tensor, int], Tensor]
    undo: Callable[[str, Tensor, int], Tensor]


@dataclass(frozen=True)
class Backend:
    """One way to run the experts.

    prepare: raw weights -> {argument: tensor} in this layout, for the arguments that `layout` lists.
    restore: {argument: tensor} and sizes -> the same arguments as RawWeights holds them, bit for bit.
    run: fills `out` [num_tokens, hidden_size] (contiguous, of call.out_dtype; at least one token).
    notes: what a user should know where the backend fits ("pads ...", "emulates ..."), else "".
    run_monolithic: (call, router logits and the arguments of moeq::route after them, out) -> whether it ran.
        False, or None here: moeq::route and `run` do it.
    one_input_scale: tokens are quantized once, so `prepare` takes the largest a13_input_scale for all experts.
    """

    name: str
    layout: Layout
    requires: tuple[Requirement, ...]
    prepare: Callable[[RawWeights], dict[str, Tensor]]
    restore: Callable[[Scheme, Mapping[str, Tensor], Sizes], dict[str, Tensor]]
    run: Callable[[ExpertsCall, Tensor], None]
    hidden_dtypes: tuple[torch.dtype, ...] = FLOATS
    notes: Callable[[Problem], str] = lambda problem: ""
    auto: bool = True
    run_monolithic: Callable[[ExpertsCall, tuple[Any, ...], Tensor], bool] | None = None
    bias_layout: BiasLayout | None = None
    one_input_scale: bool = False

    def reasons(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot run the problem here."""
        return [reason for r in self.requires if (reason := r.unmet(problem)) is not None]

    def fits_anywhere(self, problem: Problem) -> bool:
        """Whether the backend runs the problem where it is installed."""
        return all(r.of_machine or r.unmet(problem) is None for r in self.requires)


BACKENDS: dict[str, Backend] = {}  # in order of preference


def register(backend: Backend) -> Backend:
    """Add a backend at the end of the preference order; a name can be taken once."""
    if backend.name in BACKENDS:
        raise ValueError(f"backend {backend.name!r} is registered already")
    BACKENDS[backend.name] = backend
    return backend


def one_of(attribute: str, *allowed: Any) -> Requirement:
    """problem.<attribute> is one of the allowed values, or unknown."""

    def unmet(problem: Problem) -> str | None:
        value = getattr(problem, attribute)
        if value is None or value in allowed:
            return None
        return f"{attribute} must be one of {list(allowed)}, got {value!r}"

    return Requirement(unmet)


def formats(table: Mapping[str, tuple[str, ...]]) -> Requirement:
    """The pair of scheme and activation format is in the table {scheme: activation formats}."""

    def unmet(problem: Problem) -> str | None:
        known = table.get(problem.scheme)
        if known is None:
            return f"scheme must be one of {list(table)}, got {problem.scheme!r}"
        if problem.act_format in known:
            return None
        return f"act_format must be one of {list(known)} for scheme {problem.scheme!r}, got {problem.act_format!r}"

    return Requirement(unmet, of_format=True)


def written_for(schemes: Iterable[str], act_formats: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The table of `formats` for code that has these schemes, and of their activation formats these.

    From what the code has, not from what there is: a scheme or format that is added later is not advertised by that.
    """
    return {name: tuple(act for act in SCHEMES[name].act_formats if act in act_formats) for name in schemes}


def available(probe: Callable[[], str | None], mend: str = "") -> Requirement:
    """A part of the library or a package is there: probe() is None, or says why not. mend: the command that gets it."""
    return Requirement(lambda problem: probe(), of_machine=True, mend=mend)
