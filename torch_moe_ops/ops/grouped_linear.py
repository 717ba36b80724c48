"""The op `moeq::grouped_linear`: a projection of packed experts on rows sorted by expert.

Its gradient is the op itself, transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import BACKENDS, Backend
from torch_moe_ops.core.check import check, check_given, describe, fail
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.problem import Problem
from torch_moe_ops.core.schemas import arguments
from torch_moe_ops.core.schemes import FLOATS, SCHEMES, ZERO_POINT_DTYPES, Scheme
from torch_moe_ops.gradients.linear import linear_rows
from torch_moe_ops.gradients.weights import Projection, Stored, projection_shape
from torch_moe_ops.ops.autograd import Args, Rule
from torch_moe_ops.ops.bind import attach, like_a_kernel
from torch_moe_ops.ops.plan import check_dtype, check_tensor, or_bytes

OP = "grouped_linear"
_NAMES, _DEFAULTS = arguments(OP)


class _Call(NamedTuple):
    """The op's arguments."""

    x: Tensor
    offsets: Tensor
    weight: Tensor
    weight_scale: Tensor | None
    weight_zero_point: Tensor | None
    weight_scale_2: Tensor | None
    backend: str
    scheme: str
    projection: str
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    transposed: bool
    weight_policy: str


assert _Call._fields == _NAMES


def _checked(args: Args, kwargs: dict[str, Any], devices: bool) -> tuple[_Call, Backend, Sizes]:
    call = _Call(*args, *_DEFAULTS[len(args) :])._replace(**kwargs)
    for name in ("x", "offsets", "weight"):
        check_given(OP, name, getattr(call, name))
    backend = _check_names(call)
    scheme = SCHEMES[call.scheme]
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(call, name)
        if size <= 0 or size % scheme.size_multiple:
            fail(OP, name, f"be a positive multiple of {scheme.size_multiple}", size)
    if call.weight.ndim < 3 or not call.weight.shape[0]:
        fail(OP, "weight", "have at least 3 dimensions and one expert", call.weight.shape)
    experts = call.weight.shape[0]
    declared = backend.layout.weight_dtypes(scheme)
    check_dtype(OP, "weight", or_bytes(declared), call.weight)
    dtype = call.weight.dtype if call.weight.dtype in declared else torch.float8_e4m3fn
    sizes = Sizes(experts, call.hidden_size, call.intermediate_size, call.is_gated, dtype)
    call = _check_weights(call, backend, scheme, sizes)
    _check_rows(call, sizes)
    if devices:
        for name, value in zip(_NAMES, call, strict=True):
            if isinstance(value, Tensor) and value.device != call.x.device:
                fail(OP, name, f"be on {call.x.device} like x", value.device)
    return call, backend, sizes


def _check_names(call: _Call) -> Backend:
    for name, value, known in (
        ("backend", call.backend, BACKENDS),
        ("scheme", call.scheme, SCHEMES),
        ("projection", call.projection, ("w13", "w2")),
    ):
        if value not in known:
            fail(OP, name, f"be one of {list(known)}", value)
    scheme, backend = SCHEMES[call.scheme], BACKENDS[call.backend]
    if call.weight_policy not in scheme.policies:
        fail(OP, "weight_policy", f"be one of {list(scheme.policies)} for scheme {scheme.name!r}", call.weight_policy)
    problems = [Problem(scheme.name, act) for act in scheme.act_formats]
    if not any(all(r.unmet(p) is None for r in backend.requires if r.of_format) for p in problems):
        fail(OP, "backend", f"have a layout of {scheme.name} weights", call.backend)
    return backend


def _check_weights(call: _Call, backend: Backend, scheme: Scheme, sizes: Sizes) -> _Call:
    """Shapes, dtypes and contiguity; e4m3 codes that came as bytes become e4m3."""
    specs = backend.layout.specs(scheme, sizes)
    halves = 2 if call.is_gated and call.projection == "w13" else 1
    experts, scale = sizes.num_experts, call.weight_scale
    expected: dict[str, tuple[Any, Any]] = {"weight": specs[call.projection]}
    if f"{call.projection}_scale" in specs:
        check_given(OP, "weight_scale", scale)
        expected["weight_scale"] = specs[f"{call.projection}_scale"]
        if scheme.has_zero_point and scale is not None and not backend.layout.pads_hidden:  # tiles: with the scales
            expected["weight_zero_point"] = ((tuple(scale.shape),), (ZERO_POINT_DTYPES[scheme.name],))
    if scheme.has_scale_2:
        check_given(OP, "weight_scale_2", call.weight_scale_2)
        expected["weight_scale_2"] = ((experts,), (experts, 1), (experts, halves)), (torch.float32,)
    changed = {}
    for name in ("weight", "weight_scale", "weight_zero_point", "weight_scale_2"):
        tensor = getattr(call, name)
        if tensor is None:
            continue
        if name not in expected:
            fail(OP, name, f"be None for scheme {scheme.name!r}", tensor.shape)
        shapes, dtypes = expected[name]
        check_tensor(OP, name, shapes, or_bytes(dtypes), tensor)
        if not tensor.is_contiguous():
            fail(OP, name, "be contiguous", f"strides {tensor.stride()}")
        if tensor.dtype not in dtypes:
            changed[name] = tensor.view(torch.float8_e4m3fn)
    return call._replace(**changed)


def _check_rows(call: _Call, sizes: Sizes) -> None:
    x, offsets = call.x, call.offsets
    n, k = projection_shape(call.projection, sizes)
    width = n if call.transposed else k
    if x.ndim != 2:
        fail(OP, "x", f"have shape [rows, {width}]", x.shape)
    check(x.shape[1] == width, lambda: describe(OP, "x", f"have shape [rows, {width}]", x.shape))
    if x.dtype not in FLOATS:
        fail(OP, "x", f"have one of the dtypes {[str(d) for d in FLOATS]}", x.dtype)
    check_tensor(OP, "offsets", ((sizes.num_experts,),), (torch.int32,), offsets)


def _make(devices: bool) -> Callable[..., Tensor]:
    def impl(*args: Any, **kwargs: Any) -> Tensor:
        call, backend, sizes = _checked(args, kwargs, devices)
        with like_a_kernel(call.x.device.type):
            # No value of a device's memory may make a kernel read elsewhere.
            ends = torch.cummax(call.offsets.long().clamp(0, call.x.shape[0]), 0).values
            host = None
            if not (call.x.is_cuda and torch.cuda.is_current_stream_capturing()):
                host = call.offsets.tolist()
                if host != ends.tolist():
                    fail(OP, "offsets", f"ascend from 0 to at most {call.x.shape[0]}, the rows of x", host)
            stored = Stored(call.weight, call.weight_scale, call.weight_zero_point, call.weight_scale_2)
            projection = Projection(call.projection, stored, call.scheme, call.weight_policy, backend, sizes)
            return linear_rows(call.x.contiguous(), ends, host, projection, call.transposed)

    return impl


def _fake(*args: Any, **kwargs: Any) -> Tensor:
    call, _, sizes = _checked(args, kwargs, devices=True)
    n, k = projection_shape(call.projection, sizes)
    return call.x.new_empty((call.x.shape[0], k if call.transposed else n))


def _backward(args: Args, results: Args, grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> dict[int, Tensor]:
    call = _Call(*args, *_DEFAULTS[len(args) :])
    return {0: torch.ops.moeq.grouped_linear(*call._replace(x=grads[0], transposed=not call.transposed))}


attach(OP, _make(devices=False), _make(devices=True), _fake, Rule(_backward, lambda position, args: position == 0))
