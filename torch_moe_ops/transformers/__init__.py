"""Quantized experts inside transformers models; needs transformers 5.

    import torch_moe_ops.transformers as moeq_transformers
    moeq_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(folder)      # quantized experts stay packed

`register` adds the experts implementation "moeq" and a quantizer for every format that `load_experts` reads.
`attach_experts` gives a model that was built in any other way the experts of a checkpoint; `quantize_model`
quantizes those that a model has, `MoeqConfig` those of an unquantized checkpoint while they are loaded.
"""

from __future__ import annotations

try:
    import transformers as _transformers  # noqa: F401 - only to say what is missing
except ImportError as error:
    if error.name == "transformers":
        raise ImportError(
            "torch_moe_ops.transformers needs transformers 5.17 or later: pip install 'torch-moe-ops[transformers]'"
        ) from error
    raise ImportError(f"torch_moe_ops.transformers: transformers is installed, but does not import: {error}") from error

from torch_moe_ops.transformers.attach import attach_experts
from torch_moe_ops.transformers.experts import ExpertWeights, moeq_experts
from torch_moe_ops.transformers.peft import prepare_for_peft
from torch_moe_ops.transformers.quantize import quantize_model
from torch_moe_ops.transformers.quantizer import MoeqConfig
from torch_moe_ops.transformers.registration import register

__all__ = [
    "ExpertWeights",
    "MoeqConfig",
    "attach_experts",
    "moeq_experts",
    "prepare_for_peft",
    "quantize_model",
    "register",
]
