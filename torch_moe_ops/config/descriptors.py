"""How one operand of an expert GEMM is quantized: GroupShape and FusedMoEQuantDesc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.config._require import require, require_int, require_type
from torch_moe_ops.config.formats import QuantDType, canonical_dtype, fixed_block
from torch_moe_ops.core.same_bits import same_bits


class _RowCol(NamedTuple):
    row: int
    col: int


class GroupShape(_RowCol):
    """Rows and columns that share one scale; -1 means all of them.

    The operand is read as [rows, K]: tokens x K for activations, output channels x K for weights.
    One scale per output channel of a weight is therefore (1, -1), the same pair as PER_TOKEN;
    PER_CHANNEL (-1, 1) is one scale per column.

    Raises:
        TypeError, ValueError: row or col is not an int that is -1 or at least 1.
    """

    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    def __new__(cls, row: int, col: int) -> GroupShape:
        for field, value in (("row", row), ("col", col)):
            require_int("GroupShape", field, value, -1)
            require(value != 0, "GroupShape", field, "be -1 (all) or at least 1", value)
        return super().__new__(cls, row, col)

    def is_per_tensor(self) -> bool:
        """One scale for everything."""
        return self == GroupShape.PER_TENSOR

    def is_per_token(self) -> bool:
        """One scale per row, whatever its length."""
        return self == GroupShape.PER_TOKEN

    def is_per_channel(self) -> bool:
        """One scale per column."""
        return self == GroupShape.PER_CHANNEL

    def is_block(self) -> bool:
        """Both sizes are finite: groups (1, g) and blocks (r, c)."""
        return self.row > 0 and self.col > 0


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


def is_precision_config(value: Any) -> bool:
    """Whether value is a triton_kernels PrecisionConfig: known by name, because it is not a dependency."""
    return type(value).__name__ == "PrecisionConfig"


@dataclass(frozen=True, eq=False, init=False, repr=False)
class FusedMoEQuantDesc:
    """How one operand (an activation or a weight) is quantized, with the tensors that go with it.

    Args:
        dtype: element format (see `formats`), None where the operand is not quantized.
        shape: what shares a scale. None: not stated, except that nvfp4 and the MX formats
            always get their block, (1, 16) or (1, 32).
        scale: multiplies a code back to a real value. Weights: [num_experts, ...]. Activations: a
            static scale. A PrecisionConfig may stand in for the scale of an mxfp4 weight.
        alpha_or_gscale: alias: becomes `gscale` in an activation's descriptor and `alpha` in a
            weight's, once a FusedMoEQuantConfig says which of the two this is.
        zp: zero points of a weight.
        bias: added to the GEMM's result, [num_experts, rows].
        alpha: float32 [num_experts] or [num_experts, 2] (gate, up); multiplies an accumulator back to
            real values: the weight's own global scale or, where the activation has a static scale, perhaps its
            product with that one.
        gscale: float32 [] or [num_experts]; multiplies an activation before it is quantized.
        channel_scale: float32 [num_experts, rows] or [num_experts, rows, 1]; multiplies a weight's
            row in addition to `scale` (int4 weights with fp8 activations).

    Raises:
        ValueError: unknown dtype; a shape that contradicts the dtype's own block; alias and field both given.
        TypeError: a field that is not a Tensor.
    """

    dtype: QuantDType = None
    shape: GroupShape | None = None
    scale: Any = None  # Tensor | PrecisionConfig | None
    zp: Tensor | None = None
    bias: Tensor | None = None
    alpha: Tensor | None = None
    gscale: Tensor | None = None
    channel_scale: Tensor | None = None
    unassigned: Tensor | None = None  # came as alpha_or_gscale; no config has said yet which it is

    def __init__(
        self,
        dtype: QuantDType = None,
        shape: GroupShape | None = None,
        scale: Any = None,
        alpha_or_gscale: Tensor | None = None,
        zp: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        alpha: Tensor | None = None,
        gscale: Tensor | None = None,
        channel_scale: Tensor | None = None,
        unassigned: Tensor | None = None,
    ) -> None:
        owner = type(self).__name__
        if alpha_or_gscale is not None:
            one = alpha is None and gscale is None and unassigned is None
            require(one, owner, "alpha_or_gscale", "be absent where alpha or gscale is given", "both")
        dtype = canonical_dtype(dtype, owner, "dtype")
        values = {
            "dtype": dtype,
            "shape": _resolve_shape(dtype, shape, owner),
            "scale": scale,
            "zp": zp,
            "bias": bias,
            "alpha": alpha,
            "gscale": gscale,
            "channel_scale": channel_scale,
            "unassigned": unassigned if alpha_or_gscale is None else alpha_or_gscale,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_tensors(owner)

    def _check_tensors(self, owner: str) -> None:
        for name in ("zp", "bias", "alpha", "gscale", "channel_scale", "unassigned"):
            value = getattr(self, name)
            field = "alpha_or_gscale" if name == "unassigned" else name
            require_type(value is None or isinstance(value, Tensor), owner, field, "be a Tensor or None", value)
        ok = self.scale is None or isinstance(self.scale, Tensor) or is_precision_config(self.scale)
        require_type(ok, owner, "scale", "be a Tensor, a PrecisionConfig or None", self.scale)
        both = self.alpha is not None and self.gscale is not None
        require(not both, owner, "gscale", "be absent where alpha is given (weight or activation, not both)", "both")

    def __eq__(self, other: object) -> bool:
        """By value: tensors bit for bit, on one device. Reads tensors that are not the same object."""
        if not isinstance(other, FusedMoEQuantDesc):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)

    def __hash__(self) -> int:
        """Of what reading no tensor tells."""
        return hash((self.dtype, self.shape, *self.tensors()))

    def __repr__(self) -> str:
        """Only what is present; tensors by dtype and shape."""
        values = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        shown = (f"{name}={_summary(value)}" for name, value in values if value is not None)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def alpha_or_gscale(self) -> Tensor | None:
        """Whichever of `alpha`, `gscale` and `channel_scale` this descriptor has."""
        present = (t for t in (self.alpha, self.gscale, self.channel_scale, self.unassigned) if t is not None)
        return next(present, None)

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor, None without tensors."""
        return next((t.device for t in self.tensors().values()), None)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b or bool(a == b)
    return a is b or (a.device == b.device and a.device.type != "meta" and same_bits(a, b))


def _summary(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _resolve_shape(dtype: QuantDType, shape: GroupShape | None, owner: str) -> GroupShape | None:
    """The stated shape, or the block that the format fixes; ValueError where they disagree."""
    if shape is not None:
        require_type(isinstance(shape, tuple) and len(shape) == 2, owner, "shape", "be a GroupShape or None", shape)
        shape = GroupShape(*shape)
    # A shape without a format made `block_shape` say "blocked" about operands that are not quantized.
    require(dtype is not None or shape is None, owner, "shape", "be None where dtype is None", shape)
    block = fixed_block(dtype)
    if block is None:
        return shape
    require(shape is None or shape == block, owner, "shape", f"be {block} (or None) for {dtype}", shape)
    return GroupShape(*block)
