"""What is tuned: sizes by name, by numbers or from a checkpoint; and random layers of that kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops.backends import linear
from torch_moe_ops.backends.triton import FORMATS
from torch_moe_ops.checkpoints import CheckpointError
from torch_moe_ops.checkpoints.index import open_checkpoint
from torch_moe_ops.checkpoints.load import describe_layer
from torch_moe_ops.checkpoints.naming import select_layer
from torch_moe_ops.core.activations import resolve_constants
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.tuning.tuned import Key
from torch_moe_ops.weights.raw_weights import RawWeights

# num_experts, top_k, hidden_size, intermediate_size
SHAPES: dict[str, tuple[int, int, int, int]] = {
    "qwen3_30b": (128, 8, 2048, 768),
    "dsv3": (256, 8, 7168, 2048),
    "mixtral": (8, 2, 4096, 14336),
    "gptoss120b": (128, 4, 2880, 2880),
}
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token", "top_k_experts")


class Layer(NamedTuple):
    """A layer to tune. raw: its experts on the meta device, which is all that decides."""

    name: str
    raw: RawWeights
    top_k: int
    act_format: str

    @property
    def key(self) -> Key:
        raw = self.raw
        return Key(raw.scheme, self.act_format, raw.num_experts, self.top_k, raw.hidden_size, raw.intermediate_size)

    @property
    def bits(self) -> int:
        """4, 8 (also for 6) or 16."""
        scheme = SCHEMES[self.raw.scheme]
        if scheme.name == "none":
            return 16
        dtype = scheme.weight_dtypes[0]
        return 4 if dtype.itemsize * 8 == 4 * scheme.pack else 8


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """A name of SHAPES or E:k:H:I; ValueError says what is known."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isdigit() and int(part) > 0 for part in parts):
        known = ", ".join(SHAPES)
        raise ValueError(f"--shapes: must be names of {known}, or experts:top_k:hidden:intermediate, got {text!r}")
    experts, top_k, hidden, inter = map(int, parts)
    if top_k > experts:
        raise ValueError(f"--shapes: top_k must be at most the number of experts, got {text!r}")
    return experts, top_k, hidden, inter


def of_shape(name: str, scheme: str, act_format: str) -> Layer:
    """A gated layer of some sizes. ValueError where the scheme does not take them."""
    experts, top_k, hidden, inter = parse_shape(name)
    known = SCHEMES[scheme]
    dtype = known.weight_dtypes[0]
    tensors: dict[str, Any] = {}
    for argument, (shapes, dtypes) in linear.specs(known, Sizes(experts, hidden, inter, True, dtype)).items():
        # Groups: rows, or of 4 bits the longest that is not a whole row, as checkpoints have them.
        groups = known.scales is not None and known.scales.kind == "group" and len(shapes) > 1
        shape = shapes[-1 if scheme == "int8" else -2] if groups else shapes[0]
        tensors[argument] = torch.empty(shape, dtype=dtypes[0], device="meta")
    if known.has_scale_2:
        tensors["w13_scale_2"] = torch.empty((experts, 1), device="meta")
        tensors["w2_scale_2"] = torch.empty((experts,), device="meta")
    return Layer(name, RawWeights(scheme, **tensors), top_k, act_format)


def of_checkpoint(path: str, layer: int | None, top_k: int | None, act_format: str | None) -> Layer:
    """A layer of a checkpoint (None: the first with experts).

    Raises CheckpointError where it cannot be read, ValueError where neither the caller nor config.json has top_k.
    """
    index = open_checkpoint(path)
    if not index.layers:
        raise CheckpointError(f"{index.path}: no layer has experts")
    names = select_layer(index.layers, layer if layer is not None else index.layers[0].number, False, index.path)
    _, raw = describe_layer(index, names, quick=True)
    found = top_k if top_k is not None else _top_k_of(index.config)
    if found is None:
        raise ValueError(f"--top-k: must be given, as {path} has no config.json that says it")
    return Layer(Path(path).name, raw, found, act_format or default_act(raw.scheme))


def _top_k_of(config: Mapping[str, Any]) -> int | None:
    for scope in (config, *(v for v in config.values() if isinstance(v, dict))):
        for name in _TOP_K:
            if type(scope.get(name)) is int and scope[name] > 0:
                return scope[name]
    return None


def default_act(scheme: str) -> str:
    """The scheme's own activation format where the Triton kernels have it, else their first."""
    own = SCHEMES[scheme].act_formats[0]
    formats = FORMATS.get(scheme, ())
    return own if own in formats or not formats else formats[0]


