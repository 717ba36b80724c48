"""From the configuration objects of the field to ours: packed weights -> RawWeights, a layer's config -> Problem.

What the conversion does to numbers: block and channel scales keep their values; int4's float32 scales per output
channel are folded into its group scales, one float32 rounding each; where a config gives products with an input scale,
the input scale is divided out again so that `prepare` computes the same products (see `_divided_by`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.backends.registry import Problem
from torch_moe_ops.config._require import require, require_type
from torch_moe_ops.config.formats import FP8, INT8
from torch_moe_ops.config.moe import FusedMoEConfig
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig
from torch_moe_ops.integer_weights import int4_codes_of, int8_codes_of, integer_scale, zero_point_of
from torch_moe_ops.quant import e8m0, fp6
from torch_moe_ops.quant.swizzle import padded_shape, unswizzle_scale
from torch_moe_ops.raw_weights import RawWeights
from torch_moe_ops.routing import METHOD_NAMES, RoutingMethodType
from torch_moe_ops.schemes import SCHEMES, Scheme

OWNER = "from_quant_config"
