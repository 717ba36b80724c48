"""register: tell transformers about the library."""

from __future__ import annotations

import contextlib
from typing import Any

from torch_moe_ops.transformers.implementation import register_implementation


def register(*, input_scales: bool = True, **prepare_options: Any) -> None:
    """Make from_pretrained keep quantized experts packed and run them through torch.ops.moeq.

    That goes for every format that `load_experts` reads: ModelOpt, compressed-tensors, FP8 in tiles, MXFP4 of
    gpt-oss, GPTQ, AWQ. Other quantized linears of such a checkpoint are dequantized while they are loaded. Models
    without quantized experts are loaded as before. Also makes experts_implementation="moeq" known, and, from
    transformers 5.21 on, ep_implementation="moeq" of its DistributedConfig (expert_parallel.py).

    May be called again; models that are loaded afterwards use the arguments of the last call.

    Args:
        input_scales: as in `load_experts`; False ignores calibrated activation scales.
        prepare_options: given to `prepare` for every layer (`backend`, `accuracy`), act_format ("auto" by default),
            route, shared_experts and host_experts as in `attach_experts`.

    Raises:
        ImportError: transformers is older than the interfaces used here.
        ValueError: another package has registered quant_method "modelopt".
    """
    try:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
    except ImportError as error:
        raise ImportError(f"register needs the quantizers of transformers 5: {error}") from error
    from torch_moe_ops.transformers.interception import intercept_quantizers
    from torch_moe_ops.transformers.quantizer import MODELOPT, CheckpointConfig, PackedExperts

    other = AUTO_QUANTIZER_MAPPING.get(MODELOPT)
    if other not in (None, PackedExperts):
        raise ValueError(
            f"register: quant_method {MODELOPT!r} belongs to {other.__module__}.{other.__qualname__} already"
        )
    register_implementation()
    with contextlib.suppress(ImportError):  # transformers before 5.21 has no such interface
        from torch_moe_ops.transformers.expert_parallel import register_expert_parallel

        register_expert_parallel()
    intercept_quantizers()
    AUTO_QUANTIZATION_CONFIG_MAPPING[MODELOPT] = CheckpointConfig
    AUTO_QUANTIZER_MAPPING[MODELOPT] = PackedExperts
    PackedExperts.load_options = {"input_scales": input_scales, **prepare_options}
