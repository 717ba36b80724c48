"""Hidden states that hold NaN, infinities or next to nothing, and what every backend must make of them.

A row with NaN or an infinity comes out without a single number, whatever the format and the activation; every other
row comes out as if its neighbours were zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from problems import Case
from torch import Tensor

from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import SCHEMES

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
TINY = (1e-20, 1e-36, 1e-40, 1e-44)
_NOT_FINITE = {"nan": (math.nan,), "inf": (math.inf,), "-inf": (-math.inf,), "both": (-math.inf, math.nan, math.inf)}
# What may be left of a row of next to nothing: products of operands below 2^-126 may count as zero.
FLOOR = 1e-33


@dataclass(frozen=True)
class Batch:
    """Rows in between plain ones. `kinds` names each; "foreign" is a NaN row whose experts are all elsewhere."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    kinds: tuple[str, ...]

    def rows(self, *kinds: str) -> Tensor:
        """bool [rows]."""
        return torch.tensor([kind in kinds for kind in self.kinds], device=self.x.device)

    @property
    def not_finite(self) -> Tensor:
        return self.rows(*_NOT_FINITE, *(f"tiny {name}" for name in _NOT_FINITE))

    @property
    def plain(self) -> Tensor:
        return self.rows("plain")

    def named(self, rows: Tensor) -> list[str]:
        """The kinds of these rows."""
        return [self.kinds[row] for row in rows.nonzero().flatten().tolist()]

    def take(self, rows: list[int]) -> Batch:
        """These rows alone, in this order."""
        kinds = tuple(self.kinds[row] for row in rows)
        return Batch(self.x[rows].contiguous(), self.ids[rows].contiguous(), self.weights[rows].contiguous(), kinds)

    def without_specials(self) -> Tensor:
        """x with zeros in all rows but the plain ones."""
        return torch.where(self.plain[:, None], self.x, 0.0)


def make_batch(hidden: int, experts: int, top_k: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Batch:
    """Every kind of row, and a plain one after each."""
    g = torch.Generator().manual_seed(seed)
    rows: dict[str, Tensor] = {}
    for name, bad in _NOT_FINITE.items():
        for prefix, size in (("", 1.0), ("tiny ", 1e-40)):
            row = torch.randn(hidden, generator=g) * size
            row[torch.randint(hidden, (len(bad),), generator=g)] = torch.tensor(bad)
            rows[prefix + name] = row
    for size in TINY:
        rows[str(size)] = torch.randn(hidden, generator=g) * size
    sizes = 10.0 ** -torch.arange(0.0, 48.0, 48.0 / hidden)[:hidden]
    rows["mixed"] = torch.randn(hidden, generator=g) * sizes
    rows["foreign"] = torch.full((hidden,), math.nan)
    kinds = tuple(kind for name in rows for kind in (name, "plain"))
    x = torch.stack([rows[kind] if kind in rows else torch.randn(hidden, generator=g) for kind in kinds]).to(dtype)
    ids = torch.rand(len(kinds), experts, generator=g).argsort(dim=1)[:, :top_k].int()
    ids[kinds.index("foreign")] = -1
    weights = torch.rand(len(kinds), top_k, generator=g) + 0.1
    return Batch(x.to(device), ids.to(device), weights.to(device), kinds)


def check(run: Run, batch: Batch, want: Tensor, bound: float) -> None:
    """The result for `batch` against the oracle's `want`, row by row, and against the same rows among zeros.

    bound: relative L2 of a row.
    """
    out = run(batch.x, batch.ids, batch.weights)
    assert out.shape == want.shape
    bad = batch.not_finite
    numbers = (out.isfinite().any(1) & bad) | (~out.isfinite().all(1) & ~bad)
    assert not numbers.any(), f"numbers of what has none, or the other way round: {batch.named(numbers)}"
    assert not out[batch.rows("foreign")].any()
    error = (out.double() - want.double()).norm(dim=1)
    far = (error > bound * want.double().norm(dim=1) + FLOOR) & ~bad
    assert not far.any(), f"{batch.named(far)} are off by {error[far].tolist()}, of {want[far].norm(dim=1).tolist()}"
    among_zeros = run(batch.without_specials(), batch.ids, batch.weights)
    assert torch.equal(out[batch.plain], among_zeros[batch.plain])


def check_oracle(batch: Batch, want: Tensor) -> None:
    """What the oracle itself must hold."""
    rows = batch.not_finite
    assert not want[rows].isfinite().any()
    assert want[~rows].isfinite().all()


def cases(activations: dict[str, tuple[str, ...]], **fields: object) -> Iterator[Case]:
    """Every (scheme, activation format, input scale) that the ops define, with activations[act_format or ""]."""
    for scheme in SCHEMES.values():
        for act in scheme.act_formats:
            for scale in ("none", "tensor", "expert") if act in scheme.static_acts else ("none",):
                for name in activations.get(act, activations[""]):
                    yield Case(scheme.name, act, activation=name, input_scale=scale, **fields)  # type: ignore[arg-type]


_VALUES = (-math.inf, -1e20, -100.0, -88.5, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 100.0, 1e20, math.inf, math.nan)


def gate_up_pairs(activation: str) -> Tensor:
    """[pairs, 2], or [values, 1] where there is no gate: arguments of an activation."""
    values = torch.tensor(_VALUES)
    return torch.cartesian_prod(values, values) if ACTIVATIONS[activation].is_gated else values[:, None]
