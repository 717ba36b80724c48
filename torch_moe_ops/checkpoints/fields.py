"""What a format's reader hands over for one projection: tensors in the library's own conventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.validate import check_numbers

# Keys: "weight" [rows, K storage]; "scale", "zero_point": first dimension follows the rows (one entry per
# row, per tile of rows, or one for all), so that gate and up are joined along it; "scale_2", "input_scale"
# float32 [], multiply; "bias" [rows].
Fields = dict[str, Tensor]

# Calibrated activation scales; a caller may ask not to read them.
INPUT_PARTS = frozenset({"input_scale", "input_global_scale"})


def _always(linear: Linear, config: ModelConfig) -> bool:
    return True


@dataclass(frozen=True)
class Format:
    """How one producer stores one projection.

    Args:
        name: for messages and `inspect`.
        scheme: the RawWeights scheme, or a function of one projection where it depends on the tensors.
        signature: parts and the file dtypes by which a projection is recognised.
        required, optional: parts; any other part is an error.
        read: projection -> Fields. Raises CheckpointError.
        when: what distinguishes formats of one signature.
        pack: codes per stored element along K.
        interleaved: rows of a fused gate_up are g0, u0, g1, u1, ... whatever the model's config says.
    """

    name: str
    scheme: str | Callable[[Linear], str]
    signature: Mapping[str, tuple[str, ...]]
    required: frozenset[str]
    optional: frozenset[str]
    read: Callable[[Linear, ModelConfig], Fields]
    when: Callable[[Linear, ModelConfig], bool] = _always
    pack: int = 1
    interleaved: bool = False

    def matches(self, linear: Linear, config: ModelConfig) -> bool:
        known = all(part in linear and linear.entry(part).dtype in dtypes for part, dtypes in self.signature.items())
        return known and self.when(linear, config)

    def scheme_of(self, linear: Linear) -> str:
        return self.scheme if isinstance(self.scheme, str) else self.scheme(linear)


def add_bias(fields: Fields, linear: Linear) -> Fields:
    """`fields` with the projection's bias, where it has one."""
    if "bias" in linear:
        bias = linear.shaped("bias", (fields["weight"].shape[0],), "BF16", "F16", "F32")
        fields["bias"] = check_numbers(linear, "bias", bias)
    return fields
