"""Quantized linears outside the experts: what a checkpoint stores of them, and what that means.

Read by the same formats as experts are. Activations of these linears stay unquantized: their input scales are unused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torch_moe_ops.checkpoints.detect import FORMATS, detect
from torch_moe_ops.checkpoints.fields import INPUT_PARTS, Format
from torch_moe_ops.checkpoints.index import CheckpointIndex
from torch_moe_ops.checkpoints.linear import Linear
from torch_moe_ops.checkpoints.naming import PART_ALIASES, SKIPPED
from torch_moe_ops.core.schemes import FLOATS
from torch_moe_ops.files.errors import CheckpointError
from torch_moe_ops.files.header import TORCH_DTYPES, TensorEntry
from torch_moe_ops.files.tensor_reader import TensorReader
from torch_moe_ops.weights.quantize_experts import dequantize_matrix

FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# What is stored instead of `weight`, or beside it where it holds codes.
CODES = ("weight_packed", "qweight")
_UNUSED = INPUT_PARTS | {"input_zero_point"}
_PARTS = frozenset().union(*(form.required | form.optional for form in FORMATS)) - {"bias"}
# Every part that makes a weight, by the name that a file gives it.
PARTS = tuple(sorted(_PARTS | PART_ALIASES.keys() - {"blocks"}))


class OutsideLinear(Linear):
    """A linear that belongs to no expert."""

    @property
    def where(self) -> str:
        return "outside the experts"


class LoadedTensors(TensorReader):
    """Tensors that are in memory, as a reader of files would give them."""

    def __init__(self, tensors: Mapping[str, Tensor], index: CheckpointIndex) -> None:
        entries = {
            name: TensorEntry(index.path, FILE_DTYPES[t.dtype], tuple(t.shape), 0, 0) for name, t in tensors.items()
        }
        super().__init__(dataclasses.replace(index, entries=entries, digests={}))
        self._tensors = tensors

    def read(self, name: str, row: int | None = None) -> Tensor:
        return self._tensors[name] if row is None else self._tensors[name][row]


def quantized_linears(index: CheckpointIndex) -> dict[str, dict[str, str]]:
    """Module -> part -> tensor name, of every module outside the experts that stores a quantized weight."""
    modules: dict[str, dict[str, str]] = {}
    experts = {name for layer in index.layers for name in layer.tensor_names()}
    for name in (name for name in index.entries if name not in experts):
        module, _, part = name.rpartition(".")
        if not part.endswith(SKIPPED) and "experts" not in module.split("."):
            modules.setdefault(module, {})[PART_ALIASES.get(part, part)] = name
    return {module: parts for module, parts in modules.items() if _is_quantized(parts, index)}


def _is_quantized(parts: Mapping[str, str], index: CheckpointIndex) -> bool:
    if any(part in parts for part in (*CODES, "weight_scale", "weight_scale_inv")):
        return True
    return "weight" in parts and TORCH_DTYPES.get(index.entries[parts["weight"]].dtype) not in FLOATS


def check_linears(index: CheckpointIndex) -> dict[str, dict[str, str]]:
    """`quantized_linears`; CheckpointError for the first that could not be dequantized."""
    found = quantized_linears(index)
    reader = TensorReader(index)
    for module, parts in found.items():
        linear = OutsideLinear(reader, parts, module, 0)
        form = detect(linear, index.model, f"{index.path} {module}")
        unused = sorted(parts.keys() - form.required - form.optional - _UNUSED)
        if unused:
            name = parts[unused[0]]
            raise CheckpointError(
                f"{index.path}: tensor {name}: nothing here applies a {unused[0]} to a dequantized linear"
            )
        missing = sorted(form.required - parts.keys())
        if missing:
            linear.entry(missing[0])
    return found


def dequantize_linear(name: str, tensors: Mapping[str, Tensor], index: CheckpointIndex) -> Tensor:
    """What a linear's tensors mean: float32 [rows, K].

    Args:
        name: of its module, for messages.
        tensors: part -> tensor, on any device.
        index: the checkpoint, whose config says what tensors cannot.

    Raises: CheckpointError where no format has such tensors, or their values spoil the weight.
    """
    device = next(iter(tensors.values())).device
    parts = {PART_ALIASES.get(part, part): t.cpu() for part, t in tensors.items()}
    linear = _linear(name, {part: t for part, t in parts.items() if part not in _UNUSED}, index)
    form: Format = detect(linear, index.model, f"{index.path} {name}")
    missing = sorted(form.required - linear.names.keys())
    if missing:
        linear.entry(missing[0])
    unused = sorted(linear.names.keys() - form.required - form.optional)
    if unused:
        raise CheckpointError(f"{index.path} {name}: format {form.name} does not use {unused[0]}")
    fields = form.read(linear, index.model)
    scale, zero_point, scale_2 = (fields.get(key) for key in ("scale", "zero_point", "scale_2"))
    return dequantize_matrix(form.scheme_of(linear), fields["weight"], scale, zero_point, scale_2).to(device)


def _linear(name: str, parts: Mapping[str, Tensor], index: CheckpointIndex) -> OutsideLinear:
    tensors = {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return OutsideLinear(LoadedTensors(tensors, index), {part: f"{name}.{part}" for part in parts}, name, 0)


def is_plain(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a weight is stored as it is."""
    return tensors.keys() <= {"weight", *_UNUSED} and tensors["weight"].dtype in FLOATS


def stored_dtype(dtype: torch.dtype) -> bool:
    """Whether a parameter of this dtype holds codes."""
    return dtype not in FLOATS


def check_linears_loaded(model: nn.Module, index: CheckpointIndex) -> None:
    """ValueError where a linear that the checkpoint quantizes is another one in the model, such as a random one.

    One layer of each kind is compared: what transformers cannot load it leaves out in all of them. Parameters that
    hold codes themselves, or have other names than in the checkpoint, are not.
    """
    parameters, seen = dict(model.named_parameters()), set()
    with TensorReader(index) as reader:
        for module, parts in quantized_linears(index).items():
            parameter, kind = parameters.get(f"{module}.weight"), re.sub(r"\d+", "*", module)
            if parameter is None or stored_dtype(parameter.dtype) or parameter.is_meta or kind in seen:
                continue
            seen.add(kind)
            wanted = dequantize_linear(module, {part: reader.read(name) for part, name in parts.items()}, index)
            got = parameter.detach().float().cpu()
            # Another dequantizer may round to bfloat16 on its way; anything else is off by about 1.
            if got.shape != wanted.shape or (got - wanted).norm() > 0.1 * wanted.norm():
                raise ValueError(
                    f"attach_experts: {module}.weight must be what {index.path} holds (quantized there), got another "
                    "weight: load the model by from_pretrained after torch_moe_ops.transformers.register(), or give "
                    "check_linears=False"
                )
