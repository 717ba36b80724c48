"""GroupShape and FusedMoEQuantDesc."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from torch_moe_ops.config import FusedMoEQuantConfig, FusedMoEQuantDesc, GroupShape


def test_group_shape_names_are_the_pairs_of_the_field() -> None:
    assert GroupShape.PER_TENSOR == (-1, -1) and GroupShape.PER_TENSOR.is_per_tensor()
    assert GroupShape.PER_TOKEN == (1, -1) and GroupShape.PER_TOKEN.is_per_token()
    assert GroupShape.PER_CHANNEL == (-1, 1) and GroupShape.PER_CHANNEL.is_per_channel()
    assert GroupShape(128, 128).is_block() and not GroupShape.PER_TOKEN.is_block()
    row, col = GroupShape(row=1, col=32)
    assert (row, col) == (1, 32)
    assert pickle.loads(pickle.dumps(GroupShape(1, 32))) == copy.deepcopy(GroupShape(1, 32)) == (1, 32)


@pytest.mark.parametrize(
    ("row", "col", "error", "text"),
    [
        (0, 32, ValueError, "GroupShape: row must be -1 (all) or at least 1, got 0"),
        (1, -2, ValueError, "GroupShape: col must be at least -1, got -2"),
        (1, 2.0, TypeError, "GroupShape: col must be an int, got float"),
        (True, 1, TypeError, "GroupShape: row must be an int, got bool"),
    ],
)
def test_group_shape_rejects(row: Any, col: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        GroupShape(row, col)
    assert str(caught.value) == text


def test_desc_positional_order_is_the_fields() -> None:
    scale, factor, zp, bias = (torch.ones(2) for _ in range(4))
    desc = FusedMoEQuantDesc(torch.float8_e4m3fn, GroupShape(128, 128), scale, factor, zp, bias)
    assert desc.dtype == torch.float8_e4m3fn and desc.shape == (128, 128)
    assert desc.scale is scale and desc.alpha_or_gscale is factor and desc.zp is zp and desc.bias is bias


def test_desc_replace_keeps_the_alias() -> None:
    factor = torch.ones(2)
    desc = dataclasses.replace(FusedMoEQuantDesc("nvfp4", alpha_or_gscale=factor), bias=torch.zeros(2, 4))
    assert desc.alpha_or_gscale is factor


def test_desc_spells_a_format_in_one_way() -> None:
    assert FusedMoEQuantDesc("fp8").dtype is torch.float8_e4m3fn
    assert FusedMoEQuantDesc("int8").dtype is torch.int8
    assert FusedMoEQuantDesc("mxfp6_e2m3").shape == (1, 32)
    assert FusedMoEQuantDesc("nvfp4", GroupShape(1, 16)).shape == (1, 16)
    assert FusedMoEQuantDesc().shape is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dtype": "nvfp5"}, ValueError, "FusedMoEQuantDesc: dtype must be one of None, nvfp4, mxfp4, mxfp6_e3m2"),
        ({"dtype": "mxfp6"}, ValueError, "dtype must name its elements: 'mxfp6_e3m2' or 'mxfp6_e2m3', got 'mxfp6'"),
        ({"dtype": torch.float16}, ValueError, "got torch.float16"),
        ({"dtype": 8}, TypeError, "FusedMoEQuantDesc: dtype must be a dtype, str or None, got int"),
        ({"dtype": "nvfp4", "shape": GroupShape.PER_TENSOR}, ValueError, "shape must be (1, 16) (or None) for nvfp4"),
        ({"shape": GroupShape(1, 32)}, ValueError, "shape must be None where dtype is None"),
        ({"dtype": "int4", "scale": 1.0}, TypeError, "scale must be a Tensor, a PrecisionConfig or None, got float"),
        ({"dtype": "int4", "zp": [0]}, TypeError, "zp must be a Tensor or None, got list"),
        ({"alpha_or_gscale": 1.0}, TypeError, "alpha_or_gscale must be a Tensor or None, got float"),
    ],
)
def test_desc_rejects(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        FusedMoEQuantDesc(**arguments)
    assert text in str(caught.value)


def test_desc_rejects_alias_beside_field() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="alpha_or_gscale must be absent where alpha or gscale is given"):
        FusedMoEQuantDesc("nvfp4", alpha_or_gscale=one, gscale=one)


def test_config_says_what_the_alias_is() -> None:
    gscale, alphas = torch.ones(()), torch.ones(4)
    act = FusedMoEQuantDesc("nvfp4", alpha_or_gscale=gscale)
    weight = FusedMoEQuantDesc("nvfp4", alpha_or_gscale=alphas)
    config = FusedMoEQuantConfig(act, act, weight, weight)
    assert config._a1.gscale is gscale and config._a1.alpha is None and config.a2_gscale is gscale
    assert config._w1.alpha is alphas and config._w1.gscale is None and config.g2_alphas is alphas
    # The descriptors that came in are shared with nobody's config: they did not change.
    assert act.gscale is None and weight.alpha is None


def test_alias_of_an_int4_weight_is_its_channel_scale() -> None:
    act = FusedMoEQuantDesc("fp8", GroupShape.PER_TOKEN)
    weight = FusedMoEQuantDesc("int4", alpha_or_gscale=torch.ones(4, 8))
    config = FusedMoEQuantConfig(act, act, weight, weight)
    assert config.w1_channel_scale is config.g1_alphas is weight.alpha_or_gscale and config._w1.alpha is None


def test_repr_shows_tensors_by_shape() -> None:
    desc = FusedMoEQuantDesc("int4", GroupShape(1, 32), torch.ones(2, 4, 8))
    assert (
        repr(desc) == "FusedMoEQuantDesc(dtype='int4', shape=GroupShape(row=1, col=32), scale=torch.float32[2, 4, 8])"
    )
