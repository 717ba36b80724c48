"""Buffers of a model that was loaded, in the dtypes that the model has for them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers >= 5.17")

from torch_moe_ops.transformers.quantizer import MoeqConfig, PackedExperts


def test_a_buffer_of_another_dtype_is_replaced() -> None:
    """transformers before 5.21 leaves views of the file's dtype, whose base Dynamo would compare with them."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    base = torch.arange(4, dtype=torch.bfloat16)
    for module in model:  # which share it, and go on doing so
        module.register_buffer("correction", base[:2])
    model[1]._buffers["correction"] = model[0].correction
    quantizer = PackedExperts(MoeqConfig("none"))
    quantizer._dtypes = dict.fromkeys(("0.correction", "1.correction"), torch.float32)
    quantizer._check_loaded(model)
    assert model[0].correction.dtype == torch.float32 and model[0].correction.tolist() == [0.0, 1.0]
    assert model[0].correction._base is None
    assert model[1].correction is model[0].correction
