"""Random layers for tests: weights, hidden states and routing of given sizes."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.core.activations import ACTIVATIONS


@dataclass(frozen=True)
class Case:
    """One layer and one batch. Everything else follows from the seed."""

    scheme: str = "nvfp4"
    act_format: str = "none"
    tokens: int = 5
    experts: int = 4
    top_k: int = 2
    hidden: int = 64
    inter: int = 48
    activation: str = "silu"
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    per_half: bool = False
    input_scale: str = "none"  # none (dynamic), tensor, expert
    seed: int = 0
    foreign: bool = False  # some ids outside the local experts
    weight_policy: str = "exact"


def make_raw(case: Case, device: str = "cpu") -> moe.RawWeights:
    """Experts of normal weights with an outlier column, a zero block and one tiny expert.

    Small ones are quantized once in a process, which is what costs; every caller gets tensors of its own.
    """
    if case.experts * case.hidden * case.inter > _SMALL or _modes():
        return _made(case).to(device)
    kept = _kept(case, torch.get_default_dtype())
    return dataclasses.replace(kept, **{name: t.clone() for name, t in kept.tensors().items()}).to(device)


_SMALL = 1 << 18  # weights of a third of a layer


def _modes() -> int:
    """How many modes of torch (fake tensors, another default device) decide now what a tensor is."""
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()


@functools.lru_cache(maxsize=128)
def _kept(case: Case, default_dtype: torch.dtype) -> moe.RawWeights:
    return _made(case)


def _made(case: Case) -> moe.RawWeights:
    g = torch.Generator().manual_seed(case.seed)
    halves = 2 if ACTIVATIONS[case.activation].is_gated else 1
    storage = case.dtype if case.scheme == "none" else torch.bfloat16
    w13 = torch.randn(case.experts, halves * case.inter, case.hidden, generator=g) / case.hidden**0.5
    w2 = torch.randn(case.experts, case.hidden, case.inter, generator=g) / case.inter**0.5
    w13[:, :, 0] *= 6
    w13[0, 0, :16] = 0
    if case.experts > 1:
        w13[1] *= 2.0**-6
    raw = moe.quantize_experts(w13.to(storage), w2.to(storage), case.scheme)
    changes: dict[str, Tensor | None] = {}
    if case.bias:
        changes["w13_bias"] = torch.randn(case.experts, halves * case.inter, generator=g) * 0.1
        changes["w2_bias"] = torch.randn(case.experts, case.hidden, generator=g) * 0.1
    if case.per_half and raw.w13_scale_2 is not None:
        factors = torch.rand(case.experts, halves, generator=g) * 3 + 0.25
        changes["w13_scale_2"] = raw.w13_scale_2 * factors
    if case.input_scale != "none":
        shape = () if case.input_scale == "tensor" else (case.experts,)
        largest = {"int8": 127, "fp8": 448}.get(case.act_format, 2688)
        changes["a13_input_scale"] = (torch.rand(shape, generator=g) + 0.5) * 4.0 / largest
        changes["a2_input_scale"] = (torch.rand(shape, generator=g) + 0.5) * 2.0 / largest
    return dataclasses.replace(raw, activation=case.activation, **changes)


def make_batch(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states, topk_ids (distinct in a row), topk_weights."""
    g = torch.Generator().manual_seed(case.seed + 1)
    x = torch.randn(case.tokens, case.hidden, generator=g).to(case.dtype)
    scores = torch.rand(case.tokens, case.experts, generator=g)
    ids = scores.argsort(dim=1)[:, : case.top_k].to(torch.int32)
    if case.foreign and case.tokens:
        holes = torch.rand(ids.shape, generator=g) < 0.4
        values = torch.tensor([-1, case.experts, 2**31 - 1, -(2**31)], dtype=torch.int32)
        ids = torch.where(holes, values[torch.randint(4, ids.shape, generator=g)], ids)
    weights = torch.rand(case.tokens, case.top_k, generator=g) + 0.1
    return x.to(device), ids.to(device), weights.to(device)
