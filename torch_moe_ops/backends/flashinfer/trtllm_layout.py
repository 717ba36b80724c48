"""The layouts of FlashInfer's TRTLLM-gen kernels.

Padding: the row shuffle needs whole tiles of 128 rows and the scale tiling 128 rows by 4 scales; int4 weights
are cut along K into 128 bytes, and their kernels ask for 256 values.
"""

from __future__ import annotations

from torch_moe_ops.backends.flashinfer.layout import LayerLayout, WeightRules
from torch_moe_ops.backends.flashinfer.matrices import MatrixLayout

_FUSED = MatrixLayout(shuffle=32, interleave=True)  # the activation is fused into the first GEMM

RULES = {
    "nvfp4": WeightRules(_FUSED, 128, 128),
    "mxfp4": WeightRules(_FUSED, 128, 128),
    "mxfp8": WeightRules(_FUSED, 128, 128),
    "mxint4": WeightRules(MatrixLayout(shuffle=32, interleave=True, blocked=True, flip=0x88), 256, 256),
    "fp8": WeightRules(_FUSED, 128, 128),
    # Its activation is a kernel of its own, so that gate and up rows stay apart; tiles of 64 rows.
    "fp8_block": WeightRules(MatrixLayout(shuffle=16, blocked=True), 128, 128),
    "none": WeightRules(MatrixLayout(shuffle=32, interleave=True, blocked=True), 128, 128),
}

LAYER = LayerLayout("flashinfer_trtllm_v1", RULES, bias_multiple=128)
