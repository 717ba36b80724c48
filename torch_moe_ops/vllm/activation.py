"""vLLM's names of expert activations, and where its layers keep their constants."""

from __future__ import annotations

from typing import Any

# As vLLM has them: none of them reads constants from the layer.
_SAME = {
    "gelu": {},
    "gelu_tanh": {},
    "silu_no_mul": {},
    "gelu_no_mul": {},
    "relu2_no_mul": {},
    "swigluoai": {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0},
    "swiglustep": {"swiglu_limit": 7.0},
}


def activation_of(layer: Any) -> dict[str, Any]:
    """`activation` and its swiglu constants for `prepare`.

    Args:
        layer: vLLM's RoutedExperts.

    Raises ValueError for an activation that no op has.
    """
    name = getattr(layer.activation, "value", layer.activation)
    limit = getattr(layer, "swiglu_limit", None)
    if name == "silu":
        return {"activation": "silu", "swiglu_limit": limit}
    if name == "swigluoai_uninterleave":
        # vLLM's own defaults, not gpt-oss's: models say both.
        alpha, beta = getattr(layer, "swiglu_alpha", None), getattr(layer, "swiglu_beta", None)
        constants = {"swiglu_alpha": 1.0 if alpha is None else alpha, "swiglu_beta": 0.0 if beta is None else beta}
        if limit is None:
            raise ValueError("swiglu_limit must be a number for activation 'swigluoai_uninterleave', got None")
        return {"activation": "swigluoai", "swiglu_limit": limit, **constants}
    if name == "situ":
        return {"activation": "situ", **_situ(layer.moe_config)}
    if name not in _SAME:
        raise ValueError(f"activation must be one of {_KNOWN}, got {name!r}")
    return {"activation": name, **_SAME[name]}


_KNOWN = ["silu", "swigluoai_uninterleave", "situ", *_SAME]


def _situ(moe_config: Any) -> dict[str, float]:
    gate, up = moe_config.activation_situ_beta, moe_config.activation_situ_linear_beta
    if gate is None or up is None:
        raise ValueError(f"activation 'situ' must bound gate and up, got bounds {gate} and {up}")
    return {"swiglu_alpha": gate, "swiglu_beta": up}
