"""Input scales of linears whose loading the plug-in watches, as vLLM's own method then finds them; without vLLM."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_moe_ops.vllm.shared_experts import keep_until_prepared


@pytest.mark.parametrize("name", ["input_scale", "input_global_scale"])
@pytest.mark.parametrize(
    ("loaded", "found"),
    [({0: 0.25, 1: 0.5}, [0.25, 0.5]), ({0: 0.25}, [0.25, 0.25]), ({}, [math.nan, math.nan])],
    ids=["gate and up", "one matrix", "none"],
)
def test_parts_of_one_matrix_have_its_scale(name: str, loaded: dict[int, float], found: list[float]) -> None:
    linear, seen = torch.nn.Linear(2, 2), []

    def create_weights(layer: Any) -> None:
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(2)))

    def process(layer: Any) -> None:
        seen.append(layer._parameters[name].data.clone())

    method = SimpleNamespace(process_weights_after_loading=process, create_weights=create_weights)
    keep_until_prepared(method, {}, lambda runner: False)
    method.create_weights(linear)
    for part, scale in loaded.items():
        linear._parameters[name].data[part] = scale
    method.process_weights_after_loading(linear)
    torch.testing.assert_close(seen, [torch.tensor(found)], rtol=0, atol=0, equal_nan=True)
