"""The runner of the CUTLASS binding: bind, check, decode, compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cpp, experts, launcher, layouts, numbers


class Runner:
    """What init() of the module returns. options: by the names of the front's own call, x_dtype and so on."""

    def __init__(self, calls: list[dict[str, Any]], options: tuple[Any, ...]) -> None:
        self._calls = calls
        names = (
            "x_dtype",
            "weight_dtype",
            "output_dtype",
            "fp8_block",
            "w4_group",
            "mxfp8_act",
            "packed",
            "fused_finalize",
        )
        self._options = dict(zip(names, options, strict=False))

    def get_workspace_size(self, *values: Any) -> int:
        return 1024 + 8 * values[0]

    def run_moe(self, *values: Any) -> None:
        names = cpp.method_parameters("runMoe")
        assert len(names) == len(values), f"runMoe takes {len(names)} arguments, got {len(values)}"
        a = dict(zip(names, values, strict=True)) | self._options
        self._calls.append(a)
        _check(a)
        a["output"].copy_(_run(a))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *values: 0


class Module:
    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self._calls = calls

    def init(self, *options: Any) -> Runner:
        return Runner(self._calls, options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *values: None


def activation(a: dict[str, Any]) -> str:
    from flashinfer.tllm_enums import ActivationType

    name = ActivationType(int(a["base_activation_type"])).name
    assert name in (*GATED, *experts.PLAIN), name
    return name


GATED = ("Swiglu", "Geglu", "GegluTanh", "SwigluStep", "Situ")


def _fp4(a: dict[str, Any]) -> bool:
    return a["weight_dtype"] == torch.int64


def _check(a: dict[str, Any]) -> None:
    x, w1, w2, ids = a["input"], a["fc1_expert_weights"], a["fc2_expert_weights"], a["token_selected_experts"]
    assert a["cluster_size"] == 1 and a["cluster_rank"] == 0 and not a["min_latency_mode"]
    assert x.dtype == a["x_dtype"] and ids.dtype == torch.int32
    assert w1.dtype == w2.dtype == a["weight_dtype"] and w1.ndim == w2.ndim == 3
    assert a["token_final_scales"].dtype == torch.float32 and a["token_final_scales"].shape == ids.shape
    assert all(t.is_contiguous() for t in (x, w1, w2, ids, a["token_final_scales"], a["output"]))
    assert a["output"].dtype == a["output_dtype"]
    assert x.data_ptr() % 16 == a["output"].data_ptr() % 16 == 0, "kernels access 128 bits at a time"
    multiplier = 16 if _fp4(a) else 1
    hidden, inter = w2.shape[1], w2.shape[2] * multiplier
    gated = activation(a) in GATED
    assert w1.shape == (w2.shape[0], inter * (2 if gated else 1), hidden // multiplier)
    assert x.shape == (ids.shape[0], hidden // (2 if x.dtype == torch.uint8 else 1))
    align = 128 if a["mxfp8_act"] else 16 // min(x.element_size(), w1.element_size())
    assert hidden % align == 0 and inter % align == 0
    biases = a["fc1_expert_biases"], a["fc2_expert_biases"]
    if any(b is not None for b in biases):
        assert all(b.dtype == a["output_dtype"] for b in biases)
        assert biases[0].shape == w1.shape[:2] and biases[1].shape == w2.shape[:2]
    for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit", "situ_beta", "situ_linear_beta"):
        tensor = a.get(name)  # situ's are in newer releases
        assert tensor is None or (tensor.dtype == torch.float32 and tensor.shape == (w1.shape[0],))
    if a.get("workspace_buffer") is not None:
        buffer = a["workspace_buffer"]
        assert buffer.dtype == torch.uint8 and buffer.ndim == 1 and buffer.numel() >= 1024 + 8 * x.shape[0]


def _run(a: dict[str, Any]) -> Tensor:
    name, experts_, scales = activation(a), a["fc1_expert_weights"].shape[0], a["quant_scales"]
    decode = _decoder(a)
    constants = _constants(a, name, experts_)
    made = []
    for e in range(experts_):
        w1, w2, (factor1, factor2) = decode(e)
        biases = [None if a[b] is None else a[b][e].double() for b in ("fc1_expert_biases", "fc2_expert_biases")]
        # The GEMMs multiply before anything else sees their results, so biases and constants are in real units.
        own = {key: values[e] for key, values in constants.items()}
        made.append(experts.Expert(w1 * factor1, w2 * factor2, bias1=biases[0], bias2=biases[1], **own))
    hidden, requantize = _activations(a, scales)
    ids, offset = a["token_selected_experts"].long(), a["ep_rank"] * experts_
    # Both GEMMs write the output dtype; biases are added by the kernels that read it.
    written = lambda x: x.to(a["output_dtype"]).double()  # noqa: E731
    roundings = experts.Roundings(written, written, bias_follows=True)
    weights = a["token_final_scales"].double()
    return experts.layer(lambda e: hidden, made, ids, weights, offset, name, requantize, roundings)


def _constants(a: dict[str, Any], name: str, count: int) -> dict[str, list[float]]:
    """alpha, beta and limit of each expert; what is absent has the activation's own value."""
    usual = {"alpha": ("swiglu_alpha", 1.0), "beta": ("swiglu_beta", 0.0)}
    usual["limit"] = ("swiglu_limit", 7.0 if name == "SwigluStep" else math.inf)
    if name == "Situ":
        usual |= {"alpha": ("situ_beta", 4.0), "beta": ("situ_linear_beta", 25.0)}
    given = {key: (a.get(argument), value) for key, (argument, value) in usual.items()}
    return {key: [value] * count if t is None else t.tolist() for key, (t, value) in given.items()}


Decoded = tuple[Tensor, Tensor, tuple[float, float]]


def _decoder(a: dict[str, Any]) -> Callable[[int], Decoded]:
    """expert -> both matrices, and what multiplies the accumulators of the two GEMMs."""
    w1, w2, scales = a["fc1_expert_weights"], a["fc2_expert_weights"], a["quant_scales"]
    one = (1.0, 1.0)
    if a["fp8_block"]:
        assert len(scales) == 2 and a["x_dtype"] == torch.bfloat16
        assert all(s.dtype == torch.float32 for s in scales)
        return lambda e: (numbers.e4m3(w1[e]) * _wide(scales[0][e]), numbers.e4m3(w2[e]) * _wide(scales[1][e]), one)
    if a["weight_dtype"] == torch.float8_e4m3fn and not a["mxfp8_act"]:
        dequantize1, quantize2, dequantize2, of_input = scales
        assert dequantize1.shape == dequantize2.shape == (len(w1),) and of_input.ndim == 0
        assert quantize2.shape in ((), (len(w1),)) and all(s.dtype == torch.float32 for s in scales)
        return lambda e: (
            numbers.e4m3(w1[e]),
            numbers.e4m3(w2[e]),
            (dequantize1[e].item(), dequantize2[e].item()),
        )
    if _fp4(a) or a["mxfp8_act"]:
        return _block_decoder(a)
    assert not scales and w1.dtype == a["x_dtype"]
    return lambda e: (w1[e].double(), w2[e].double(), one)


def _wide(scale: Tensor) -> Tensor:
    """One scale per 128x128 tile -> one per element."""
    return scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def _block_decoder(a: dict[str, Any]) -> Callable[[int], Decoded]:
    w1, w2, scales, mx = a["fc1_expert_weights"], a["fc2_expert_weights"], a["quant_scales"], a["mxfp8_act"]
    block1, factor1, block2, factor2 = scales if mx else (scales[1], scales[2], scales[4], scales[5])
    assert block1.dtype == block2.dtype == torch.int32 and block1.ndim == block2.ndim == 3
    assert factor1.shape == factor2.shape == (len(w1),)

    def matrix(weights: Tensor, block: Tensor) -> Tensor:
        codes = numbers.e2m1(weights.contiguous().view(torch.uint8)) if _fp4(a) else numbers.e4m3(weights)
        linear = layouts.untiled(block.contiguous().view(torch.uint8))
        assert linear.shape == (codes.shape[0], codes.shape[1] // (32 if mx else 16))
        return numbers.blocks(codes, (numbers.e8m0 if mx else numbers.e4m3)(linear))

    return lambda e: (
        matrix(w1[e], block1[e]),
        matrix(w2[e], block2[e]),
        (factor1[e].item(), factor2[e].item()),
    )


def _activations(a: dict[str, Any], scales: list[Tensor]) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
    """The input, and what becomes of the intermediate."""
    x, sf = a["input"], a["input_sf"]
    if a["fp8_block"]:
        return numbers.through_fp8_groups(x.double()), lambda e, h: numbers.through_fp8_groups(h)
    if x.dtype == torch.float8_e4m3fn and not a["mxfp8_act"]:
        return numbers.e4m3(x), lambda e, h: numbers.round_e4m3(h * scales[1].expand(len(scales[0]))[e].double())
    if not _fp4(a) and not a["mxfp8_act"]:
        return x.double(), lambda e, h: h.to(a["output_dtype"]).double()
    assert a["swizzled_input_sf"] and sf.shape[0] % 128 == 0
    linear = layouts.untiled(sf.view(torch.uint8))[: x.shape[0]]
    if a["mxfp8_act"]:
        return numbers.blocks(numbers.e4m3(x), numbers.e8m0(linear)), lambda e, h: numbers.through_mxfp8(h)
    launcher.usual_nvfp4(a)
    multiplier = scales[3].expand(len(scales[2]))
    hidden = numbers.blocks(numbers.e2m1(x), numbers.e4m3(linear))
    return hidden, lambda e, h: numbers.through_nvfp4(h, multiplier[e])