def _random(name: str, like: Tensor, scheme: str, device: torch.device, experts: int) -> Tensor:
    """Values that keep results finite; times hardly depend on them. The first dimension is `experts`."""
    shape = (experts, *like.shape[1:])
    e4m3 = torch.float8_e4m3fn
    if name.endswith("_scale") and like.dtype == torch.uint8:
        return torch.randint(118, 122, shape, dtype=torch.uint8, device=device)
    if name.endswith("_scale"):
        return (torch.rand(shape, device=device) + 0.5).mul_(64 if like.dtype == e4m3 else 1e-3).to(like.dtype)
    if name.endswith("_zero_point"):
        return torch.full(shape, 8 if scheme == "int4" else 0, dtype=like.dtype, device=device)
    if like.dtype == torch.uint8:
        return torch.randint(0, 64 if "mxfp6" in scheme else 256, shape, dtype=torch.uint8, device=device)
    if like.dtype == e4m3:  # 0x7f and 0xff are NaN
        codes = torch.randint(0, 127, shape, dtype=torch.uint8, device=device)
        return (codes | (torch.randint(0, 2, shape, dtype=torch.uint8, device=device) << 7)).view(e4m3)
    if not like.dtype.is_floating_point:
        info = torch.iinfo(like.dtype)
        return torch.randint(info.min, info.max, shape, dtype=like.dtype, device=device)
    return torch.randn(shape, dtype=like.dtype, device=device).mul_(like.shape[-1] ** -0.5 if like.ndim == 3 else 0.1)


def random_call(layer: Layer, device: torch.device, one_expert: bool = False) -> ExpertsCall:
    """A call of the layer without hidden states and routing (those fields are None).

    one_expert: only the first one's memory exists, every other one is the same by strides that kernels do not
    know of: for calls that route to expert 0 alone.
    """
    raw = layer.raw
    count = 1 if one_expert else raw.num_experts
    name = raw.activation or ("silu" if raw.is_gated else "silu_no_mul")
    alpha, beta, limit = resolve_constants(name, raw.swiglu_alpha, raw.swiglu_beta, raw.swiglu_limit)
    fields: dict[str, Any] = dict.fromkeys(ExpertsCall._fields)
    for field, like in raw.tensors().items():
        if field in fields:
            values = _random(field, like, raw.scheme, device, count)
            fields[field] = values.float() if field.endswith("_bias") else values
    if SCHEMES[raw.scheme].has_scale_2:
        for alphas, k in (("g1_alphas", raw.hidden_size), ("g2_alphas", raw.intermediate_size)):
            fields[alphas] = torch.full((count,), 1 / (200 * k**0.5), device=device)
    if layer.act_format == "nvfp4":
        # Published NVFP4 checkpoints are calibrated; alphas then hold the input scale.
        gscale = torch.tensor(1000.0, device=device)
        fields |= {"a1_gscale": gscale, "a2_gscale": gscale}
        fields |= {alphas: fields[alphas] / gscale for alphas in ("g1_alphas", "g2_alphas")}
    if one_expert:
        fields = {
            f: _expanded(v, raw.num_experts) if isinstance(v, Tensor) and v.ndim else v for f, v in fields.items()
        }
    return ExpertsCall(
        **fields
        | {
            "scheme": raw.scheme,
            "backend": "triton",
            "act_format": layer.act_format,
            "activation": name,
            "swiglu_alpha": alpha,
            "swiglu_beta": beta,
            "swiglu_limit": limit,
            "num_experts": raw.num_experts,
            "local_expert_offset": 0,
            "router_weight_on_input": False,
            "weight_policy": "exact",
            "out_dtype": torch.bfloat16,
        }
    )


def _expanded(tensor: Tensor, experts: int) -> Tensor:
    return tensor.expand(experts, *tensor.shape[1:])


def with_inputs(call: ExpertsCall, layer: Layer, tokens: int, seed: int, one_expert: bool = False) -> ExpertsCall:
    """The call with random hidden states and a random routing of distinct experts a token (one_expert: expert 0)."""
    device = call.w13.device
    g = torch.Generator(device=device).manual_seed(seed)
    ids = torch.rand((tokens, layer.raw.num_experts), device=device, generator=g).topk(layer.top_k, dim=1).indices.int()
    dtype = call.w13.dtype if layer.raw.scheme == "none" else torch.bfloat16
    x = (torch.randn((tokens, layer.raw.hidden_size), device=device, generator=g) * 0.5).to(dtype)
    weights = torch.rand((tokens, layer.top_k), device=device, generator=g) + 0.1
    ids = torch.zeros_like(ids) if one_expert else ids
    return call._replace(hidden_states=x, topk_ids=ids, topk_weights=weights / weights.sum(1, keepdim=True))


def routings(tokens: int) -> int:
    """How many routings a timed run goes through, so that few tokens find their weights in memory."""
    return 2 if tokens >= 1024 else 8 if tokens >= 64 else 16


def check(layer: Layer) -> None:
    """ValueError where the Triton kernels do not run the layer."""
    raw, acts = layer.raw, FORMATS.get(layer.raw.scheme)
    if acts is None:
        raise ValueError(f"--scheme: must be one of {', '.join(FORMATS)}, got {raw.scheme!r}")
    if layer.act_format not in acts:
        raise ValueError(f"--act-format: must be one of {', '.join(acts)} for {raw.scheme}, got {layer.act_format!r}")
    if raw.scheme == "none" and raw.w13.dtype == torch.float32:
        raise ValueError(f"{layer.name}: unquantized weights must be bfloat16 or float16, got {raw.w13.dtype}")
