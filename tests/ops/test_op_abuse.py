"""Every tensor argument of every overload, replaced by a wrong one: an error in the library's form, and never a crash.

Each wrong call is made twice: before any valid one (nothing is cached), and after the valid call that it came from.
What is remembered of a valid call must not let a wrong one pass, so both must end alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import abuse
import pytest
import torch
from problems import Case
from samples import (
    SAMPLES,
    Sample,
    cases,
    monolithic_sample,
    overload,
    packed_case,
    packed_sample,
    results_of,
    routed_sample,
    runs,
)
from torch import Tensor

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemas import FAMILIES, SCHEMAS, arguments
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.ops import plan

devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)


def _family(op: str) -> str:
    packet = op.removesuffix(".out")
    return packet.removesuffix("_routed").removesuffix("moe").removesuffix("_")


def _bases(op: str, device: str) -> Iterator[Sample]:
    """Valid calls that have as many tensor arguments as the op can have."""
    if not op.removesuffix(".out").endswith(("moe", "moe_routed")):
        yield from (sample for sample in SAMPLES[op](device) if sample[0][0].shape[0] or "moe" not in op)
        return
    for case in _cases(_family(op)):
        for backend in BACKENDS:
            if not runs(case, backend, device):
                continue
            if "routed" not in op:
                yield monolithic_sample(case, backend, device)
                continue
            yield _with_out(op, routed_sample(case, backend, device))
            scheme = next(s for s in FAMILIES[_family(op)] if s.name == case.scheme)
            packed = packed_case(scheme, case.act_format) if case.act_format != "none" else None
            if packed is not None and runs(packed, backend, device):
                yield _with_out(op, packed_sample(packed, backend, device))


def _cases(family: str) -> list[Case]:
    """One of each activation format: with biases and with a calibrated scale where there is one."""
    found: dict[tuple[str, str], Case] = {}
    for case in cases(family):
        if case.tokens and case.weight_policy == "exact":
            found[case.scheme, case.act_format] = case
    return list(found.values())


def _with_out(op: str, sample: Sample) -> Sample:
    args, keywords = sample
    if not op.endswith(".out"):
        return sample
    return args, {**keywords, "out": overload(op.removesuffix(".out"))(*args, **keywords)}


def _changed(op: str, sample: Sample, name: str, value: Any) -> Sample:
    names, _ = arguments(op)
    args, keywords = sample
    if name in names[: len(args)]:
        at = names.index(name)
        return (*args[:at], value, *args[at + 1 :]), keywords
    return args, {**keywords, name: value}


def _tensors(op: str, sample: Sample) -> dict[str, Tensor]:
    names, _ = arguments(op)
    given = dict(zip(names, sample[0], strict=False)) | sample[1]
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _outcome(op: str, sample: Sample) -> tuple[str, Any]:
    """The text of the error, or the results' bytes."""
    args, keywords = sample
    try:
        return "result", results_of(op, args, keywords)
    except RuntimeError as error:
        return "error", str(error)


def _is_ours(op: str, text: str) -> bool:
    packet = op.removesuffix(".out")
    return text.startswith(f"moeq::{packet}: ") and " must " in text and ", got " in text


def _fits(op: str, sample: Sample, name: str, what: str, new: Tensor | None) -> bool:
    """Whether the changed call is a valid one."""
    given = _tensors(op, sample)
    if new is None:
        return _is_optional(op, name, given)
    if what.startswith("dtype"):
        return new.dtype in _other_dtypes(op, name, given)
    if what == "no dimension" and name.endswith("gscale"):
        return True  # one for all rows or experts
    if what == "dimension 2 longer" and name.endswith("_scale"):
        return (_family(op) in ("int4", "int8") or op in ANY_SCHEME) and new.shape[2] == 2  # groups of half a row
    if name == "lora_scaling" and new.ndim == 1 and given["lora_a13"].shape[1] % new.shape[0] == 0:
        return True  # the same ranks, of more adapters or of fewer
    if op == "moe_hidden" and name == "hidden_states" and new.ndim == 2:
        return new.shape[1] == given[name].shape[1]  # any number of tokens: nothing else has a row for each
    if op == "moe_hidden" and name in ("router_bias", "routing_bias") and what == "flat":
        return True  # as they are
    if op == "ep_experts" and name == "slots":
        return new.ndim == 1 and bool(new.numel())  # any number of places
    if "moe" in op or op == "ep_experts":
        return name == "lora_ids" and what == "flat"  # as it is
    return len(given) == 1 or what.startswith(("dimension", "a dimension", "flat"))  # any rows, on any device


def _is_optional(op: str, name: str, given: dict[str, Tensor]) -> bool:
    schema = torch._C.parse_schema(f"moeq::{op}{SCHEMAS[op]}")
    kind = next(str(a.type) for a in schema.arguments if a.name == name)
    packed = "hidden_states_scale" in given and "moe" in op
    return kind.startswith("Optional") and not (packed and name in ("hidden_states_scale", "a1_gscale"))


