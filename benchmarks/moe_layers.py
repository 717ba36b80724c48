"""The library's layers for bench_moe.py: the peers' weights as RawWeights, prepared and called as users do."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from moe_peers import common, runner
from torch import Tensor

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS

# What inputs of standard deviation 0.5 and their intermediate calibrate to, near enough for e4m3 block scales.
INPUT_SCALE = 1e-3
# Format (weights, and after the dash bits of the activations) -> scheme and activation format.
FORMATS = {
    "nvfp4": ("nvfp4", "none"),
    "nvfp4-a4": ("nvfp4", "nvfp4"),
    "nvfp4-a8": ("nvfp4", "fp8"),
    "mxfp4": ("mxfp4", "none"),
    "mxfp4-a8": ("mxfp4", "mxfp8"),
    "mxfp4-a8row": ("mxfp4", "fp8"),
    **{fmt: ("int4", "none") for fmt in common.INT4_FORMS},
    "mxint4": ("mxint4", "none"),
    **{f"{fmt}-a8": ("int4", "fp8") for fmt in common.INT4_FORMS},
    "fp8": ("fp8_block", "fp8"),
    "fp8row": ("fp8", "fp8"),
    "fp8half": ("fp8", "fp8"),
    "fp8-a16": ("fp8_block", "none"),
    "fp8row-a16": ("fp8", "none"),
    "fp8half-a16": ("fp8", "none"),
    "mxfp8-a8": ("mxfp8", "mxfp8"),
    "mxfp8-a16": ("mxfp8", "none"),
    "int8": ("int8", "none"),
    "int8-a8": ("int8", "int8"),
    "bf16": ("none", "none"),
}
# Backends that are for a few formats only, and the weight policy of those that have one of their own.
ONLY = {
    "cuda_sm90_packed": ("nvfp4-a8", "mxfp4-a8row"),
    "cuda_sm90_folded": ("nvfp4-a8", "mxfp4-a8row"),
    "cuda_sm90_fp8": ("fp8", "fp8row", "fp8half"),
    "cuda_sm90_int4": (*common.INT4, *(f"{fmt}-a8" for fmt in common.INT4_FORMS)),
    "cuda_sm90_bf16": ("bf16",),
    "triton_fp8": ("fp8", "fp8row", "fp8half"),
}
AUTO = "auto"
POLICIES = {"cuda_sm90_packed": "packed", "cuda_sm90_folded": "folded"}
ACTIVATIONS = {"silu": "silu", "relu2": "relu2_no_mul"}
# gpt-oss has biases and an activation of its own. Peers run silu without biases on that shape, which is less work: our
# layers do so as well beside it, by a name that ends in ALIKE.
GPT_OSS = "gptoss120b"
ALIKE = "-silu"
# Behind a backend's name: float16 hidden states, whose bits are those of the bfloat16 ones.
HALF = ":f16"


def raw_weights(fmt: str, weights: common.Weights, activation: str, biases: tuple[Tensor, Tensor] | None) -> Any:
    """moe.RawWeights of the peers' weights; no memory is copied."""
    scheme, act = FORMATS[fmt]
    fields: dict[str, Any] = {"w13": weights.w13, "w2": weights.w2, "activation": activation}
    if scheme != "none":
        fields |= {"w13_scale": weights.w13_scale, "w2_scale": weights.w2_scale}
    if scheme == "nvfp4":
        fields |= {"w13_scale_2": weights.w13_global[:, None], "w2_scale_2": weights.w2_global}
    if act == "nvfp4":
        scale = torch.tensor(INPUT_SCALE, device=weights.w13.device)
        fields |= {"a13_input_scale": scale, "a2_input_scale": scale}
    if scheme in ("int4", "mxint4"):  # eight codes a word, the first in the lowest bits, as two a byte
        fields |= {name: fields[name].view(torch.int32) for name in ("w13", "w2")}
    form = common.INT4_FORMS.get(common.base_format(fmt))
    if form is not None and form.zero:
        fields |= {"w13_zero_point": weights.w13_global, "w2_zero_point": weights.w2_global}
    if biases is not None:
        fields |= {"w13_bias": biases[0], "w2_bias": biases[1]}
    return moe.RawWeights(scheme, **fields)


