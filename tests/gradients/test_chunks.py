"""How many experts a pass of Triton's kernels decodes at once, and which columns of hidden states (gradients/chunks.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import Case
from triton_passes import make_call

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.gradients import chunks, on_gpu
from torch_moe_ops.gradients.weights import Projection, Stored, projection_of

QWEN3 = Sizes(128, 2048, 768, True, torch.uint8)
DSV3 = Sizes(256, 7168, 2048, True, torch.uint8)


@pytest.mark.parametrize(
    ("sizes", "name", "tokens", "width", "expected"),
    [
        (QWEN3, "w13", 4096, None, 8),  # 120 tiles of 132, where 9 experts have 135
        (QWEN3, "w13", 4096, 512, 26),  # 130 tiles
        (QWEN3, "w2", 4096, None, 17),  # 128 tiles
        (DSV3, "w13", 4096, None, 5),  # 120 tiles
        (DSV3, "w13", 16384, None, 3),  # 216 tiles of 264
        (QWEN3, "w13", 1, 256, 88),
        (Sizes(3, 64, 64, True, torch.uint8), "w13", 9, None, 3),  # all there are
    ],
)
def test_experts_fill_the_multiprocessors(
    sizes: Sizes, name: str, tokens: int, width: int | None, expected: int
) -> None:
    stored = Stored(torch.empty(0, dtype=torch.uint8), None, None, None)
    projection = Projection(name, stored, "nvfp4", "exact", BACKENDS["cuda_sm90"], sizes)
    assert chunks.at_once_on_gpu(projection, 8 * tokens, sizes.num_experts, width) == expected


@pytest.mark.parametrize(("processors", "expected"), [(132, 8), (108, 7), (148, 9)])
def test_a_gpu_says_how_many_multiprocessors_it_has(
    processors: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120 tiles of 132, 105 of 108, 135 of 148."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(chunks, "processors_of", lambda device: processors)
    stored = Stored(torch.empty(0, dtype=torch.uint8), None, None, None)
    projection = Projection("w13", stored, "nvfp4", "exact", BACKENDS["cuda_sm90"], QWEN3)
    assert chunks.at_once_on_gpu(projection, 8 * 4096, QWEN3.num_experts) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tokens": 200}, [(0, 256), (256, 512)]),
        ({"tokens": 200, "hidden": 2560}, [(0, 768), (768, 1536), (1536, 2304), (2304, 2560)]),
        ({"tokens": 1}, [(0, 512)]),  # few rows beside the weights
        ({"tokens": 200, "scheme": "none"}, [(0, 512)]),  # which nothing decodes
        ({"tokens": 200, "hidden": 192}, [(0, 192)]),
    ],
    ids=str,
)
def test_windows(fields: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    case = Case(**{"experts": 2, "top_k": 2, "hidden": 512, "inter": 64, **fields})
    backend = "triton" if case.scheme == "none" else "cuda_sm90"
    call, sizes = make_call(case, backend)
    p = on_gpu.make_pass(call, sizes, call.hidden_states, call.hidden_states, (None, None))
    found = chunks.windows_of_hidden(p, projection_of(call, "w13", BACKENDS[backend], sizes))
    assert [(columns.start, columns.stop) for columns in found] == expected
