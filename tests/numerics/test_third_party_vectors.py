"""Fresh random weights through ModelOpt, torchao and compressed-tensors at test time, and through our codecs.

| compared, bit for bit                                    | how                                           |
| ModelOpt NVFP4                                           | scales, codes (-0 read as 0), scale_2, values |
| torchao NVFP4                                            | values and swizzled scales                    |
| torchao MXFP4, MXFP8 (floor, rceil, even)                | scales, codes (-0 included), values           |
| compressed-tensors MXFP4 (even), INT4, INT8, FP8 channel | scales, codes, values                         |
| checkpoint folders in the tools' own tensors             | values after load_experts (one within 2 ulp)  |

A tool that is not installed skips its tests: `pip install "torch-moe-ops[oracles]"`. A tool whose API has moved fails.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from torch_moe_ops import dequantize_experts
from torch_moe_ops.checkpoints import load_experts
from torch_moe_ops.numerics import e2m1, e4m3, fp8, int4, int8, mx, nvfp4, swizzle

ROWS, K = 136, 160  # not a whole number of 128 x 4 tiles of scales
FRESH = [pytest.param(s, d, id=f"{s}-{d}") for s in range(3) for d in (torch.bfloat16, torch.float32)]
FP4, INT4, BYTES = ({"num_bits": n, "type": t} for n, t in ((4, "float"), (4, "int"), (8, "int")))
CT: dict[str, tuple[str, dict[str, Any]]] = {  # format and arguments of compressed-tensors
    "nvfp4": ("nvfp4-pack-quantized", {**FP4, "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {**FP4, "strategy": "group", "group_size": 32}),
    "int4": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 32}),
    "int8": ("int-quantized", {**BYTES, "strategy": "channel"}),
    "fp8": ("float-quantized", {**BYTES, "type": "float", "strategy": "channel"}),
}
SCALES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8}


def experts(seed: int, dtype: torch.dtype, rows: int = ROWS, k: int = K) -> Tensor:
    """[3, rows, k]: a plain expert, one with outlier columns, one of tiny weights; each with blocks of zeros."""
    g = torch.Generator().manual_seed(1000 + seed)
    w = torch.randn(3, rows, k, generator=g) * 0.02
    w[1][:, torch.randperm(k, generator=g)[:3]] *= 60.0
    w[2] *= 2.0**-24
    w[:, 5, :64] = 0.0
    w[:, 6, 64:96] *= 2.0**-13  # below the smallest NVFP4 block scale
    return w.to(dtype)


def need(tool: str) -> None:
    pytest.importorskip(tool, reason=f"{tool} is an optional oracle: extra 'oracles'")


def codes_of(packed: Tensor) -> Tensor:
    codes = e2m1.unpack(packed)
    return torch.where(codes == 8, 0, codes)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.element_size() == b.element_size() and torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))


def modelopt_nvfp4(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of one linear as ModelOpt stores them, and the values it reads back, in float32."""
    need("modelopt.torch")
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    q, scale, scale_2 = NVFP4QTensor.quantize(w.clone(), 16)
    values = q.dequantize(dtype=torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    stored = {"weight": q._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2.reshape(()).float()}
    return stored, values


def compressor(kind: str) -> tuple[Any, Any]:
    """Class and scheme of compressed-tensors."""
    need("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    name, arguments = CT[kind]
    args = QuantizationArgs(symmetric=True, **arguments, scale_dtype=SCALES.get(kind))
    return BaseCompressor.get_value_from_registry(name), QuantizationScheme(targets=["Linear"], weights=args)


def compress(w: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of one linear as compressed-tensors stores them, and the values it reads back, in float32."""
    tool, scheme = compressor(kind)
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    group = w.unflatten(-1, (-1, scheme.weights.group_size or w.shape[-1]))
    low, high = (t if scheme.weights.group_size else t.view(-1, 1) for t in (group.amin(-1), group.amax(-1)))
    given = generate_gparam(w.amin().float().view(1), w.amax().float().view(1)) if kind == "nvfp4" else None
    state = {"weight": w, "weight_scale": calculate_qparams(low, high, scheme.weights, global_scale=given)[0]}
    state |= {} if given is None else {"weight_global_scale": given}
    state = {name: t.data.contiguous() for name, t in tool.compress(state, scheme).items()}
    if not kind.endswith("fp4"):
        wide = {**state, "weight_scale": state["weight_scale"].float()}
        return state, tool.decompress(wide, scheme)["weight"].data.float()
    elements = unpack_fp4_from_uint8(state["weight_packed"], *w.shape, dtype=torch.float32)
    scale = tool._decompress_scale(state["weight_scale"], torch.float32)
    return state, dequantize(elements, scale, args=scheme.weights, global_scale=given, dtype=torch.float32)


@pytest.mark.parametrize("seed, dtype", FRESH)
def test_nvfp4_is_modelopt(seed: int, dtype: torch.dtype) -> None:
    for w in experts(seed, dtype):
        stored, values = modelopt_nvfp4(w)
        codes, scale, scale_2 = nvfp4.quantize_weight(w)
        assert torch.equal(codes_of(codes), codes_of(stored["weight"]))
        assert same_bits(scale, stored["weight_scale"]) and torch.equal(scale_2, stored["weight_scale_2"])
        assert torch.equal(nvfp4.dequantize(codes, scale, scale_2), values)


@pytest.mark.parametrize("seed, dtype", FRESH)
def test_nvfp4_values_and_tiles_are_torchao(seed: int, dtype: torch.dtype) -> None:
    need("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.prototype.mx_formats.utils import to_blocked

    w = experts(seed, dtype)
    scale_2 = w.float().abs().amax((1, 2)) / 2688.0
    t = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale_2.view(-1, 1, 1))
    scale = t.scale.reshape(len(w), ROWS, K // 16)
    values = nvfp4.dequantize(t.qdata.view(torch.uint8), scale, scale_2)
    assert torch.equal(values, t.dequantize(torch.float32))
    tiled = torch.stack([to_blocked(s).flatten() for s in scale.view(torch.uint8)])
    assert same_bits(swizzle.swizzle_scale(scale), tiled)
    assert same_bits(swizzle.unswizzle_scale(tiled, ROWS, K // 16), scale)


@pytest.mark.parametrize("seed, dtype", FRESH)
@pytest.mark.parametrize("rule", ("floor", "rceil", "even"))
@pytest.mark.parametrize("element", ("e2m1", "e4m3"))
def test_mx_is_torchao(element: str, rule: str, seed: int, dtype: torch.dtype) -> None:
    need("torchao")
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx

    w = experts(seed, dtype).flatten(0, 1)
    kind = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn}[element]
    their_scale, their_codes = to_mx(w, kind, 32, ScaleCalculationMode(rule))
    codes, scale = mx.quantize_mx(w, element, rule)
    assert same_bits(scale, their_scale.reshape(scale.shape))
    assert same_bits(codes, their_codes.reshape(codes.shape))
    values = to_dtype(their_codes, their_scale, kind, 32, torch.float32)
    assert torch.equal(mx.dequantize_mx(codes, scale, element), values.reshape(w.shape))


@pytest.mark.parametrize("seed, dtype", FRESH)
def test_groups_are_compressed_tensors(seed: int, dtype: torch.dtype) -> None:
    w = experts(seed, dtype).flatten(0, 1)
    stored, values = compress(w, "mxfp4")
    codes, scale = mx.quantize_mx(w, "e2m1", "even")
    assert torch.equal(codes_of(codes), codes_of(stored["weight_packed"])) and same_bits(scale, stored["weight_scale"])
    assert torch.equal(mx.dequantize_mx(codes, scale, "e2m1"), values)
    stored, values = compress(w, "int4")
    result = int4.quantize_weight_group(w, scale_dtype=dtype)
    assert torch.equal(int4.pack_int32(result.codes), stored["weight_packed"])
    assert torch.equal(result.scale, stored["weight_scale"]) and torch.equal(int4.dequantize(*result), values)


@pytest.mark.parametrize("seed, dtype", FRESH)
def test_channels_are_compressed_tensors(seed: int, dtype: torch.dtype) -> None:
    w = experts(seed, dtype).flatten(0, 1)
    stored, values = compress(w, "int8")
    codes, scale = int8.quantize_weight_channel(w, dtype)
    assert torch.equal(codes, stored["weight"]) and torch.equal(scale[:, None], stored["weight_scale"])
    assert torch.equal(int8.dequantize(codes, scale), values)
    stored, values = compress(w, "fp8")
    codes, scale = fp8.quantize_weight_channel(w)
    assert torch.equal(scale.to(dtype)[:, None], stored["weight_scale"])
    # Its quotient has the dtype of the weights: the codes are the same in float32 only.
    codes = codes if dtype == torch.float32 else e4m3.encode(w / stored["weight_scale"])
    assert same_bits(codes, stored["weight"])
    assert torch.equal(fp8.dequantize(stored["weight"], stored["weight_scale"]), values)


@pytest.mark.parametrize("tool, kind", (("modelopt", "nvfp4"), ("ct", "nvfp4"), ("ct", "int4")))
def test_checkpoint_written_by_the_tool(tool: str, kind: str, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    values = []
    for seed, (projection, rows, k) in enumerate((("gate", 96, 64), ("up", 96, 64), ("down", 64, 96))):
        for e, w in enumerate(experts(seed, torch.bfloat16, rows, k)):
            stored, back = compress(w, kind) if tool == "ct" else modelopt_nvfp4(w)
            tensors |= {f"model.layers.0.mlp.experts.{e}.{projection}_proj.{name}": t for name, t in stored.items()}
            values.append(back)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    method = {"modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    method["ct"] = {"quant_method": "compressed-tensors", "format": CT[kind][0]}
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 64, "quantization_config": method[tool]}
    config |= {"moe_intermediate_size": 96, "num_experts": 3, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # compressed-tensors divides by its NVFP4 global scale; a reciprocal taken at load costs up to 2 ulp.
    tolerance = 2.0**-22 if (tool, kind) == ("ct", "nvfp4") else 0.0
    expected = (torch.cat((torch.stack(values[:3]), torch.stack(values[3:6])), 1), torch.stack(values[6:]))
    torch.testing.assert_close(dequantize_experts(load_experts(tmp_path, 0)), expected, rtol=tolerance, atol=0.0)
