"""What the kernels of a backward pass are given: they read rows by their widths alone."""

from __future__ import annotations

from typing import Any

import torch

from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.gradients.on_gpu import make_pass

EXPERTS, HIDDEN, INTER, PADDED = 3, 8, 4, 16


def test_biases_without_the_padding_of_a_layout_are_contiguous() -> None:
    given: dict[str, Any] = dict.fromkeys(FIELDS)
    given |= {"topk_ids": torch.tensor([[0, 2]], dtype=torch.int32), "local_expert_offset": 0}
    given["router_weight_on_input"] = False
    biases = torch.randn(EXPERTS, PADDED)[:, : 2 * INTER], torch.randn(EXPERTS, PADDED)[:, :HIDDEN]
    assert not any(bias.is_contiguous() for bias in biases)
    rows = torch.randn(HIDDEN, 1).t()
    made = make_pass(ExpertsCall(**given), Sizes(EXPERTS, HIDDEN, INTER, True, torch.uint8), rows, rows, biases)
    for bias, own in zip(biases, made.biases, strict=True):
        assert own is not None
        assert own.is_contiguous()
        assert torch.equal(own, bias)
