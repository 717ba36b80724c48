"""From the flags of a quant config to the group shapes of its operands."""

from __future__ import annotations

from collections.abc import Sequence

from torch_moe_ops.config._require import require, require_bool, require_type
from torch_moe_ops.config.descriptors import GroupShape
from torch_moe_ops.config.formats import FORMATS, FP8, QuantDType, fixed_block

OWNER = "FusedMoEQuantConfig"


def group_shapes(
    act: QuantDType,
    weight: QuantDType,
    per_act_token_quant: bool,
    per_out_ch_quant: bool,
    block_shape: Sequence[int] | None,
) -> tuple[GroupShape | None, GroupShape | None]:
    """Shapes of the activation's and the weight's scaling groups.

    A block goes where the weight's format leaves it open, and to the activations of the same format (fp8). Beside
    int4 weights it would be the activations' as well, which have no blocks there: their flag must say otherwise.
    Where the weight's format fixes the block (nvfp4, MX) it may only repeat it. Which blocks the ops have
    is checked with the config.

    Raises:
        ValueError: a flag that would have no effect, or flags that exclude one another.
    """
    for field, flag in (("per_act_token_quant", per_act_token_quant), ("per_out_ch_quant", per_out_ch_quant)):
        require_bool(OWNER, field, flag)
    act_open = act is not None and fixed_block(act) is None
    weight_open = weight is not None and fixed_block(weight) is None
    block = _parse_block(block_shape, FORMATS[weight].has_zero_points)
    block_on_act = block is not None and act_open and act == weight
    block_on_weight = block is not None and weight_open
    if block is not None and not block_on_weight:
        _require_repetition(act, weight, block)
    if block is not None and act_open and weight_open:
        finite = block.is_block() or act != weight
        text = f"hold two sizes of at least 1 for {act} activations (flags say scales per token and per channel)"
        require(finite, OWNER, "block_shape", text, list(block))
        said = act == weight or per_act_token_quant
        text = "be True where block_shape is given: activations of int4 weights are quantized per token"
        require(said, OWNER, "per_act_token_quant", text, per_act_token_quant)
    _check_flags(act, weight, per_act_token_quant, per_out_ch_quant, block_on_act, block_on_weight)
    act_shape = weight_shape = None
    if act_open:
        act_shape = GroupShape.PER_TOKEN if per_act_token_quant else GroupShape.PER_TENSOR
        act_shape = block if block_on_act else act_shape
    if weight_open:
        # (1, -1) on a weight [rows, K] is one scale per output channel.
        per_channel = per_out_ch_quant and not has_channel_scales(act, weight)
        weight_shape = GroupShape.PER_TOKEN if per_channel else None
        weight_shape = block if block_on_weight else weight_shape
    return act_shape, weight_shape


def has_channel_scales(act: QuantDType, weight: QuantDType) -> bool:
    """Whether `g*_alphas` are float32 scales per output channel, beside the group scales."""
    return weight == "int4" and act == FP8


def _parse_block(block_shape: Sequence[int] | None, is_integer: bool) -> GroupShape | None:
    if block_shape is None:
        return None
    is_list = isinstance(block_shape, (list, tuple))
    require_type(is_list, OWNER, "block_shape", "be a list [rows, columns] or None", block_shape)
    require(len(block_shape) == 2, OWNER, "block_shape", "have two elements, [rows, columns]", block_shape)
    row, col = block_shape
    if is_integer and row == 0:
        row = 1  # the field writes [0, g] for groups of g along K
    return GroupShape(row, col)


def _require_repetition(act: QuantDType, weight: QuantDType, block: GroupShape) -> None:
    fixed = fixed_block(weight) or fixed_block(act)
    expected = "be None where nothing is quantized" if fixed is None else f"be {list(fixed)} or None for {weight}"
    require(fixed is not None and block == fixed, OWNER, "block_shape", expected, list(block))


def _check_flags(
    act: QuantDType,
    weight: QuantDType,
    per_act_token: bool,
    per_out_ch: bool,
    block_on_act: bool,
    block_on_weight: bool,
) -> None:
    if per_act_token:
        open_act = act is not None and fixed_block(act) is None
        require(open_act, OWNER, "per_act_token_quant", f"be False for activations of dtype {act}", True)
        require(not block_on_act, OWNER, "per_act_token_quant", "be False where block_shape is given", True)
    if per_out_ch:
        open_weight = weight is not None and fixed_block(weight) is None
        require(open_weight, OWNER, "per_out_ch_quant", f"be False for weights of dtype {weight}", True)
        clash = block_on_weight and not has_channel_scales(act, weight)
        require(not clash, OWNER, "per_out_ch_quant", "be False where block_shape is given", True)
