"""register: tell transformers about the library."""

from __future__ import annotations

from typing import Any

from torch_moe_ops.transformers.implementation import register_implementation


def register(*, input_scales: bool = True, **prepare_options: Any) -> None:
    """Make experts_implementation="moeq" known, and from_pretrained able to load ModelOpt exports.

    May be called again; models that are loaded afterwards use the arguments of the last call.

    Args:
        input_scales: as in `load_experts`; False ignores calibrated activation scales.
        prepare_options: given to `prepare` for every layer (`act_format`, `backend`, ...).

    Raises:
        ImportError: transformers is older than the interfaces used here.
        ValueError: another package has registered quant_method "modelopt".
    """
    try:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
        from transformers.quantizers.base import HfQuantizer
    except ImportError as error:
        raise ImportError(f"register needs the quantizers of transformers 5: {error}") from error
    if not hasattr(HfQuantizer, "get_load_operations"):
        from transformers import __version__

        raise ImportError(f"register needs transformers >= 5.23 (HfQuantizer.get_load_operations), got {__version__}")
    from torch_moe_ops.transformers.quantizer import METHOD, ModelOptConfig, ModelOptQuantizer

    other = AUTO_QUANTIZER_MAPPING.get(METHOD)
    if other not in (None, ModelOptQuantizer):
        raise ValueError(
            f"register: quant_method {METHOD!r} belongs to {other.__module__}.{other.__qualname__} already"
        )
    register_implementation()
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = ModelOptConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = ModelOptQuantizer
    ModelOptQuantizer.load_options = {"input_scales": input_scales, **prepare_options}
