"""Layers and batches made on the GPU, for every format that a GPU backend says it can run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.schemes import SCHEMES

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Kernels of this library that run on CUDA; FlashInfer's have tests of their own.
_OTHERS = ("reference", "cpu", "flashinfer_trtllm", "flashinfer_cutlass")
GPU_BACKENDS = tuple(name for name in BACKENDS if name not in _OTHERS)
_LARGEST = {"nvfp4": 2688.0, "fp8": 448.0, "int8": 127.0}  # largest quantized activation


def capability() -> tuple[int, int]:
    """Of the device, or where there is none, of the one that the list of tests is made for."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


@dataclass(frozen=True)
class Format:
    """What a backend runs: a scheme, an activation format, where its scale comes from (none: dynamic), a policy."""

    backend: str
    scheme: str
    act_format: str
    input_scale: str
    weight_policy: str

    def __str__(self) -> str:
        named = (self.backend, self.scheme, self.act_format, self.input_scale, self.weight_policy)
        return "-".join(named[:3] + tuple(n for n in named[3:] if n not in ("none", "exact")))

    def settings(self, device: str = "cuda") -> dict[str, str]:
        """As `prepare` and `explain` take them."""
        return {"act_format": self.act_format, "weight_policy": self.weight_policy, "device": device}


def _wanted() -> Iterator[tuple[str, str, str, str]]:
    """Every (scheme, activation format, input scale, weight policy) that the ops define."""
    for scheme in SCHEMES.values():
        for act in scheme.act_formats:
            for scale in ("none", "tensor", "expert") if act in scheme.static_acts else ("none",):
                for policy in scheme.policies if act == "fp8" else ("exact",):
                    yield scheme.name, act, scale, policy


@cache
def formats_of(backend: str, device: str = "cuda") -> tuple[Format, ...]:
    """What a backend says that it runs on a device of this machine, or where there is none, on a Hopper GPU."""
    found = []
    for scheme, act, scale, policy in _wanted():
        problem = moe.Problem(
            scheme, act, device=device, capability=capability() if device == "cuda" else None, num_experts=8,
            hidden_size=256, intermediate_size=256, input_scale=scale, weight_policy=policy,
        )  # fmt: skip
        if BACKENDS[backend].fits_anywhere(problem):
            found.append(Format(backend, scheme, act, scale, policy))
    return tuple(found)


def _formats() -> Iterator[Format]:
    for backend in GPU_BACKENDS:
        yield from formats_of(backend)


# From the backends' own requirements: a format that a backend gains is tested from then on.
FORMATS = tuple(_formats())
# Scope: all tests of a module for one format come one after the other, and share its layer.
formats = pytest.mark.parametrize("fmt", FORMATS, ids=str, scope="module")


@dataclass(frozen=True)
class Sizes:
    """One layer. MX formats take it with sizes rounded up to their block."""

    experts: int
    top_k: int
    hidden: int
    inter: int
    activation: str = "silu"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 7  # of the weights
    scales: tuple[int, torch.dtype, bool] | None = None  # of INT4 (`int4_in_form`); None: as quantize_experts has them


