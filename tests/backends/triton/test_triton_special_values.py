"""NaN, infinities and tiny values in the Triton engine: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import special_rows
import torch

pytest.importorskip("triton")

from triton_cases import DEVICE, empty_output, make_call

from torch_moe_ops.backends import triton as backend
from torch_moe_ops.oracle.reference import experts_reference

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # numpy, of 0 * infinity
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]

# float16 hidden states: Triton's interpreter loses subnormal numbers of bfloat16.
SIZES: dict[str, Any] = {"hidden": 64, "inter": 32, "top_k": 2, "experts": 3, "dtype": torch.float16}
FORMATS: dict[str, dict[str, Any]] = {
    "none": {"scheme": "none"},
    "nvfp4-none": {"scheme": "nvfp4"},
    "nvfp4-static": {"scheme": "nvfp4", "act_format": "nvfp4", "a1": 500.0, "a2": "expert"},
    "nvfp4-dynamic": {"scheme": "nvfp4", "act_format": "nvfp4"},
    "fp8-static": {"scheme": "fp8", "act_format": "fp8", "a1": 30.0, "a2": 20.0},
    "fp8-dynamic": {"scheme": "fp8", "act_format": "fp8"},
    "fp8_block": {"scheme": "fp8_block", "act_format": "fp8"},
    "int8-static": {"scheme": "int8", "act_format": "int8", "weights": {"group": -1}, "a1": 30.0, "a2": "expert"},
    "int8-dynamic": {"scheme": "int8", "act_format": "int8", "weights": {"group": -1}},
    "mxfp8": {"scheme": "mxfp8", "act_format": "mxfp8"},
    "mxfp4": {"scheme": "mxfp4", "act_format": "mxfp4"},
    "mxfp6": {"scheme": "mxfp6_e3m2", "act_format": "mxfp6_e3m2"},
}
# One that clamps beside every format; without one those that compare, saturate and bound nothing, too.
CASES = (*((name, "swigluoai") for name in FORMATS), ("none", "relu2_no_mul"), ("none", "situ"), ("none", "silu"))


@pytest.mark.parametrize(("name", "activation"), CASES)
def test_rows(name: str, activation: str) -> None:
    call = make_call(**SIZES, **FORMATS[name], activation=activation, tokens=1, out_dtype=torch.float32)
    batch = special_rows.make_batch(64, 3, 2, torch.float16, DEVICE)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        part = call._replace(hidden_states=x, topk_ids=ids, topk_weights=weights)
        out = empty_output(part)
        backend.run(part, out)
        return out

    whole = call._replace(hidden_states=batch.x, topk_ids=batch.ids, topk_weights=batch.weights)
    want = experts_reference(whole)
    special_rows.check_oracle(batch, want)
    special_rows.check(run, batch, want, 0.1)  # one code of the intermediate on the other side of a tie
