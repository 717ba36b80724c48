"""The layouts of FlashInfer's CUTLASS kernels: [up; gate] rows as they are, block scales in 128x4 tiles.

Padding: 16 bytes for TMA; whole tiles of scales where there are block scales.
"""

from __future__ import annotations

from torch_moe_ops.backends.flashinfer.layout import LayerLayout, WeightRules
from torch_moe_ops.backends.flashinfer.matrices import MatrixLayout

_PLAIN = MatrixLayout()

RULES = {
    "none": WeightRules(_PLAIN, 8, 8),
    "fp8": WeightRules(_PLAIN, 16, 16),
    "fp8_block": WeightRules(_PLAIN, 128, 128),
    "nvfp4": WeightRules(_PLAIN, 128, 128),
    "mxfp4": WeightRules(_PLAIN, 128, 128),
    "mxfp8": WeightRules(_PLAIN, 128, 128),
}

LAYER = LayerLayout("flashinfer_cutlass_v1", RULES, bias_multiple=1)