def _other_dtypes(op: str, name: str, given: dict[str, Tensor]) -> tuple[torch.dtype, ...]:
    family, packed = _family(op), "hidden_states_scale" in given
    if given[name].dtype == torch.float8_e4m3fn and ("moe" in op or op in ANY_SCHEME):
        return (torch.uint8,)
    if op.startswith(("ep_", "host_")) and (op not in ANY_SCHEME or (op, name) in _EXCHANGED):
        return _EXCHANGED.get((op, name), ())
    if name in ("x", "router_logits", "shared_expert_weights", "lora_a13", "lora_b13", "lora_a2", "lora_b2") or (
        name == "hidden_states" and family and not packed
    ):
        return FLOATS
    if op in ("route_hidden", "moe_hidden") and name in ("hidden_states", "router_weight", "router_bias"):
        return FLOATS
    weights = ("weight", "weight_scale", "w13_scale", "w2_scale")
    if op in ANY_SCHEME and name in weights and given[name].dtype == torch.bfloat16 and given[name].ndim == 5:
        return (torch.int32, torch.int64)  # other forms of INT4 scales in tiles
    if op in ANY_SCHEME and name in weights and given[name].dtype in FLOATS:
        return FLOATS
    if name in ("w13_scale", "w2_scale") and family in ("int4", "int8"):
        return FLOATS
    if name in ("scale", "swizzled"):
        return tuple(d for d in abuse.DTYPES if torch.empty(0, dtype=d).element_size() <= 2)
    return ()


ANY_SCHEME = ("grouped_linear", "moe_routed_lora", "moe_hidden", "ep_experts")


# What may be exchanged between ranks or with the host, besides the dtype of the sample.
_EXCHANGED = {
    ("ep_place", "topk_ids"): (torch.int32, torch.int64),
    ("ep_experts", "topk_ids"): (torch.int32, torch.int64),
    ("ep_experts", "hidden_states"): FLOATS,
    ("ep_dispatch", "hidden_states"): (*FLOATS, torch.uint8, torch.int8, torch.float8_e4m3fn),
    ("ep_dispatch", "hidden_states_scale"): (torch.float32, torch.uint8, torch.float8_e4m3fn),
    ("ep_combine", "partial_rows"): FLOATS,
    ("host_experts", "hidden_states"): FLOATS,
}


# What those refuse: test_backward_op.py, test_lora_op.py
OPS = sorted(op for op in SCHEMAS if "backward" not in op)
ops = pytest.mark.parametrize("op", OPS)


@ops
@devices
def test_wrong_tensors(op: str, device: str) -> None:
    for sample in _bases(op, device):
        _check_wrong_tensors(op, sample)


def _check_wrong_tensors(op: str, sample: Sample) -> None:
    changes = [
        (name, what, change(tensor))
        for name, tensor in _tensors(op, sample).items()
        for what, change in abuse.wrong(tensor)
    ]
    cold = []
    for name, _, new in changes:
        _forget()
        cold.append(_outcome(op, _changed(op, sample, name, new)))
    assert _outcome(op, sample)[0] == "result"
    for (name, what, new), before in zip(changes, cold, strict=True):
        where = f"{op}: {name} {what}"
        after = _outcome(op, _changed(op, sample, name, new))
        assert before == after, f"{where}: {before} before a valid call, {after} after one"
        if before[0] == "error":
            assert _is_ours(op, before[1]), f"{where}: {before[1]}"
        else:
            assert _fits(op, sample, name, what, new), f"{where} was accepted"


def _forget() -> None:
    """As in a new process."""
    plan._PLANS.clear()


@ops
@devices
def test_the_same_values_otherwise_in_memory(op: str, device: str) -> None:
    """The same result, or an error in the library's form."""
    for sample in _bases(op, device):
        _check_same_values(op, sample)


def _check_same_values(op: str, sample: Sample) -> None:
    expected = _outcome(op, sample)
    for name, tensor in _tensors(op, sample).items():
        for what, change in abuse.storages(tensor):
            new = change(tensor)
            got = _outcome(op, _changed(op, sample, name, new))
            if got[0] == "error":
                # Weights that start within a word or a tile: torch, or the binding of the kernels, says so.
                told = tensor.is_cuda and what == "at an odd element" and name.startswith("w")
                assert told or _is_ours(op, got[1]), f"{op}: {name} {what}: {got[1]}"
            elif what != "one element everywhere":
                _assert_same(got[1], expected[1], f"{op}: {name} {what}")


def _assert_same(got: list[Any], expected: list[Any], where: str) -> None:
    """Bit for bit, but for float32: a GEMM of torch adds in an order that depends on addresses."""
    for (shape, dtype, data), (other_shape, other_dtype, other) in zip(got, expected, strict=True):
        assert (shape, dtype) == (other_shape, other_dtype), where
        if dtype == torch.float32 and data:
            values, others = (torch.frombuffer(bytearray(bits), dtype=dtype) for bits in (data, other))
            torch.testing.assert_close(values, others, msg=where)
        else:
            assert data == other, where


@pytest.mark.parametrize("op", [op for op in OPS if "moe" in op and "lora" not in op])
def test_memory_that_was_freed(op: str) -> None:
    """torch's own operations, all that adapters run, read past it; the kernels of backend `cpu` must not."""
    at = arguments(op)[0].index("backend")
    for sample in _bases(op, "cpu"):
        if sample[0][at] != "cpu":
            continue
        for name in ("w13", "w2"):
            for what, change in abuse.freed(_tensors(op, sample)[name]):
                got = _outcome(op, _changed(op, sample, name, change(_tensors(op, sample)[name])))
                assert got[0] == "error" and name in got[1] and "must hold" in got[1], f"{name} {what}: {got}"
