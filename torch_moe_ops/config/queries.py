"""Which quantization a config describes: the `use_*` predicates, the scheme's names."""

from __future__ import annotations

import torch

from torch_moe_ops.config.descriptors import FusedMoEQuantDesc
from torch_moe_ops.config.formats import FORMATS, FP8, INT8, OCP_MX_DTYPES, QuantDType, act_format_name


class QuantSchemeQueries:
    """Mixin of FusedMoEQuantConfig: everything that follows from the two element formats.

    Each predicate looks at weights and activations. Nothing is cached: there is no state to go stale.
    """

    _a1: FusedMoEQuantDesc
    _w1: FusedMoEQuantDesc

    @property
    def quant_dtype(self) -> QuantDType:
        """Element format of the activations, None where they are not quantized."""
        return self._a1.dtype

    @property
    def weight_quant_dtype(self) -> QuantDType:
        """Element format of the weights, None where they are not quantized."""
        return self._w1.dtype

    @property
    def is_quantized(self) -> bool:
        """Whether the activations are quantized."""
        return self.quant_dtype is not None

    def _uses(self, weight: QuantDType, act: QuantDType) -> bool:
        return self._w1.dtype == weight and self._a1.dtype == act

    @property
    def use_fp8_w8a8(self) -> bool:
        return self._uses(FP8, FP8)

    @property
    def use_fp8_w8a16(self) -> bool:
        return self._uses(FP8, None)

    @property
    def use_int8_w8a8(self) -> bool:
        return self._uses(INT8, INT8)

    @property
    def use_int8_w8a16(self) -> bool:
        return self._uses(INT8, None)

    @property
    def use_int4_w4a16(self) -> bool:
        return self._uses("int4", None)

    @property
    def use_int4_w4afp8(self) -> bool:
        return self._uses("int4", FP8)

    @property
    def use_nvfp4_w4a16(self) -> bool:
        return self._uses("nvfp4", None)

    @property
    def use_nvfp4_w4a4(self) -> bool:
        return self._uses("nvfp4", "nvfp4")

    @property
    def use_mxfp4_w4a16(self) -> bool:
        return self._uses("mxfp4", None)

    @property
    def use_mxfp4_w4a4(self) -> bool:
        return self._uses("mxfp4", "mxfp4")

    @property
    def use_mxfp4_w4a8(self) -> bool:
        """fp8 (e4m3 with float32 scales) activations; for MX activations see `use_mxfp4_mxfp8`."""
        return self._uses("mxfp4", FP8)

    @property
    def use_mxfp4_mxfp8(self) -> bool:
        return self._uses("mxfp4", "mxfp8")

    @property
    def ocp_mx_scheme(self) -> str | None:
        """ "w_<weight>" or "w_<weight>_a_<activation>", e.g. "w_mxfp4_a_mxfp4"; None without MX weights."""
        weight, act = self._w1.dtype, self._a1.dtype
        if weight not in OCP_MX_DTYPES:
            return None
        return f"w_{weight}" if act is None else f"w_{weight}_a_{act_format_name(act)}"

    @property
    def scheme(self) -> str:
        """The weight scheme of `torch.ops.moeq`: "nvfp4", "fp8", "fp8_block", ...; "none" where not quantized."""
        shape = self._w1.shape
        if self._w1.dtype == FP8 and shape is not None and shape.is_block():
            return "fp8_block"
        return FORMATS[self._w1.dtype].scheme

    @property
    def act_format(self) -> str:
        """The `act_format` of `torch.ops.moeq`: "none" where activations are not quantized."""
        return act_format_name(self._a1.dtype)

    def config_name(self, dtype: torch.dtype) -> str | None:
        """The name under which the field files tuned kernel configurations.

        Args:
            dtype: dtype of the hidden states; torch.float32 has a name of its own.

        Returns "fp8_w8a8", "fp8_w8a16", "int8_w8a16", "int4_w4a16", "float32" or None (also for every OCP MX scheme).
        """
        for name in ("fp8_w8a8", "fp8_w8a16", "int8_w8a16", "int4_w4a16"):
            if getattr(self, f"use_{name}"):
                return name
        return "float32" if dtype == torch.float32 and self.ocp_mx_scheme is None else None


def scheme_name(config: QuantSchemeQueries) -> str:
    """The key of SCHEMES: the config's scheme, except that each mxfp6 element has one of its own."""
    weight = config.weight_quant_dtype
    return weight if isinstance(weight, str) and weight.startswith("mxfp6") else config.scheme
