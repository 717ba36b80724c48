"""Weights of 8 bits in the layout of `cuda_sm90`: the inverse, the decoder, run here, and what is refused.
No GPU needed."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from host_library import host_library
from samples import overload
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS, cuda_sm90
from torch_moe_ops.backends.registry import Problem
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemas import arguments as schema_arguments
from torch_moe_ops.core.schemes import SCHEMES

BYTES = ("fp8", "fp8_block", "mxfp8", "int8")
# hidden, intermediate size: neither fills its tiles, both do, K of an odd number of half tiles.
SIZES = ((96, 160), (256, 384), (192, 64), (2880, 96))
LARGEST = 160  # exponent of mxfp8
gated_or_not = pytest.mark.parametrize("gated", (True, False))


def random_layer(scheme: str, hidden: int, inter: int, gated: bool) -> moe.RawWeights:
    """Every code but NaN, and every exponent that the layout holds."""
    g = torch.Generator().manual_seed(hidden + inter)
    halves, fields = 2 if gated else 1, dict[str, Any]()
    for name, n, k, parts in (("w13", halves * inter, hidden, halves), ("w2", hidden, inter, 1)):
        codes = torch.randint(0, 256, (2, n, k), generator=g, dtype=torch.uint8)
        if scheme == "int8":
            fields[name], fields[f"{name}_scale"] = codes.view(torch.int8), torch.rand((2, n, 1), generator=g)
            continue
        codes[(codes & 0x7F) == 0x7F] = 0x80
        fields[name] = codes.view(torch.float8_e4m3fn)
        if scheme == "mxfp8":
            scale = torch.randint(0, LARGEST + 1, (2, n, k // 32), generator=g, dtype=torch.uint8)
        elif scheme == "fp8":
            scale = torch.rand((2, n, 1), generator=g)
        else:
            scale = torch.rand((2, parts * -(-n // parts // 128), -(-k // 128)), generator=g)
        fields[f"{name}_scale"] = scale
    return moe.RawWeights(scheme, activation="silu" if gated else "relu2_no_mul", **fields)


@gated_or_not
@pytest.mark.parametrize("scheme", BYTES)
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_restore_is_the_inverse(scheme: str, hidden: int, inter: int, gated: bool) -> None:
    raw = random_layer(scheme, hidden, inter, gated)
    sizes = Sizes(raw.num_experts, hidden, inter, gated, raw.w13.dtype)
    prepared = cuda_sm90.prepare(raw)
    for name, (shapes, dtypes) in cuda_sm90.specs(SCHEMES[scheme], sizes).items():
        assert tuple(prepared[name].shape) in shapes and prepared[name].dtype in dtypes
    restored = cuda_sm90.restore(SCHEMES[scheme], prepared, sizes)
    given = raw.tensors()
    assert restored.keys() == given.keys()
    for name, tensor in restored.items():
        assert tensor.dtype == given[name].dtype and tensor.shape == given[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8)), name
    only = cuda_sm90.restore(SCHEMES[scheme], {name: prepared[name] for name in ("w2", "w2_scale")}, sizes)
    assert only.keys() == {"w2", "w2_scale"}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("other", (torch.float32, torch.float16), ids=str)
def test_scales_of_int8_keep_their_dtypes(dtype: torch.dtype, other: torch.dtype) -> None:
    raw = random_layer("int8", 96, 160, True)
    assert raw.w13_scale is not None and raw.w2_scale is not None
    raw = dataclasses.replace(raw, w13_scale=raw.w13_scale.to(dtype), w2_scale=raw.w2_scale.to(other))
    sizes = Sizes(2, 96, 160, True, torch.int8)
    prepared = cuda_sm90.prepare(raw)
    for name, (shapes, dtypes) in cuda_sm90.specs(SCHEMES["int8"], sizes).items():
        assert tuple(prepared[name].shape) in shapes and prepared[name].dtype in dtypes
    restored = cuda_sm90.restore(SCHEMES["int8"], prepared, sizes)
    for name, tensor in raw.tensors().items():
        assert restored[name].dtype == tensor.dtype and torch.equal(restored[name], tensor), name


def test_int8_weights_that_the_layout_does_not_hold() -> None:
    raw = random_layer("int8", 96, 160, True)
    groups = dataclasses.replace(raw, w13_scale=torch.ones(2, 320, 3))
    points = torch.zeros((2, 96, 1), dtype=torch.int8)
    both = dataclasses.replace(raw, w2_zero_point=points, w13_zero_point=points.new_zeros(2, 320, 1))
    for wrong, got in ((groups, "group"), (both, "channel with zero points")):
        text = f"int8 weights must have a scale for each row, and no zero points, got {got}"
        with pytest.raises(ValueError, match=f"backend 'cuda_sm90': {text}"):
            cuda_sm90.prepare(wrong)
        problem = moe.Problem(
            "int8", device="cuda", capability=(9, 0), num_experts=2, hidden_size=96, intermediate_size=160,
            weight_scales=got,
        )  # fmt: skip
        assert text in BACKENDS["cuda_sm90"].reasons(problem)


def natural_order(held: Tensor, rows: int, k: int, gated: bool) -> Tensor:
    """[E, row tile, K tile, warp, h, g, 128] -> [E, rows, k]."""
    values = held.permute(0, 1, 3, 4, 5, 2, 6).flatten(5)
    if gated:
        return values.permute(0, 3, 1, 2, 4, 5).flatten(2, 4)[:, :, : rows // 2].flatten(1, 2)[..., :k]
    return values.permute(0, 1, 2, 4, 3, 5).flatten(1, 4)[:, :rows, :k]


@gated_or_not
@pytest.mark.parametrize("scheme", BYTES)
def test_what_the_threads_of_prefill_hold(scheme: str, gated: bool, tmp_path: Path) -> None:
    """In the natural order of K, a half of a tile after the other; powers of two are within, exactly."""
    raw = random_layer(scheme, 192, 160, gated)
    # Products below 2^-126 of what is multiplied lose bits, as MXFP4's do: scales from 2^-91 on.
    for scale in (raw.w13_scale, raw.w2_scale):
        if scheme == "mxfp8":
            assert scale is not None
            scale.clamp_(min=36)
    prepared = cuda_sm90.prepare(raw)
    decode = host_library("sm90_decode_host.cpp", tmp_path).decode_byte_tiles
    decode.restype = ctypes.c_float
    for name, is_gated in (("w13", gated), ("w2", False)):
        codes, weight = prepared[name], getattr(raw, name)
        exponents = prepared[f"{name}_scale"].data_ptr() if scheme == "mxfp8" else None
        held = torch.zeros((*codes.shape[:3], 4, 2, 8, 128), dtype=torch.int16)
        count = ctypes.c_int64(codes[..., 0].numel())
        lacks = decode(
            ctypes.c_void_p(codes.data_ptr()), ctypes.c_void_p(exponents), scheme == "int8", count,
            ctypes.c_void_p(held.data_ptr()),
        )  # fmt: skip
        values = natural_order(held.view(torch.bfloat16), *weight.shape[1:], is_gated).double() * lacks
        expected = weight.double()
        if scheme == "mxfp8":
            scale = getattr(raw, f"{name}_scale")
            expected = expected * torch.exp2(scale.double() - 127).repeat_interleave(32, 2)
        assert torch.equal(values, expected)


@gated_or_not
@pytest.mark.parametrize("scheme", BYTES)
def test_the_op_takes_what_prepare_makes(scheme: str, gated: bool) -> None:
    """Its checks, which run without a GPU where tensors are fake."""
    hidden = 96
    given = cuda_sm90.prepare(random_layer(scheme, hidden, 160, gated))
    given |= {"hidden_states": torch.zeros(5, hidden, dtype=torch.bfloat16), "topk_weights": torch.zeros(5, 2)}
    given["topk_ids"] = torch.zeros(5, 2, dtype=torch.int32)
    arguments, _ = schema_arguments(f"{scheme}_moe_routed")
    with FakeTensorMode() as mode:
        tensors = {key: mode.from_tensor(tensor) for key, tensor in given.items()}
        positional = [tensors.get(key) for key in arguments[: arguments.index("backend")]]
        named = {"act_format": "none", "activation": "silu" if gated else "relu2_no_mul"}
        out = overload(f"{scheme}_moe_routed")(*positional, backend="cuda_sm90", **named)
    assert out.shape == (5, hidden) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("weight", ("w13", "w2"))
def test_the_op_takes_no_zero_points_beside_tiles(weight: str) -> None:
    """Of the shape of the scales, which no kernel would read."""
    given = cuda_sm90.prepare(random_layer("int8", 96, 160, True))
    given |= {"hidden_states": torch.zeros(5, 96, dtype=torch.bfloat16), "topk_weights": torch.zeros(5, 2)}
    given["topk_ids"] = torch.zeros(5, 2, dtype=torch.int32)
    given[f"{weight}_zero_point"] = torch.ones_like(given[f"{weight}_scale"], dtype=torch.int8)
    arguments, _ = schema_arguments("int8_moe_routed")
    with FakeTensorMode() as mode:
        tensors = {key: mode.from_tensor(tensor) for key, tensor in given.items()}
        positional = [tensors.get(key) for key in arguments[: arguments.index("backend")]]
        with pytest.raises(RuntimeError, match=f"{weight}_zero_point must be None: 'cuda_sm90' has those of tiles"):
            overload("int8_moe_routed")(*positional, backend="cuda_sm90", act_format="none", activation="silu")


def test_grouped_linear_takes_no_zero_points_beside_tiles() -> None:
    raw = random_layer("int8", 96, 160, True)
    given = cuda_sm90.prepare(raw)
    x, offsets = torch.zeros(4, 160, dtype=torch.bfloat16), torch.tensor([2, 4], dtype=torch.int32)
    points = torch.ones_like(given["w2_scale"], dtype=torch.int8)
    with pytest.raises(RuntimeError, match="weight_zero_point must be None for scheme 'int8'"):
        torch.ops.moeq.grouped_linear(
            x, offsets, given["w2"], given["w2_scale"], points, None, "cuda_sm90", "int8", "w2", 96, 160
        )  # fmt: skip


@pytest.mark.parametrize("byte", (LARGEST + 1, 255))
def test_exponents_that_bfloat16_would_not_hold_are_refused(byte: int) -> None:
    raw = random_layer("mxfp8", 96, 64, True)
    assert raw.w2_scale is not None
    raw.w2_scale[1, 5, 1] = byte
    with pytest.raises(
        ValueError, match=rf"w2_scale must hold exponents of at most 2\^33 .*got code {byte:#x} in expert 1"
    ):
        cuda_sm90.prepare(raw)


@pytest.mark.parametrize("scheme", BYTES[:3])
def test_weights_that_are_nan_are_refused(scheme: str) -> None:
    raw = random_layer(scheme, 96, 64, True)
    raw.w13.view(torch.uint8)[1, 5, 7] = 0xFF
    with pytest.raises(ValueError, match=r"w13 must hold no NaN .*got one in expert 1"):
        cuda_sm90.prepare(raw)


def test_what_explain_says() -> None:
    problem = Problem(
        scheme="fp8_block", act_format="none", activation="silu", num_experts=128, hidden_size=2048,
        intermediate_size=768, top_k=8, device="cuda", capability=(9, 0),
    )  # fmt: skip
    notes = BACKENDS["cuda_sm90"].notes
    assert notes(problem) == (
        "decode kernel up to 8 tokens, while its buffers fit an SM, slim tiles of the prefill kernel up to 384, "
        "narrow tiles of the prefill kernel up to 1280, wide tiles of the prefill kernel beyond (by rules)"
    )
    assert "decode kernel up to 8 tokens" in notes(dataclasses.replace(problem, scheme="mxfp8", top_k=None))
    wrong = dataclasses.replace(problem, hidden_size=2056)
    assert "hidden_size must be a multiple of 16, got 2056" in BACKENDS["cuda_sm90"].reasons(wrong)
