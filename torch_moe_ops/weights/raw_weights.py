"""RawWeights: the experts of one layer as a checkpoint means them."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.config import FusedMoEQuantConfig
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.same_bits import same_bits
from torch_moe_ops.core.schemes import FLOATS, ZERO_POINT_DTYPES, Scheme, get_scheme
from torch_moe_ops.files import serialization
from torch_moe_ops.files.errors import PATH_LENGTH, CheckpointError, short
from torch_moe_ops.weights.from_quant_config import fields_of_quant_config

FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class RawWeights:
    """Quantized (or plain) experts in checkpoint order.

    Args:
        scheme: name of the weight scheme, "none" for unquantized weights.
        w13: [num_experts, 2 * intermediate_size, K storage], rows [gate; up]; only the up rows
            (intermediate_size of them) where the activation is not gated.
        w2: [num_experts, hidden_size, K storage].
        w13_scale, w2_scale: scales in the linear layout, multiply; see schemes.Scales for what shares one:
            block, group [E, rows, K / size] (group: or [E, rows, 1]), tile (fp8_block)
            [E, tiles of rows, tiles of K], channel (fp8) [E, rows, 1], or per tensor [E, halves], [E, 1].
        w13_zero_point, w2_zero_point: int4 (uint8, 0..15) and int8 (int8), shaped like the scales; absent: 8 and 0.
        w13_scale_2: float32 [num_experts, 2] (gate, up), or [num_experts, 1]; multiplies.
        w2_scale_2: float32 [num_experts]; multiplies.
        a13_input_scale, a2_input_scale: float32 [] or [num_experts]: calibrated scale of the
            activations (amax / (6 * 448) for nvfp4), multiply to dequantize. None: none was calibrated.
        w13_bias, w2_bias: [num_experts, rows of w13], [num_experts, hidden_size], any float dtype.
        activation, swiglu_alpha, swiglu_beta, swiglu_limit: what the checkpoint's config says, or None.
        source: where it was read from, for messages.
        num_shared_experts: how many of the experts, the last ones, every token goes to beside those that its router
            chooses; see `with_shared_experts`.

    Raises:
        ValueError, TypeError: naming the field, what it must be and what came.
    """

    scheme: str
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_scale_2: Tensor | None = None
    w2_scale_2: Tensor | None = None
    a13_input_scale: Tensor | None = None
    a2_input_scale: Tensor | None = None
    w13_zero_point: Tensor | None = None
    w2_zero_point: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    activation: str | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    swiglu_limit: float | None = None
    source: str = ""
    num_shared_experts: int = 0

    def __post_init__(self) -> None:
        _validate(self)

    @staticmethod
    def from_quant_config(
        w13: Tensor,
        w2: Tensor,
        quant_config: FusedMoEQuantConfig,
        *,
        int4_codes: str = "offset",
        alphas: str | None = None,
        weight_scale_layout: str | None = None,
    ) -> RawWeights:
        """A config and the weights that it describes. Prepare them with `quant_config.act_format`.

        Args:
            w13: [num_experts, 2 * intermediate_size, K storage], rows [gate; up], or only up rows.
            w2: [num_experts, hidden_size, K storage]. How K is stored, by the config's `weight_quant_dtype`:
                None: bfloat16, float16 or float32. fp8, mxfp8: float8_e4m3fn, or its bytes as uint8.
                nvfp4, mxfp4: two codes a byte, low nibble = even k, uint8 or float4_e2m1fn_x2.
                mxfp6: one code a byte, or four codes in three bytes. int4: int32 of 8 codes or uint8 of 2, low nibble
                first. int8: int8, or codes with offset 128 as uint8 or int32 of 4.
            quant_config: its scales may be swizzled (nvfp4, MX). Tiles of an fp8 weight cover the halves of w13
                separately. Dynamic activation scales "per tensor" are one per token in these ops. `mx_alignment`
                needs nothing: a backend pads what it needs.
            int4_codes: "offset": codes 0..15, value code - 8 without zero points (uint4b8; compressed-tensors, GPTQ);
                "signed": -8..7 in two's complement (FlashInfer's mxint4, CUTLASS w4a8). Ignored for other weights.
            alphas: "products": `g*_alphas` are input scale * weight scale, as FlashInfer's and CUTLASS's kernels take
                them; "weights": weight scales alone, as an emulation takes them. Must be said where the config has
                alphas and static activation scales, unless its `w*_scale` decide (fp8).
            weight_scale_layout: how `w*_scale` of nvfp4 and MX weights lie: "linear", as in a checkpoint, or
                "swizzled". Must be said, here or as the config's `scale_layout`, where a shape fits both. The config's
                `is_nvfp4_scale_swizzled` is about scales of activations.

        Raises:
            ValueError, TypeError: naming the config's field: no weight scales, tensors that do not fit the weights,
                products that contradict their factors, alphas or a layout that must be said.
        """
        said = {"alphas": alphas, "weight_scale_layout": weight_scale_layout}
        return RawWeights(**fields_of_quant_config(w13, w2, quant_config, int4_codes=int4_codes, **said))

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2.shape[1]

    @property
    def intermediate_size(self) -> int:
        return get_scheme(self.scheme).logical_k(self.w2.shape[2])

    @property
    def is_gated(self) -> bool:
        """True where w13 holds gate and up rows."""
        return self.w13.shape[1] == 2 * self.intermediate_size

    @property
    def device(self) -> torch.device:
        return self.w13.device

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> RawWeights:
        """The same weights with every tensor on `device`."""
        target = torch.device(device)  # not a dtype: codes must stay what they are
        moved: dict[str, Any] = {name: t.to(target) for name, t in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file; `RawWeights.load` reads it back."""
        names = [f.name for f in dataclasses.fields(self)]
        plain = {name: getattr(self, name) for name in names if not isinstance(getattr(self, name), Tensor)}
        serialization.write(path, self.tensors(), plain, FORMAT_VERSION)

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> RawWeights:
        """Read what `save` wrote; CheckpointError, a ValueError, names the path and what is wrong."""
        fields = serialization.read(path, device, RawWeights, FORMAT_VERSION)
        try:
            return RawWeights(**fields)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error

    def equal(self, other: RawWeights) -> bool:
        """Bit for bit the same tensors and the same plain values."""
        mine, theirs = self.tensors(), other.tensors()
        plain = [f.name for f in dataclasses.fields(self) if f.name not in mine and f.name not in theirs]
        return (
            mine.keys() == theirs.keys()
            and all(same_bits(mine[name], theirs[name]) for name in mine)
            and all(getattr(self, name) == getattr(other, name) for name in plain)
        )


