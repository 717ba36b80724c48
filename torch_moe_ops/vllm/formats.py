"""The formats of experts that the plug-in reads: which tensors vLLM loads, and what they mean as RawWeights.

Names of the tensors are those of vLLM's own methods, because its weight loader finds them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_moe_ops.numerics.int4_files import unpack_zero_point_rows
from torch_moe_ops.vllm.parameters import LayerSizes, Parameter, loaded
from torch_moe_ops.weights.raw_weights import RawWeights

Parameters = dict[str, Parameter]
Tensors = Mapping[str, Tensor]
Fields = dict[str, Tensor | None]
_BYTE, _E4M3, _F32 = torch.uint8, torch.float8_e4m3fn, torch.float32


@dataclass(frozen=True)
class ExpertFormat:
    """One way to store experts.

    Args:
        name: for messages.
        scheme: of RawWeights.
        act_format: how the checkpoint's activations are quantized; "none" where they are not.
        parameters: what the loader fills.
        fields: the loaded tensors -> fields of RawWeights.
        loader: "modelopt" where vLLM's loader has rules of its own for a method (it looks at its class name), else "".
        scale_2: the checkpoint has a "weight_scale_2" for each matrix (of the ModelOpt loader's rules).
        interleaved: rows of w13 are gate 0, up 0, gate 1, up 1, ...
    """

    name: str
    scheme: str
    act_format: str
    parameters: Callable[[LayerSizes], Parameters]
    fields: Callable[[Tensors], Fields]
    loader: str = ""
    scale_2: bool = False
    interleaved: bool = False

    def raw(self, tensors: Tensors, act_format: str, source: str) -> RawWeights:
        """RawWeights of loaded tensors, or of meta tensors.

        act_format: what activations will be; calibrated input scales are dropped where it has no use for them.
        Raises ValueError where the tensors do not fit each other, or hold what no layer can have.
        """
        fields = self.fields(tensors)
        if act_format == "none":
            fields = {name: value for name, value in fields.items() if not name.endswith("_input_scale")}
        for name in ("w13_bias", "w2_bias"):
            fields[name] = tensors.get(name)
        if self.interleaved:
            names = [name for name, value in fields.items() if name.startswith("w13") and value is not None]
            fields |= {name: deinterleave(fields[name]) for name in names}  # type: ignore[arg-type]
        return RawWeights(scheme=self.scheme, source=source, **fields)  # type: ignore[arg-type]


def deinterleave(rows: Tensor) -> Tensor:
    """[E, 2 * I, ...], rows g0, u0, g1, ... -> g0, g1, ..., u0, u1, ..."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _biases(s: LayerSizes) -> Parameters:
    shapes = {f"{name}_bias": (s.experts, rows) for name, rows, _, _ in s.matrices()} if s.has_bias else {}
    return {name: Parameter(shape, s.dtype) for name, shape in shapes.items()}


def nvfp4_modelopt(act_format: str) -> ExpertFormat:
    """ModelOpt: global scales multiply."""

    def parameters(s: LayerSizes) -> Parameters:
        found = _biases(s)
        for name, rows, k, per_half in s.matrices():
            found[f"{name}_weight"] = Parameter((s.experts, rows, k // 2), _BYTE)
            found[f"{name}_weight_scale"] = Parameter((s.experts, rows, k // 16), _E4M3, "block", dummy=1.0)
            found[f"{name}_weight_scale_2"] = Parameter(per_half, _F32, "tensor", dummy=1e-3)
            found[f"{name}_input_scale"] = Parameter(per_half, _F32, "tensor", optional=True, dummy=1e-2)
        return found

    def fields(t: Tensors) -> Fields:
        return {
            **_codes(t, "weight"),
            "w13_scale_2": t["w13_weight_scale_2"],
            "w2_scale_2": t["w2_weight_scale_2"],
            "a13_input_scale": _of_expert(t["w13_input_scale"]),
            "a2_input_scale": _of_expert(t["w2_input_scale"]),
        }

    name = "ModelOpt NVFP4" if act_format != "none" else "ModelOpt W4A16_NVFP4"
    return ExpertFormat(name, "nvfp4", act_format, parameters, fields, loader="modelopt", scale_2=True)


def nvfp4_compressed_tensors(act_format: str) -> ExpertFormat:
    """compressed-tensors: global scales divide."""

    def parameters(s: LayerSizes) -> Parameters:
        found = _biases(s)
        for name, rows, k, per_half in s.matrices():
            found[f"{name}_weight_packed"] = Parameter((s.experts, rows, k // 2), _BYTE)
            found[f"{name}_weight_scale"] = Parameter((s.experts, rows, k // 16), _E4M3, "group", dummy=1.0)
            found[f"{name}_weight_global_scale"] = Parameter(per_half, _F32, "tensor", dummy=1e3)
            found[f"{name}_input_global_scale"] = Parameter(per_half, _F32, "tensor", optional=True, dummy=1e2)
        return found

    def fields(t: Tensors) -> Fields:
        return {
            **_codes(t, "weight_packed"),
            "w13_scale_2": t["w13_weight_global_scale"].reciprocal(),
            "w2_scale_2": t["w2_weight_global_scale"].reciprocal(),
            "a13_input_scale": _of_expert(t["w13_input_global_scale"].reciprocal()),
            "a2_input_scale": _of_expert(t["w2_input_global_scale"].reciprocal()),
        }

    return ExpertFormat("compressed-tensors NVFP4", "nvfp4", act_format, parameters, fields)


def mxfp4(name: str, weight: str = "weight", act_format: str = "none", interleaved: bool = False) -> ExpertFormat:
    """weight: what vLLM calls the codes."""

    def parameters(s: LayerSizes) -> Parameters:
        found = _biases(s)
        for matrix, rows, k, _ in s.matrices():
            found[f"{matrix}_{weight}"] = Parameter((s.experts, rows, k // 2), _BYTE)
            found[f"{matrix}_weight_scale"] = Parameter((s.experts, rows, k // 32), _BYTE, "block")
        return found

    return ExpertFormat(name, "mxfp4", act_format, parameters, lambda t: _codes(t, weight), interleaved=interleaved)


def fp8(name: str, strategy: str, static: bool, scale: str = "weight_scale", loader: str = "") -> ExpertFormat:
    """e4m3 weights.

    strategy: what shares a scale: "tensor" (a whole matrix, or half of w13), "channel" (a row), "block" (128 x 128).
    static: the checkpoint has calibrated scales of activations.
    scale: what vLLM calls the scales.
    """

    def parameters(s: LayerSizes) -> Parameters:
        found = _biases(s)
        for matrix, rows, k, per_half in s.matrices():
            halves = s.halves if matrix == "w13" else 1
            tiles = halves * -(-(rows // halves) // 128), -(-k // 128)
            shape = {"tensor": per_half, "channel": (s.experts, rows, 1), "block": (s.experts, *tiles)}[strategy]
            found[f"{matrix}_weight"] = Parameter((s.experts, rows, k), _E4M3)
            found[f"{matrix}_{scale}"] = Parameter(shape, _F32, strategy, dummy=1e-2)
            if static:
                inputs = per_half if loader == "modelopt" else (s.experts,)
                found[f"{matrix}_input_scale"] = Parameter(inputs, _F32, "tensor", optional=True, dummy=1e-2)
        return found

    def fields(t: Tensors) -> Fields:
        found = _codes(t, "weight", scale)
        if strategy == "tensor":
            found["w2_scale"] = t[f"w2_{scale}"][:, None]
        if static:
            found |= {f"{a}_input_scale": _of_expert(t[f"{w}_input_scale"]) for a, w in (("a13", "w13"), ("a2", "w2"))}
        return found

    scheme = "fp8_block" if strategy == "block" else "fp8"
    return ExpertFormat(name, scheme, "fp8", parameters, fields, loader=loader)


def int4_compressed_tensors(group: int, symmetric: bool, dtype: torch.dtype) -> ExpertFormat:
    """pack-quantized: eight codes of a row in an int32.

    group: values of K that share a scale; -1: a row. dtype: of the scales, the model's.
    """

    def parameters(s: LayerSizes) -> Parameters:
        found = _biases(s)
        for name, rows, k, _ in s.matrices():
            groups, sharing = (k // group, "group") if group > 0 else (1, "channel")
            found[f"{name}_weight_packed"] = Parameter((s.experts, rows, k // 8), torch.int32)
            found[f"{name}_weight_scale"] = Parameter((s.experts, rows, groups), s.dtype, sharing)
            if not symmetric:
                found[f"{name}_weight_zero_point"] = Parameter((s.experts, rows // 8, groups), torch.int32, sharing)
            found[f"{name}_weight_shape"] = Parameter((s.experts, 2), torch.int64)
        return found

    def fields(t: Tensors) -> Fields:
        found = _codes(t, "weight_packed")
        if not symmetric:
            for name in ("w13", "w2"):
                packed = t[f"{name}_weight_zero_point"]
                found[f"{name}_zero_point"] = unpack_zero_point_rows(packed, 8 * packed.shape[1])
        return found

    # Kernels exist for exactly these scales, under a scheme of their own.
    scheme = "mxint4" if group == 32 and symmetric and dtype == torch.bfloat16 else "int4"
    return ExpertFormat("compressed-tensors INT4", scheme, "none", parameters, fields)


def _codes(t: Tensors, weight: str, scale: str = "weight_scale") -> Fields:
    return {
        "w13": t[f"w13_{weight}"],
        "w2": t[f"w2_{weight}"],
        "w13_scale": t[f"w13_{scale}"],
        "w2_scale": t[f"w2_{scale}"],
    }


def _of_expert(input_scale: Tensor) -> Tensor | None:
    """float32 [E] of [E] or [E, halves]: gate and up multiply the same rows, so the larger range serves both."""
    known = loaded(input_scale)
    return known.amax(1) if known is not None and known.ndim == 2 else known
