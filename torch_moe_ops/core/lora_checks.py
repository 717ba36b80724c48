"""What adapters beside experts must be: of the op, and of a caller that cannot wait for the op to say so."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.core.schemes import FLOATS


def check_scaling(op: str, scaling: Tensor) -> None:
    """Shape [adapters], float32."""
    check_given(op, "lora_scaling", scaling)
    if scaling.ndim != 1 or not scaling.shape[0]:
        fail(op, "lora_scaling", "have shape [adapters], of at least one", scaling.shape)
    if scaling.dtype is not torch.float32:
        fail(op, "lora_scaling", "have dtype torch.float32", scaling.dtype)


def check_ids(
    op: str, ids: Tensor | None, tokens: int, adapters: int, dtypes: tuple[torch.dtype, ...] = (torch.int32,)
) -> None:
    """A row for each token; None for a single adapter only."""
    if ids is None:
        if adapters != 1:
            fail(op, "lora_ids", f"be given for {adapters} adapters", None)
        return
    shape = ids.shape
    fits = ids.ndim == 1 and shape[0] == tokens
    check(fits, lambda: describe(op, "lora_ids", f"have shape ({tokens},), a row for each token", shape))
    if ids.dtype not in dtypes:
        fail(op, "lora_ids", f"have dtype {' or '.join(map(str, dtypes))}", ids.dtype)


def check_some_given(op: str, factors: tuple[Tensor | None, ...]) -> None:
    if all(factor is None for factor in factors):
        fail(op, "lora_a13", "be given, or lora_a2, with their lora_b", None)


def check_factors(
    op: str, which: str, a: Tensor | None, b: Tensor | None, adapters: int, shape: tuple[int, int, int]
) -> None:
    """A and B of GEMM `which`, "13" or "2", beside weights of `shape` [experts, rows, K]."""
    first, second = f"lora_a{which}", f"lora_b{which}"
    if a is None or b is None:
        if a is not None or b is not None:
            missing, there = (second, first) if b is None else (first, second)
            fail(op, missing, f"be given with {there}", None)
        return
    experts, rows, k = shape
    if a.ndim != 3 or a.shape[0] != experts or a.shape[2] != k or not a.shape[1] or a.shape[1] % adapters:
        wanted = f"have shape [{experts}, ranks, {k}], ranks a positive multiple of the {adapters} adapters"
        fail(op, first, wanted, a.shape)
    if tuple(b.shape) != (experts, rows, a.shape[1]):
        fail(op, second, f"have shape ({experts}, {rows}, {a.shape[1]})", b.shape)
    for name, factor in ((first, a), (second, b)):
        if factor.dtype not in FLOATS:
            fail(op, name, f"have one of the dtypes {[str(d) for d in FLOATS]}", factor.dtype)
