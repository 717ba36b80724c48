"""The Hopper kernels at small shapes, to be run under compute-sanitizer by scripts/sanitize_sm90.sh."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sm90_cases import KERNELS, in_tiles, make_call, relative_error, run_on
from tolerances import FP8_SUMS

import torch_moe_ops as moe

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
# Layers called from router logits: tokens, scheme, what `prepare` is told.
LAYERS: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (5, "nvfp4", {"act_format": "fp8", "weight_policy": "packed"}),
    (70, "nvfp4", {"act_format": "fp8", "weight_policy": "folded"}),
    (40, "fp8_block", {"act_format": "fp8", "backend": "cuda_sm90_fp8"}),
    (7, "fp8", {"act_format": "fp8", "backend": "cuda_sm90_fp8"}),
    (3, "mxfp4", {}),
    (70, "mxfp4", {}),
    (40, "int4", {"backend": "cuda_sm90_int4"}),
    (70, "nvfp4", {"act_format": "none"}),
    (3, "nvfp4", {"act_format": "none"}),
)


def run_kernels(kernels: list[str], cases: tuple[dict[str, Any], ...]) -> None:
    for fields in cases:
        call = make_call("nvfp4", **{"hidden": 128, "inter": 64} | fields)
        tiled = in_tiles(call)
        for kernel in kernels:
            out = run_on(kernel, tiled)
            if not fields.get("foreign"):
                assert relative_error(out, call) < 4e-3, (kernel, fields)


def run_layer(tokens: int, scheme: str, settings: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(6, 128, 192, generator=g) / 14, torch.randn(6, 192, 64, generator=g) / 8
    raw = moe.quantize_experts(w13.bfloat16(), w2.bfloat16(), scheme)
    x = torch.randn(tokens, 192, generator=g).bfloat16()
    logits, routing = torch.randn(tokens, 6, generator=g), moe.Routing("sigmoid_renorm", 2)
    want = moe.fused_moe(x, logits, moe.prepare(raw, **settings | {"backend": "reference"}), routing=routing).double()
    w = moe.prepare(raw.to("cuda"), **settings)
    assert w.backend.startswith("cuda_sm90"), w.backend
    out = moe.fused_moe(x.cuda(), logits.cuda(), w, routing=routing).cpu().double()
    assert (out - want).norm() < FP8_SUMS * want.norm(), settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="fewer cases, for slow tools")
    parser.add_argument("--kernels", default=",".join((*KERNELS, "layers")))
    args = parser.parse_args()
    kernels = args.kernels.split(",")
    run_kernels([kernel for kernel in kernels if kernel in KERNELS], CASES[:3] if args.few else CASES)
    if "layers" in kernels:
        for layer in LAYERS[:3] if args.few else LAYERS:
            run_layer(*layer)
    torch.cuda.synchronize()
    print("all results are right")


if __name__ == "__main__":
    main()
