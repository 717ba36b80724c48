"""The in-graph matrix over forms of INT4 as `auto` takes them: what else a checkpoint has than groups of 128."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu_layers import Format, Sizes, capability, needs_cuda
from in_graph import LAYER, judge, make_pair, replay_pair
from in_graph_cells import FORMS, FRONTS

SCALES = {
    "g64": (64, torch.bfloat16, False),
    "g64_zp_f16": (64, torch.float16, True),
    "g32_f16": (32, torch.float16, False),
    "g32_zp": (32, torch.bfloat16, True),
    "g128_f32": (128, torch.float32, False),
}
forms = pytest.mark.parametrize("scales", SCALES)
act_formats = pytest.mark.parametrize("act_format", ("none", "fp8"))


def wrong_cells(fmt: Format, sizes: Sizes, tokens: int, device: str, fronts: tuple[str, ...] = FRONTS) -> list[str]:
    pair = make_pair(fmt, sizes, device)
    cells = ((form, front) for form in FORMS for front in fronts)
    verdicts = {cell: judge(pair, fmt, cell[0], replay_pair(pair, tokens, *cell)) for cell in cells}
    return [f"{form} behind {front}: {verdict}" for (form, front), verdict in verdicts.items() if not verdict.passed]


@pytest.mark.gpu
@needs_cuda
@forms
@act_formats
@pytest.mark.parametrize("activation", ("silu", "gelu"))
@pytest.mark.parametrize("tokens", (1, 2, 14, 400))
def test_every_replay_of_the_default_is_right(scales: str, act_format: str, activation: str, tokens: int) -> None:
    fmt = Format("auto", "int4", act_format, "none", "exact")
    sizes = dataclasses.replace(LAYER, scales=SCALES[scales], activation=activation)
    assert not wrong_cells(fmt, sizes, tokens, "cuda")
    if capability() == (9, 0):
        assert make_pair(fmt, sizes).first.w.backend == "cuda_sm90_int4"


@forms
@act_formats
def test_the_forms_are_right_on_a_cpu(scales: str, act_format: str) -> None:
    fmt = Format("cpu", "int4", act_format, "none", "exact")
    sizes = dataclasses.replace(LAYER, scales=SCALES[scales])
    assert not wrong_cells(fmt, sizes, 2, "cpu", ("gemm",))
    assert make_pair(fmt, sizes, "cpu").first.w.backend == "cpu"