WIDE = Sizes(experts=8, top_k=2, hidden=2880, inter=704)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@lru_cache(maxsize=3)
def make_raw(fmt: Format, sizes: Sizes, device: str = "cuda") -> moe.RawWeights:
    """Normal weights with an outlier column, a block of zeros and one tiny expert, quantized on the device."""
    g = torch.Generator(device).manual_seed(sizes.seed)
    multiple = SCHEMES[fmt.scheme].size_multiple
    hidden, inter = _up(sizes.hidden, multiple), _up(sizes.inter, multiple)
    rows = inter * (2 if ACTIVATIONS[sizes.activation].is_gated else 1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    w13 = randn(sizes.experts, rows, hidden).mul_(hidden**-0.5)
    w2 = randn(sizes.experts, hidden, inter).mul_(inter**-0.5)
    w13[:, :, 0] *= 6
    w13[0, 0, :32] = 0
    w13[-1] *= 2.0**-6
    raw = moe.quantize_experts(w13.to(sizes.dtype), w2.to(sizes.dtype), fmt.scheme)
    if sizes.scales is not None and fmt.scheme == "int4":
        raw = int4_in_form(raw, *sizes.scales, g)
    changes: dict[str, Tensor] = {}
    if sizes.bias:
        changes["w13_bias"] = randn(sizes.experts, rows) * 0.1
        changes["w2_bias"] = randn(sizes.experts, hidden) * 0.1
    if raw.w13_scale_2 is not None:
        factors = torch.rand(sizes.experts, rows // inter, generator=g, device=device) * 3 + 0.25
        changes["w13_scale_2"] = raw.w13_scale_2 * factors
    if fmt.input_scale != "none":
        shape = () if fmt.input_scale == "tensor" else (sizes.experts,)
        for name, amax in (("a13_input_scale", 4.0), ("a2_input_scale", 2.0)):
            spread = torch.rand(shape, generator=g, device=device) + 0.5
            changes[name] = spread * amax / _LARGEST[fmt.act_format]
    return dataclasses.replace(raw, activation=sizes.activation, **changes)


def int4_in_form(raw: moe.RawWeights, group: int, dtype: torch.dtype, zero: bool, g: torch.Generator) -> moe.RawWeights:
    """INT4 in groups of 128 with scales of smaller groups, of another dtype, and zero points around 8."""
    fields: dict[str, Tensor] = {}
    for name in ("w13", "w2"):
        scale: Tensor = getattr(raw, f"{name}_scale").repeat_interleave(128 // group, 2).to(dtype)
        fields[f"{name}_scale"] = scale
        if zero:
            points = torch.randint(6, 11, scale.shape, generator=g, device=scale.device, dtype=torch.uint8)
            fields[f"{name}_zero_point"] = points
    return dataclasses.replace(raw, **fields)


def prepare(raw: moe.RawWeights, fmt: Format, device: str = "cuda") -> moe.PreparedWeights:
    """On fmt.backend; the test is skipped with the backend's reasons where it does not take these sizes."""
    against = moe.explain(raw, **fmt.settings(device)).against.get(fmt.backend)  # None: "auto"
    if against:
        pytest.skip(f"{fmt.backend}: {'; '.join(against)}")
    return moe.prepare(raw, backend=fmt.backend, **fmt.settings(device))


def as_reference(raw: moe.RawWeights, fmt: Format, device: str = "cuda", **options: Any) -> moe.PreparedWeights:
    return moe.prepare(raw, backend="reference", **fmt.settings(device), **options)


ROUTINGS = ("random", "skewed", "one", "half", "foreign")


def make_batch(
    sizes: Sizes, hidden: int, tokens: int, routing: str = "random", seed: int = 0, device: str = "cuda"
) -> list[Tensor]:
    """hidden_states, topk_ids, topk_weights.

    routing: "random"; "skewed" (most tokens to few experts); "one" (every slot to the same expert); "half" (the upper
    half of the experts is empty); "foreign" (a third of the ids is nobody's, and the last token has no other).
    """
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g, device=device).to(sizes.dtype)
    scores = torch.rand(tokens, sizes.experts, generator=g, device=device)
    if routing == "skewed":
        scores += torch.arange(sizes.experts, 0, -1, device=device) / 4.0 % sizes.experts
    ids = scores.argsort(dim=1, descending=True)[:, : sizes.top_k].int()
    if routing == "one":
        ids = torch.full_like(ids, sizes.experts - 2)
    elif routing == "half":
        ids //= 2
    elif routing == "foreign":
        holes = torch.rand(ids.shape, generator=g, device=device) < 0.33
        values = torch.tensor([-1, sizes.experts, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
        pick = torch.randint(4, ids.shape, generator=g, device=device)
        holes[-1:] = True
        ids = torch.where(holes, values[pick], ids)
    weights = torch.rand(tokens, sizes.top_k, generator=g, device=device) + 0.1
    return [x, ids, weights]
