"""What auto takes on this GPU in either class of accuracy, held to the bounds of what it took."""

from __future__ import annotations

import pytest
import torch
from gpu_layers import Format, Sizes, as_reference, make_batch, make_raw, needs_cuda
from in_graph_cells import auto_formats
from tolerances import layer_bound, relative_l2

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.problem import ACCURACIES

pytestmark = [pytest.mark.gpu, needs_cuda]

SIZES = Sizes(experts=8, top_k=2, hidden=2048, inter=768)


@pytest.mark.parametrize("fmt", auto_formats(), ids=str)
def test_either_class_is_within_the_bound_of_its_backend(fmt: Format) -> None:
    raw = make_raw(fmt, SIZES)
    reference = as_reference(raw, fmt)
    for accuracy in ACCURACIES:
        w = moe.prepare(raw, accuracy=accuracy, **fmt.settings())
        assert BACKENDS[w.backend].accuracy == "strict" or accuracy == "standard", w.backend
        for tokens in (1, 2, 64):
            batch = make_batch(SIZES, w.hidden_size, tokens, seed=tokens)
            out = moe.fused_moe_routed(*batch, w, out_dtype=torch.float32)
            want = moe.fused_moe_routed(*batch, reference, out_dtype=torch.float32)
            values = tokens * SIZES.top_k * raw.intermediate_size
            assert relative_l2(out, want) < layer_bound(w.backend, fmt.act_format, torch.float32, values), (
                w.backend,
                tokens,
            )
