"""GPTQ and AWQ checkpoints, brought to one int4 form: codes along K in int32 words, value = (code - zero) * scale.

Both store [K, N]. GPTQ packs eight consecutive K into a word, so that its transpose is the wanted form already;
AWQ packs eight columns of N, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from torch import Tensor

from torch_moe_ops.checkpoints.fields import Fields, Format, add_bias
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.nibbles import CODES_PER_WORD, check_group_index, nibbles, pack_words
from torch_moe_ops.checkpoints.validate import check_block_scales

_FLOATS = ("F16", "BF16", "F32")
# Nibble that holds column c of a word: inverse of the order in which AWQ fills them.
_AWQ_NIBBLE = [0, 4, 1, 5, 2, 6, 3, 7]


def _scales(linear: Linear, k: int, rows: int) -> Tensor:
    """[rows, groups] in the stored dtype."""
    scales = linear.matrix("scales", *_FLOATS)
    groups = scales.shape[0]
    if scales.shape[1] != rows or groups == 0 or k % groups:
        requirement = f"have shape [a divisor of K = {k}, {rows} rows]"
        raise linear.fail("scales", requirement, tuple(scales.shape))
    check_block_scales(linear, "scales", scales, signed=True)
    return scales.t()


def _read_gptq(linear: Linear, config: ModelConfig) -> Fields:
    qweight = linear.matrix("qweight", "I32")
    k, rows = qweight.shape[0] * CODES_PER_WORD, qweight.shape[1]
    bits = config.quantization.get("bits", 4)
    if bits != 4:
        raise linear.fail("qweight", "hold 4-bit codes", f"bits {bits!r} in config.json")
    scale = _scales(linear, k, rows)
    groups = scale.shape[1]
    if "g_idx" in linear:
        check_group_index(linear, "g_idx", k, groups)
    zero_point = nibbles(linear.shaped("qzeros", (groups, rows // CODES_PER_WORD), "I32")).t()
    if config.quantization.get("checkpoint_format") != "gptq_v2":
        # The first version of the format stores zero - 1 in four bits.
        zero_point = zero_point + 1 & 15
    return add_bias({"weight": qweight.t(), "scale": scale, "zero_point": zero_point}, linear)


def _read_awq(linear: Linear, config: ModelConfig) -> Fields:
    version = str(config.quantization.get("version", "gemm")).lower()
    if version != "gemm":
        raise linear.fail("qweight", 'be of AWQ version "gemm"', f"{version!r} in config.json")
    qweight = linear.matrix("qweight", "I32")
    k, rows = qweight.shape[0], qweight.shape[1] * CODES_PER_WORD
    if k % CODES_PER_WORD:
        raise linear.fail("qweight", f"have a multiple of {CODES_PER_WORD} rows", k)
    scale = _scales(linear, k, rows)
    qzeros = linear.shaped("qzeros", (scale.shape[1], rows // CODES_PER_WORD), "I32")
    fields = {"weight": pack_words(_awq_codes(qweight).t()), "scale": scale, "zero_point": _awq_codes(qzeros).t()}
    return add_bias(fields, linear)


def _awq_codes(words: Tensor) -> Tensor:
    """int32 [n, N/8] -> uint8 [n, N] in column order."""
    codes = nibbles(words).unflatten(-1, (-1, CODES_PER_WORD))
    return codes[..., _AWQ_NIBBLE].flatten(-2)


def _words_hold_columns(linear: Linear, config: ModelConfig) -> bool:
    """AWQ: qweight is eight times narrower than scales; GPTQ: as wide."""
    if "scales" not in linear:
        return False
    words, scales = linear.shape("qweight"), linear.shape("scales")
    return len(words) == len(scales) == 2 and words[1] * CODES_PER_WORD == scales[1]


AWQ = Format(
    "AWQ int4",
    scheme="int4",
    signature={"qweight": ("I32",)},
    required=frozenset({"qweight", "qzeros", "scales"}),
    optional=frozenset({"bias"}),
    read=_read_awq,
    when=_words_hold_columns,
)
GPTQ = Format(
    "GPTQ int4",
    scheme="int4",
    signature={"qweight": ("I32",)},
    required=frozenset({"qweight", "qzeros", "scales"}),
    optional=frozenset({"g_idx", "bias"}),
    read=_read_gptq,
)
