"""Both Hopper kernels at small shapes, to be run under compute-sanitizer by scripts/sanitize_sm90.sh."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sm90_cases import KERNELS, in_tiles, make_call, relative_error, run_on

QUANTIZED: dict[str, Any] = {"act_format": "nvfp4", "a1": 500.0, "a2": 300.0}
CASES: tuple[dict[str, Any], ...] = (
    {"tokens": 40, "bias": True},
    QUANTIZED | {"a1": None, "a2": None, "tokens": 33, "top_k": 3},
    {"tokens": 1, "top_k": 4, "hidden": 320, "inter": 176},
    {"tokens": 70, "foreign": True, "experts": 9, "top_k": 3},
    {"top_k": 1, "router_weight_on_input": True, "activation": "relu2_no_mul"},
    QUANTIZED | {"a1": "expert", "a2": "expert", "activation": "swigluoai", "out_dtype": torch.float32},
    QUANTIZED | {"tokens": 9, "hidden": 192},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="two cases, for slow tools")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    args = parser.parse_args()
    for fields in CASES[:2] if args.few else CASES:
        call = make_call("nvfp4", **{"hidden": 128, "inter": 64} | fields)
        tiled = in_tiles(call)
        for kernel in args.kernels.split(","):
            out = run_on(kernel, tiled)
            if not fields.get("foreign"):
                assert relative_error(out, call) < 4e-3, (kernel, fields)
    torch.cuda.synchronize()
    print("all results are right")


if __name__ == "__main__":
    main()