def _require(condition: bool, raw: RawWeights, field: str, requirement: str, got: Any) -> None:
    if not condition:
        got = tuple(got) if isinstance(got, torch.Size) else got
        where = f" ({short(raw.source, PATH_LENGTH)})" if raw.source else ""  # a saved file may say anything
        raise ValueError(f"RawWeights: {field} must {requirement}, got {got}{where}")


def _validate(raw: RawWeights) -> None:
    scheme = get_scheme(raw.scheme)
    for name in ("w13", "w2"):
        tensor = getattr(raw, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"RawWeights: {name} must be a Tensor, got {type(tensor).__name__}")
        _require(tensor.ndim == 3, raw, name, "have 3 dimensions [num_experts, rows, K]", tensor.shape)
        dtypes = [str(d) for d in scheme.weight_dtypes]
        _require(tensor.dtype in scheme.weight_dtypes, raw, name, f"have a dtype of {dtypes}", tensor.dtype)
    for field in dataclasses.fields(raw):
        value = getattr(raw, field.name)
        if "Tensor" in str(field.type) and not (value is None or isinstance(value, Tensor)):
            raise TypeError(f"RawWeights: {field.name} must be a Tensor or None, got {type(value).__name__}")
    for name, tensor in raw.tensors().items():
        _require(tensor.device == raw.device, raw, name, f"be on {raw.device} like w13", tensor.device)
    _validate_sizes(raw, scheme)
    _validate_scales(raw, scheme)
    _validate_inputs_and_biases(raw)
    if raw.activation is not None:
        known = raw.activation in ACTIVATIONS
        _require(known, raw, "activation", f"be None or one of {sorted(ACTIVATIONS)}", raw.activation)
        gated = ACTIVATIONS[raw.activation].is_gated
        rows = "2 * intermediate_size rows in w13" if gated else "intermediate_size rows in w13"
        _require(gated == raw.is_gated, raw, "activation", f"fit w13 ({raw.activation} needs {rows})", raw.w13.shape)
    for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit"):
        value = getattr(raw, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"RawWeights: {name} must be None or a number, got {type(value).__name__}")
        fits = value is None or abs(value) <= sys.float_info.max or abs(value) == math.inf
        _require(fits, raw, name, "be None or a number that float64 has", value)
    _require(raw.swiglu_limit is None or raw.swiglu_limit > 0, raw, "swiglu_limit", "be positive", raw.swiglu_limit)
    _validate_values(raw)


def _validate_values(raw: RawWeights) -> None:
    """The few values that spoil a whole layer: factors of matrices and of activations, and int4 zero points."""
    if raw.w13.device.type == "meta" or isinstance(raw.w13, torch._subclasses.FakeTensor):
        return
    for name in ("w13_scale_2", "w2_scale_2", "a13_input_scale", "a2_input_scale"):
        tensor = getattr(raw, name)
        if tensor is None:
            continue
        bad = ~(tensor.isfinite() & (tensor > 0))
        if bad.any():
            where = bad.nonzero()[0].tolist()
            _require(False, raw, name, "be finite and positive", f"{tensor[tuple(where)].item()} at {where}")
    for name in ("w13_zero_point", "w2_zero_point"):
        tensor = getattr(raw, name)
        if raw.scheme == "int4" and tensor is not None and tensor.numel():
            largest = int(tensor.max())
            _require(largest <= 15, raw, name, "be at most 15", largest)


