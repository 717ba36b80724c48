"""Runs the CUDA quantizer's kernels on small, odd shapes; made to be run under compute-sanitizer.

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that the tool sees each tensor's own bounds rather than torch's pool.
"""

from __future__ import annotations

import torch

from torch_moe_ops.core import extension

SHAPES = [(1, 16), (3, 48), (7, 2880), (65, 528), (2, 8192)]


def main() -> None:
    if not extension.has_cuda_extension():
        raise SystemExit(extension.cuda_extension_reason())
    for rows, columns in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.randn(rows, columns).to(dtype).cuda()
            by_row = torch.ops.moeq_C.dynamic_gscale_nvfp4_cuda(x)
            for gscale in (by_row, torch.tensor(300.0).cuda()):
                codes, scale = torch.ops.moeq_C.quantize_nvfp4_cuda(x, gscale)
                # Copied away and read here, so that initcheck sees every output byte used.
                assert codes.cpu().any() and scale.cpu().view(torch.uint8).any()
    torch.cuda.synchronize()
    print(f"ran {len(SHAPES)} shapes")


if __name__ == "__main__":
    main()