def gpt_oss_reference(weights: common.Weights, inputs: common.Inputs, biases: tuple[Tensor, Tensor]) -> Tensor:
    """common.reference with gpt-oss' activation and biases; gate rows come first."""
    out = torch.zeros(inputs.x.shape, device=inputs.x.device, dtype=torch.float32)
    for e in torch.unique(inputs.ids).tolist():
        t, j = torch.where(inputs.ids == e)
        gate, up = (inputs.x[t].float() @ weights.expert(1, e).T + biases[0][e]).chunk(2, -1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        h = (gate * torch.sigmoid(1.702 * gate) * (up + 1)).bfloat16().float()
        y = h @ weights.expert(2, e).T + biases[1][e]
        out.index_add_(0, t, y * inputs.weights[t, j, None])
    return out


class OurLayer(runner.UnderTest):
    """torch_moe_ops with one backend, from top-k ids. alike: what peers run, where the model has more.

    backend: with HALF behind it, on float16 hidden states.
    """

    def __init__(self, backend: str, fmt: str, weights: common.Weights, alike: bool = False):
        shape, device = weights.shape, weights.w13.device
        label, backend = backend, backend.removesuffix(HALF)
        self._dtype = torch.bfloat16 if label == backend else torch.float16
        self._biases: tuple[Tensor, Tensor] | None = None
        activation = ACTIVATIONS[shape.act]
        if shape.name == GPT_OSS and not alike:
            activation = "swigluoai"
            first, second = (
                torch.randn(shape.E, n, device=device, dtype=torch.bfloat16) * 0.1 for n in (shape.n1, shape.H)
            )
            self._biases = first, second
        raw = raw_weights(fmt, weights, activation, self._biases)
        settings: dict[str, Any] = {"act_format": FORMATS[fmt][1], "weight_policy": POLICIES.get(backend, "exact")}
        settings["dtype"] = dtype = self._dtype
        against = moe.explain(raw, device=device, **settings).against.get(backend)  # None: "auto"
        if against:
            raise common.Unsupported("; ".join(against))
        self.prepared = w = moe.prepare(raw, backend=backend, **settings)

        def forward(x: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
            return moe.fused_moe_routed(x.view(dtype), ids, topk_weights, w)

        super().__init__(label + (ALIKE if alike else ""), fmt, forward, False)

    def reference(self, weights: common.Weights, inputs: common.Inputs) -> Tensor:  # type: ignore[override]
        inputs = dataclasses.replace(inputs, x=inputs.x.view(self._dtype))
        if self._biases is None:
            return common.reference(weights, inputs)
        return gpt_oss_reference(weights, inputs, self._biases)

    def details(self, M: int) -> dict[str, Any]:
        found = {"activation": "swigluoai, biases"} if self._biases is not None else {}
        return found | ({"backend": self.prepared.backend} if self.label.startswith(AUTO) else {})


def entries(backends: list[str], fmts: list[str]) -> list[runner.Entry]:
    """What to build for every shape; a backend that is not registered is left out. "auto": what users get."""
    found = []
    for fmt in fmts:
        if fmt not in FORMATS:
            raise SystemExit(f"--fmts: must be of {', '.join(FORMATS)}, got {fmt!r}")
        for backend in backends:
            name = backend.removesuffix(HALF)
            if name not in (AUTO, *BACKENDS) or fmt not in ONLY.get(name, FORMATS):
                continue

            def build(fmt: str, weights: common.Weights, context: Any, backend: str = backend) -> list[OurLayer]:
                kinds = (False, True) if weights.shape.name == GPT_OSS else (False,)
                return [OurLayer(backend, fmt, weights, alike) for alike in kinds]

            found.append(runner.Entry(backend, fmt, build))
    return found
