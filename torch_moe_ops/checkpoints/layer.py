"""The linears of one layer: which experts and projections there are, how they are stored, what is missing."""

from __future__ import annotations

from torch_moe_ops.checkpoints.detect import detect
from torch_moe_ops.checkpoints.fields import INPUT_PARTS, Fields
from torch_moe_ops.checkpoints.index import CheckpointIndex
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.model_config import ModelConfig
from torch_moe_ops.checkpoints.naming import ExpertLayer
from torch_moe_ops.checkpoints.stacked import TRANSPOSED, with_experts_dimension
from torch_moe_ops.files.errors import CheckpointError, short
from torch_moe_ops.files.limits import MAX_EXPERTS
from torch_moe_ops.files.tensor_reader import TensorReader

_UNSUPPORTED = {
    "pre_quant_scale": "it scales activations per input channel, which no op of the library does",
    "svdquant_lora_a": "low-rank corrections are not supported",
    "svdquant_lora_b": "low-rank corrections are not supported",
}


class LayerSource:
    """One layer of an open checkpoint.

    Args:
        reader: open files.
        names: the layer's tensors.
        input_scales: False leaves calibrated activation scales unread.
        config: instead of what the checkpoint's config files say.

    Raises:
        CheckpointError: naming the first expert, projection or tensor that is missing, or that nothing uses.
    """

    def __init__(
        self,
        reader: TensorReader[CheckpointIndex],
        names: ExpertLayer,
        input_scales: bool = True,
        config: ModelConfig | None = None,
    ) -> None:
        self.names = names
        self.config = config or reader.index.model
        self.where = f"{reader.index.path} layer {names.number}"
        if names.unknown:
            raise CheckpointError(f"{self.where}: unused tensor {names.unknown[0]}{_more(names.unknown)}")
        if names.is_fused and len(names.experts) > 1:
            raise CheckpointError(f"{self.where}: experts are stored one by one and fused at once, under {names.root}")
        self.reader = with_experts_dimension(reader, names, self.config.num_experts) if names.is_stacked else reader
        self.projections = self._find_projections()
        self.format = detect(self._fullest(), self.config, self.where)
        self._skip = INPUT_PARTS if not input_scales else frozenset()
        self._check_parts()
        self.num_experts = self._count_experts()
        self._check_sizes()
        self._transposed = self._transposed_projections() if names.is_fused else frozenset()

    @property
    def is_gated(self) -> bool:
        return "up" not in self.projections or "gate" in self.projections

    @property
    def is_gpt_oss(self) -> bool:
        """gpt-oss interleaves gate and up rows. Without a config its biases give it away: no other model fuses them."""
        if self.format.interleaved or self.config.model_type is not None:
            return self.format.interleaved or self.config.is_gpt_oss
        return self.names.is_fused and "bias" in self.names.experts[None].get("gate_up", {})

    @property
    def scheme(self) -> str:
        return self.format.scheme_of(self._fullest())

    def linear(self, expert: int, projection: str) -> Linear:
        """One projection of one expert."""
        fused = self.names.is_fused
        parts = self.names.experts[None if fused else expert][projection]
        if self._skip:
            parts = {part: name for part, name in parts.items() if part not in self._skip}
        transposed = projection in self._transposed
        return Linear(self.reader, parts, projection, expert, self.num_experts if fused else 0, transposed)

    def read(self, expert: int, projection: str) -> list[tuple[Linear, Fields]]:
        """Fields of a projection; of gate and up where the file holds them as one."""
        linear = self.linear(expert, projection)
        fields = self.format.read(linear, self.config)
        if projection != "gate_up":
            return [(linear, fields)]
        interleaved = self.names.is_fused and self.is_gpt_oss
        return [(linear, half) for half in split_gate_up(linear, fields, interleaved)]

    def _find_projections(self) -> tuple[str, ...]:
        found = {projection for parts in self.names.experts.values() for projection in parts}
        wanted = ("gate_up",) if "gate_up" in found else ("gate", "up") if "gate" in found else ("up",)
        projections = (*wanted, "down")
        extra = sorted(found - set(projections))
        if extra:
            raise CheckpointError(f"{self.where}: holds {extra} as well as {list(projections)} under {self.names.root}")
        for expert, parts in self.names.experts.items():
            for projection in projections:
                if projection not in parts:
                    which = "all experts" if expert is None else f"expert {expert}"
                    raise CheckpointError(f"{self.where}: {which}: {projection} is missing under {self.names.root}")
        return projections

    def _fullest(self) -> Linear:
        """The projection with the most parts, as the file stores it."""
        expert, projection, parts = max(
            ((e, p, parts) for e, ps in self.names.experts.items() for p, parts in ps.items()),
            key=lambda item: len(item[2]),
        )
        fused_experts = 0
        if expert is None:
            shapes = [self.reader.index.entries[name].shape for name in parts.values()]
            fused_experts = next((shape[0] for shape in shapes if len(shape) >= 3), 0)
        return Linear(self.reader, parts, projection, expert or 0, fused_experts)

    def _check_parts(self) -> None:
        """Every projection has what the layer's format needs, and nothing that would go unused."""
        known = self.format.required | self.format.optional
        expected = {projection: set(self.format.required) for projection in self.projections}
        for projections in self.names.experts.values():
            for projection, linear in projections.items():
                # What one expert has all must have: a lost bias would stay uninitialised. A lost input scale
                # must not pass for a weight-only file either, hence those count for every projection.
                expected[projection].update(linear.keys() & known - self._skip)
                for parts in expected.values():
                    parts.update(linear.keys() & INPUT_PARTS & known - self._skip)
        for expert, projections in self.names.experts.items():
            for projection, linear in projections.items():
                unused = sorted(linear.keys() - known)
                if unused:
                    reason = _UNSUPPORTED.get(unused[0], f"format {self.format.name} does not use it")
                    raise CheckpointError(f"{self.where}: unused tensor {linear[unused[0]]}: {reason}")
                missing = sorted(expected[projection] - linear.keys())
                if missing:
                    Linear(self.reader, linear, projection, expert or 0).entry(missing[0])

    def _count_experts(self) -> int:
        if self.names.is_fused:
            count = self._fullest_weight_rows()
        else:
            numbers = [expert for expert in self.names.experts if expert is not None]
            count = max(numbers) + 1
            if count > len(numbers):
                first = next(number for number in range(count) if number not in self.names.experts)
                raise CheckpointError(f"{self.where}: expert {first} is missing under {self.names.root}")
        said = self.config.num_experts
        if said and said != count:
            text = (
                f"{self.where}: expert {short(count)} is missing" if count < said else f"{self.where}: too many experts"
            )
            raise CheckpointError(
                f"{text} under {self.names.root}: config.json says {short(said)}, the files hold {short(count)}"
            )
        if count > MAX_EXPERTS:
            raise CheckpointError(f"{self.where}: must have at most {MAX_EXPERTS} experts, got {short(count)}")
        return count

    def _check_sizes(self) -> None:
        """No expert's codes are empty or of another size than expert 0's.

        Known from headers alone, and before anything is allocated: memory for all experts, and the time to go
        through them, are then in proportion to what the files hold.
        """
        for projection in self.projections:
            wanted = self._stored_shape(0, projection)
            for expert in [0] if self.names.is_fused else range(self.num_experts):
                shape = self._stored_shape(expert, projection)
                if shape != wanted or 0 in shape:
                    linear = self._stored(expert, projection)
                    what = f"shape {wanted} like that of expert 0" if shape != wanted else "elements"
                    raise linear.fail(linear.weight_part, f"have {what}", shape)

    def _fullest_weight_rows(self) -> int:
        linear = self._fullest()
        shape = linear.entry(linear.weight_part).shape
        if len(shape) < 3 or 0 in shape:
            raise linear.fail(linear.weight_part, "have dimensions [experts, rows, columns]", shape)
        return shape[0]

    def _transposed_projections(self) -> frozenset[str]:
        if self.names.is_stacked:
            return TRANSPOSED
        return frozenset(self.projections) if self._is_transposed() else frozenset()

    def _is_transposed(self) -> bool:
        """Whether fused matrices are [K, rows]: only one of the two readings fits both projections."""
        up, down = self._stored_shape(0, self.projections[0]), self._stored_shape(0, "down")
        if len(up) != 2 or len(down) != 2:
            return False  # blocks of gpt-oss, or a shape that the format's reader refuses
        pack, halves = self.format.pack, 2 if "gate_up" in self.projections else 1
        if up[1] * pack == down[0] and up[0] == halves * pack * down[1]:
            return False
        if up[0] * pack == down[1] and up[1] == halves * pack * down[0]:
            return True
        raise CheckpointError(
            f"{self.where}: shapes of {self.projections[0]} {up} and down {down} do not fit each other "
            f"under {self.names.root}"
        )

    def _stored(self, expert: int, projection: str) -> Linear:
        """One projection of one expert as the file has it."""
        fused = self.names.is_fused
        parts = self.names.experts[None if fused else expert][projection]
        return Linear(self.reader, parts, projection, expert, self.num_experts if fused else 0)

    def _stored_shape(self, expert: int, projection: str) -> tuple[int, ...]:
        linear = self._stored(expert, projection)
        return linear.shape(linear.weight_part)


def split_gate_up(linear: Linear, fields: Fields, interleaved: bool) -> list[Fields]:
    """Gate and up of a fused projection, as views. What has one entry for all rows serves both."""
    rows = fields["weight"].shape[0]
    if rows % 2:
        raise linear.fail(linear.weight_part, "have an even number of gate and up rows", rows)
    gate: Fields = {}
    up: Fields = {}
    for key, value in fields.items():
        if value.ndim == 0 or value.shape[0] == 1:
            gate[key] = up[key] = value
        elif interleaved:
            if value.shape[0] != rows:
                requirement = (
                    f"have gate rows first: tiles of scales cannot be split where gate and up alternate ({key})"
                )
                raise linear.fail(linear.weight_part, requirement, "alternating rows")
            gate[key], up[key] = value[0::2], value[1::2]
        else:
            gate[key], up[key] = value.chunk(2)
    return [gate, up]


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
