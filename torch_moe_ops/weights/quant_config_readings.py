"""What a quant config leaves open and its reader must say: two readings of the same tensors.

Kernels that multiply fp4 take `g*_alphas` as input scale * weight scale, an emulation takes the weight scale alone, and
both find a `gscale` beside them. Block scales of whole tiles have the same shape in a checkpoint's order and in the
128x4 layout. Either mistake gives finite numbers, so neither is guessed.
"""

from __future__ import annotations

from torch_moe_ops.config._require import require
from torch_moe_ops.config.formats import FP8, fixed_block
from torch_moe_ops.config.quant_config import FusedMoEQuantConfig

PRODUCTS, WEIGHTS = "products", "weights"
_MEANING = {
    PRODUCTS: "input scale * weight scale, as FlashInfer's and CUTLASS's kernels take them",
    WEIGHTS: "weight scales alone, as an emulation takes them",
}


def check_alphas_reading(owner: str, config: FusedMoEQuantConfig, alphas: str | None) -> None:
    """Raise ValueError unless what `g*_alphas` are is said where it matters, and can be so."""
    require(alphas in (None, *_MEANING), owner, "alphas", f"be {PRODUCTS!r}, {WEIGHTS!r} or None", alphas)
    has_input_scale = config._a1.scale is not None or config._a1.gscale is not None
    text = f"be {WEIGHTS!r} or None: the config has no input scale that alphas could contain"
    require(has_input_scale or alphas != PRODUCTS, owner, "alphas", text, alphas)
    # fp8's own scales are those of whole matrices: alphas beside them can only repeat them.
    redundant = config.weight_quant_dtype == FP8 and config._w1.scale is not None
    open_ = has_input_scale and config._w1.alpha is not None and not redundant
    text = " or ".join(f"{name!r} (g*_alphas are {meaning})" for name, meaning in _MEANING.items())
    require(alphas is not None or not open_, owner, "alphas", f"be {text}: the config does not say which", alphas)


def layout_reading(owner: str, config: FusedMoEQuantConfig, said: str | None) -> str | None:
    """The layout of block scales that the caller or the config says; None where neither does.

    Raises ValueError where they disagree, or where the weights have no scales that could be swizzled.
    """
    field, weight = "weight_scale_layout", config.weight_quant_dtype
    require(said in (None, "linear", "swizzled"), owner, field, "be 'linear', 'swizzled' or None", said)
    possible = said != "swizzled" or fixed_block(weight) is not None
    require(possible, owner, field, f"be 'linear' or None for weights of dtype {weight}", said)
    agree = None in (said, config.scale_layout) or said == config.scale_layout
    require(agree, owner, field, f"be {config.scale_layout!r} like the config's scale_layout", said)
    return said or config.scale_layout