def _validate_sizes(raw: RawWeights, scheme: Scheme) -> None:
    experts = raw.w13.shape[0]
    _require(experts >= 1, raw, "w13", "hold at least one expert", raw.w13.shape)
    _require(raw.w2.shape[0] == experts, raw, "w2", f"hold {experts} experts like w13", raw.w2.shape)
    shared = raw.num_shared_experts
    is_count = isinstance(shared, int) and not isinstance(shared, bool) and 0 <= shared < experts
    _require(is_count, raw, "num_shared_experts", f"be in 0 ... {experts - 1}, fewer than the experts", shared)
    _require(raw.w2.dtype == raw.w13.dtype, raw, "w2", f"have dtype {raw.w13.dtype} like w13", raw.w2.dtype)
    hidden, inter = raw.hidden_size, raw.intermediate_size
    k13 = scheme.logical_k(raw.w13.shape[2])
    _require(k13 == hidden, raw, "w13", f"have K = hidden_size = {hidden} (rows of w2)", k13)
    for name, size in (("hidden_size", hidden), ("intermediate_size", inter)):
        ok = size > 0 and size % scheme.size_multiple == 0
        _require(ok, raw, name, f"be a positive multiple of {scheme.size_multiple} for {scheme.name}", size)
    rows = raw.w13.shape[1]
    requirement = f"have 2 * intermediate_size = {2 * inter} rows, or {inter} where not gated"
    _require(rows in (inter, 2 * inter), raw, "w13", requirement, rows)


def _validate_scales(raw: RawWeights, scheme: Scheme) -> None:
    experts, rows = raw.num_experts, raw.w13.shape[1]
    halves = 2 if raw.is_gated else 1
    sizes = (("w13", rows, raw.hidden_size, halves), ("w2", raw.hidden_size, raw.intermediate_size, 1))
    for name, n, k, parts in sizes:
        scale, zero_point = getattr(raw, f"{name}_scale"), getattr(raw, f"{name}_zero_point")
        if scheme.scales is None:
            _require(scale is None, raw, f"{name}_scale", f"be absent for scheme {scheme.name}", "a Tensor")
        else:
            shapes = tuple((experts, *shape) for shape in scheme.scales.shapes(n, k, parts))
            _check_tensor(raw, f"{name}_scale", shapes, scheme.scales.dtypes)
        if not scheme.has_zero_point:
            _require(zero_point is None, raw, f"{name}_zero_point", f"be absent for scheme {scheme.name}", "a Tensor")
        elif zero_point is not None:
            shape = tuple(getattr(raw, f"{name}_scale").shape)
            _check_tensor(raw, f"{name}_zero_point", (shape,), (ZERO_POINT_DTYPES[scheme.name],))
    for name, shapes in (("w13_scale_2", ((experts, halves), (experts, 1))), ("w2_scale_2", ((experts,),))):
        if scheme.has_scale_2:
            _check_tensor(raw, name, shapes, (torch.float32,))
        else:
            _require(getattr(raw, name) is None, raw, name, f"be absent for scheme {scheme.name}", "a Tensor")


def _check_tensor(
    raw: RawWeights, name: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """A field that must be there, with one of the shapes and dtypes."""
    tensor = getattr(raw, name)
    shape_text = " or ".join(dict.fromkeys(str(s) for s in shapes))
    dtype_text = " or ".join(str(d) for d in dtypes)
    _require(tensor is not None, raw, name, f"be a {dtype_text} Tensor of shape {shape_text}", None)
    _require(tuple(tensor.shape) in shapes, raw, name, f"have shape {shape_text}", tensor.shape)
    _require(tensor.dtype in dtypes, raw, name, f"have dtype {dtype_text}", tensor.dtype)


def _validate_inputs_and_biases(raw: RawWeights) -> None:
    experts = raw.num_experts
    for name in ("a13_input_scale", "a2_input_scale"):
        tensor = getattr(raw, name)
        if tensor is None:
            continue
        ok = tensor.shape in ((), (experts,))
        _require(ok, raw, name, f"have shape () or ({experts},)", tensor.shape)
        _require(tensor.dtype == torch.float32, raw, name, "have dtype torch.float32", tensor.dtype)
    for name, shape in (("w13_bias", (experts, raw.w13.shape[1])), ("w2_bias", (experts, raw.hidden_size))):
        tensor = getattr(raw, name)
        if tensor is None:
            continue
        _require(tensor.shape == shape, raw, name, f"have shape {shape}", tensor.shape)
        # Kernels add float32: a float64 bias would be rounded, and restored as another.
        _require(tensor.dtype in FLOATS, raw, name, f"have one of the dtypes {[str(d) for d in FLOATS]}", tensor.dtype)


# Exported programs name the type so, wherever it is defined.
torch.export.register_dataclass(RawWeights, serialized_type_name="torch_moe_ops.raw_weights.RawWeights")
