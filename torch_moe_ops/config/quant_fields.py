"""The fields of FusedMoEQuantConfig, for what checks and describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_moe_ops.config.descriptors import FusedMoEQuantDesc
from torch_moe_ops.config.queries import QuantSchemeQueries
from torch_moe_ops.config.tensors import QuantTensors

ScaleLayout = Literal["linear", "swizzled"]


@dataclass(frozen=True, init=False)
class QuantFields(QuantSchemeQueries, QuantTensors):
    """What FusedMoEQuantConfig holds; documented there."""

    _a1: FusedMoEQuantDesc
    _a2: FusedMoEQuantDesc
    _w1: FusedMoEQuantDesc
    _w2: FusedMoEQuantDesc
    is_nvfp4_scale_swizzled: bool = True
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    mx_alignment: int = 0
    scale_layout: ScaleLayout | None = None
