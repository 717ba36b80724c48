"""The loading of quantized linears outside the experts: dequantized once, in transformers' weight conversions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, build_glob_alternation

from torch_moe_ops.checkpoints.index import CheckpointIndex
from torch_moe_ops.files.errors import CheckpointError
from torch_moe_ops.transformers.linears import CODES, dequantize_linear, is_plain, stored_dtype


class DequantizeLinear(ConversionOps):
    """First step of loading a weight: dequantize it where the checkpoint stores codes."""

    def __init__(self, hf_quantizer: Any, index: CheckpointIndex, dtype: torch.dtype, original: Any = None) -> None:
        self.original = original  # the conversion that this one begins, None where the model has none for the weight
        self.hf_quantizer = hf_quantizer  # transformers casts no input of an operation that has one
        self.index = index
        self.dtype = dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> DequantizeLinear:
        return self  # transformers copies a converter for each weight; the index has every name of the checkpoint

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        full_layer_name: str | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """{source pattern: tensors} -> {weight pattern: weights in the dtype of the parameter}."""
        name = full_layer_name or "weight"
        dtype = parameter_dtype(model, name, self.dtype)
        module = name.removesuffix(".weight")
        converted: dict[str, Any] = {}
        for prefix, parts in _by_prefix(input_dict).items():
            # transformers looks for the key in the parameter's name: the full name says it exactly.
            key = f"{prefix}weight" if prefix != _ANY else name
            converted[key] = [self._weight(module, tensors).to(dtype) for tensors in _one_by_one(module, parts)]
        return converted

    def _weight(self, module: str, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["weight"] if is_plain(tensors) else dequantize_linear(module, _as_stored(tensors), self.index)

    def beginning(self, original: Any) -> DequantizeLinear:
        """The same operation as the first step of another conversion."""
        return DequantizeLinear(self.hf_quantizer, self.index, self.dtype, original)

    @property
    def reverse_op(self) -> ConversionOps:
        raise ValueError("a dequantized linear cannot be saved in its quantized form")


def _as_stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes of FP8 as the file has them: transformers before 5.21 hands them over in the model's dtype."""
    weight = tensors.get("weight")
    if weight is None or stored_dtype(weight.dtype):
        return tensors
    codes = weight.to(torch.float8_e4m3fn)
    return {**tensors, "weight": codes} if torch.equal(codes.to(weight.dtype), weight) else tensors


_ANY = r"\."


def weight_conversions(conversions: list[Any], parts: set[str], operation: DequantizeLinear) -> list[Any]:
    """A model's conversions, those of weights begun by `operation`, and one for every weight that they leave out.

    Args:
        parts: names under which the checkpoint stores weights and what belongs to them, such as "weight_scale".
    """
    # Where patterns are matched without their ends, the longer one has to come first.
    ordered = sorted(parts | {"weight"}, key=lambda part: (-len(part), part))
    begun = [_begun(conversion, ordered, operation) for conversion in conversions]
    return [*begun, WeightConverter([f"{_ANY}{part}$" for part in ordered], ".weight", [operation])]


def _begun(conversion: Any, parts: list[str], operation: DequantizeLinear) -> Any:
    if not isinstance(conversion, WeightConverter):
        return conversion
    sources = conversion._original_source_patterns
    if not all(source.endswith(".weight") for source in sources):
        return conversion
    stored = [source.removesuffix("weight") + part for source in sources for part in parts]
    operations = [operation.beginning(conversion), *conversion.operations]
    result = WeightConverter(stored, list(conversion._original_target_patterns), operations)
    for name in ("scope_prefix", "base_model_prefix", "force_cpu"):
        setattr(result, name, getattr(conversion, name))
    return result


def own_conversions(loaded: list[Any]) -> list[Any] | None:
    """Of the conversions that loaded a model, its own: without what a quantizer made of them.

    They say what transformers' own files call what the model has. None where another quantizer took part.
    """
    own = []
    for conversion in loaded:
        steps = getattr(conversion, "operations", [])
        if steps and isinstance(steps[0], DequantizeLinear):
            conversion = steps[0].original
        elif any(hasattr(step, "hf_quantizer") for step in steps):
            return None
        if conversion is not None:
            own.append(conversion)
    return own


def _by_prefix(input_dict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{pattern: tensors} -> {pattern up to the part: {part: tensors}}."""
    found: dict[str, dict[str, Any]] = {}
    for pattern, tensors in input_dict.items():
        dot = pattern.rindex(".") + 1
        found.setdefault(pattern[:dot], {})[pattern[dot:].removesuffix("$")] = tensors
    return found


def _one_by_one(name: str, parts: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The tensors of each weight; several where a conversion joins weights."""
    codes = [part for part in ("weight", *CODES) if part in parts]
    if not codes:
        raise CheckpointError(f"{name}: no weight among {sorted(parts)}")
    count = len(parts[codes[0]])
    lengths = {part: len(tensors) for part, tensors in parts.items()}
    if set(lengths.values()) != {count}:
        raise CheckpointError(f"{name}: weights that are joined must be stored alike, got {lengths} of their parts")
    return [{part: tensors[i] for part, tensors in parts.items()} for i in range(count)]


def parameter_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that transformers would cast to: what the model keeps in float32, else its parameter's."""
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, globs, _ = build_glob_alternation(list(plan))
        match = pattern.search(name)
        if match is not None and match.lastgroup is not None:
            return plan[globs[match.lastgroup]]
    try:
        return model.get_parameter_or_buffer(name).dtype
    except AttributeError:
        return dtype
