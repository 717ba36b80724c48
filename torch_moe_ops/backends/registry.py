"""Backends as data: what they need, which layout they read, what runs them.

A requirement returns the reason why a problem does not fit, or None: condition and text are one.
`explain` evaluates every requirement of every backend; `select` picks from the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import BiasLayout, Layout, Sizes
from torch_moe_ops.core.problem import STANDARD, STRICT, Problem
from torch_moe_ops.core.schemes import FLOATS, SCHEMES, Scheme
from torch_moe_ops.weights.raw_weights import RawWeights


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


class RemoteExperts(NamedTuple):
    """Experts that read tokens, and write partial rows, in the memory of other GPUs (transports/p2p.py).

    run: (call on the rows of all ranks, whose hidden states are this rank's part alone, arguments that say where the
        others' are, the partial rows that this rank gets from all) fills partial rows of all ranks.
    """

    run: Callable[[ExpertsCall, dict[str, Any], Tensor], None]


class AcceptedCalls(NamedTuple):
    """Calls that need not be checked, as they are like one that was (prepared/accepted.py).

    new_names: a number for whatever a set of calls has that is no tensor, never given twice; -1: there are no more.
    accept: (call as the op got it, the same as `run` gets it, its result, the number of its names) -> whether calls
        like it may be run so.
    run: (hidden states, ids, weights, the tensors of WEIGHT_FIELDS, the number) -> the result, or None where the call
        is not like one that was accepted with that number, in everything that the op checks, or where anything comes
        between a caller and an op.
    """

    new_names: Callable[[], int]
    accept: Callable[[ExpertsCall, ExpertsCall, Tensor, int], bool]
    run: Callable[..., Tensor | None]


@dataclass(frozen=True)
class Backend:
    """One way to run the experts.

    prepare: raw weights -> {argument: tensor} in this layout, for the arguments that `layout` lists.
    restore: {argument: tensor} of w13, w2 or both, and sizes -> the same ones as RawWeights holds them, bit for bit.
    run: fills `out` [num_tokens, hidden_size] (contiguous, of call.out_dtype; at least one token).
    notes: what a user should know where the backend fits ("pads ...", "emulates ..."), else "".
    run_monolithic: (call, router logits and the arguments of moeq::route after them, out) -> whether it ran.
        False, or None here: moeq::route and `run` do it.
    remote: for expert parallelism within a host; None: rows are exchanged before and after `run`.
    delegate: the backend whose kernels run what this one's do not, "" where there is none; `notes` says what that is.
    decode: as restore, but -> {"w13", "w2": numbers [E, rows, K] without alphas}, which gradients are made with.
        None: what `restore` gives is decoded.
    dequantize: (a projection of all experts as the layout has it, scheme, halves of its rows, space [step, rows,
        width]) -> what fills the space with some of them (Decoder), as gradients/weights.py says; None where nothing
        does, or here: never.
    few_rows: (pass of adapters, projection, rows, index, addend, out) -> whether it filled out [pairs, N] from packed
        weights, where an expert has few rows (triton_engine/few.py); None: experts are decoded.
    rows_by_slot: (pass of adapters) -> what runs both products on the layer's own kernels (BySlot), or None where they
        do not run it, or here: never.
    run_backward: (call, sizes, gradient of the output, which gradients are wanted) -> them, as gradients/experts.py has
        it; None where it does not run, or here: experts are decoded in chunks.
    accepted: of calls that repeat; None: each is checked.
    one_input_scale: tokens are quantized once, so `prepare` takes the largest a13_input_scale for all experts.
    auto: `prepare` may take it unasked.
    accuracy: "strict" where results are within the bounds that docs/numerics.md has for strict backends, "standard"
        where they are farther away: `prepare` takes such a one by what was measured (accuracy.py), or as its own order
        says where the kernels are `of_the_field`, which is what others are compared with.
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
    remote: RemoteExperts | None = None
    bias_layout: BiasLayout | None = None
    delegate: str = ""
    decode: Callable[[Mapping[str, Tensor], Sizes], dict[str, Tensor]] | None = None
    dequantize: Callable[[Any, str, int, Tensor], Any] | None = None
    few_rows: Callable[[Any, Any, Tensor, Tensor | None, Any, Tensor], bool] | None = None
    rows_by_slot: Callable[[Any], Any] | None = None
    run_backward: Callable[[ExpertsCall, Sizes, Tensor, Any], Any] | None = None
    accepted: AcceptedCalls | None = None
    one_input_scale: bool = False
    accuracy: str = STRICT
    of_the_field: bool = False

    @property
    def needs_no_measurement(self) -> bool:
        """Whether no result has to say that it is near enough to the oracle to be taken unasked."""
        return self.accuracy == STRICT or self.of_the_field

    def accuracy_reason(self, problem: Problem) -> str | None:
        """None where this backend is as accurate as the problem asks, else why not."""
        if problem.accuracy == STRICT and self.accuracy != STRICT:
            why = "as results are off by more than docs/numerics.md allows"
            return f'accuracy must be "{STANDARD}", {why}, got "{STRICT}"'
        return None

    def reasons(self, problem: Problem) -> list[str]:
        """Every reason why this backend cannot run the problem here."""
        found = (*(r.unmet(problem) for r in self.requires), self.accuracy_reason(problem))
        return [reason for reason in found if reason is not None]

    def fits_anywhere(self, problem: Problem) -> bool:
        """Whether the backend runs the problem where it is installed."""
        if self.accuracy_reason(problem) is not None:
            return False
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
