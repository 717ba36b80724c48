"""Every Triton kernel at small shapes, to be run under compute-sanitizer:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/triton_sanitizer.py
"""

from __future__ import annotations

from typing import Any

import torch
from triton_cases import empty_output, make_call, relative_error

from torch_moe_ops.kernels.triton.configs import Config, Tile
from torch_moe_ops.kernels.triton.launch import run_experts
from torch_moe_ops.schemes import SCHEMES

OTHERS = ("mxfp4", "mxfp8", "mxfp6_e3m2", "fp8", "fp8_block", "int8", "int4", "mxint4")
QUANTIZED: dict[str, Any] = {"act_format": "nvfp4", "a1": 500.0, "a2": 300.0}
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": torch.float16, "bias": True},
    {"tokens": 1, "top_k": 4},
    {"tokens": 40, "foreign": True},
    {"scheme": "none", "bias": True},
    {"top_k": 1, "router_weight_on_input": True},
    QUANTIZED,
    QUANTIZED | {"a1": "expert", "a2": "expert", "activation": "relu2_no_mul"},
    QUANTIZED | {"a1": None, "a2": None},
    *({"scheme": scheme, "act_format": act} for scheme in OTHERS for act in SCHEMES[scheme].act_formats),
    {"scheme": "int8", "act_format": "int8", "weights": {"group": -1, "zero": True}},
    {"scheme": "int4", "weights": {"group": 32, "zero": True}, "dtype": torch.float16},
)
CONFIGS = (
    None,
    Config(16, 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3, split_k=2)),
    Config(64, 16, Tile(128, 64, 4, 3), Tile(128, 64, 4, 3)),
)


def main() -> None:
    for fields in CASES:
        for config in CONFIGS:
            call = make_call(**{"hidden": 288, "inter": 160} | fields)
            out = empty_output(call)
            run_experts(call, out, config)
            if not fields.get("foreign"):
                assert relative_error(out, call) < 4e-3
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
