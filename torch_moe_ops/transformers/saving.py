"""What transformers is told of a model whose experts were attached: that it cannot write them."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin


class _Attached(QuantizationConfigMixin):
    def __init__(self) -> None:
        self.quant_method: Any = "moeq"


class AttachedExperts(HfQuantizer):
    """`model.hf_quantizer` of such a model: `save_pretrained` asks it, and would else leave the experts out."""

    requires_calibration = False

    def __init__(self) -> None:
        super().__init__(_Attached())

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True
