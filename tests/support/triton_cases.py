"""Random routed calls for the Triton engine, and the distance of its result to the oracle."""

from __future__ import annotations

import math
from typing import Any

import torch
from tolerances import fp8_sums_bound
from torch import Tensor
from triton_weights import make_weight

from torch_moe_ops.core.activations import resolve_constants
from torch_moe_ops.core.call import ExpertsCall
from torch_moe_ops.core.schemes import SCHEMES
from torch_moe_ops.numerics import fp8, int8, mx, nvfp4
from torch_moe_ops.oracle.reference import experts_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def routing(tokens: int, top_k: int, experts: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct experts for each token, weights that do not sum to one."""
    ids = torch.rand((tokens, experts), generator=g).topk(top_k, dim=1).indices.int()
    return ids, torch.rand((tokens, top_k), generator=g) + 0.1


def make_call(
    scheme: str = "nvfp4",
    act_format: str = "none",
    *,
    tokens: int = 5,
    top_k: int = 2,
    experts: int = 4,
    hidden: int = 80,
    inter: int = 48,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    activation: str = "silu",
    constants: tuple[float | None, float | None, float | None] = (None, None, None),
    a1: float | str | None = None,
    a2: float | str | None = None,
    bias: bool = False,
    per_half: bool = True,
    foreign: bool = False,
    seed: int = 0,
    weights: dict[str, Any] | None = None,
    **fields: Any,
) -> ExpertsCall:
    """A call on DEVICE. a1, a2: None (dynamic), a number ([]), or "expert" ([E]). foreign: some ids are not local.
    weights: options of `triton_weights.make_weight`."""
    g = torch.Generator().manual_seed(seed)
    gated = not activation.endswith("_no_mul")
    rows = (2 if gated else 1) * inter
    offset = 3 if foreign else 0
    ids, factors = routing(tokens, top_k, experts + 2 * offset, g)
    if foreign and tokens:
        ids[0, 0], factors[0, 0] = -7, math.nan
        ids[-1] = experts + offset + torch.arange(top_k)
    values: dict[str, Any] = dict.fromkeys(ExpertsCall._fields)
    x = torch.randn((tokens, hidden), generator=g).to(dtype)
    options = {"dtype": dtype} | (weights or {})
    for name, n, k, parts in (("w13", rows, hidden, 2 if gated else 1), ("w2", hidden, inter, 1)):
        made = make_weight(scheme, experts, n, k, g, parts, **options)
        values |= dict(zip((name, f"{name}_scale", f"{name}_zero_point"), made, strict=True))
    if scheme == "nvfp4":
        halves = 2 if gated and per_half else 1
        alphas = (torch.rand((experts, halves), generator=g) + 0.5) / (40 * math.sqrt(hidden))
        values["g1_alphas"] = alphas if halves == 2 else alphas[:, 0].contiguous()
        values["g2_alphas"] = (torch.rand((experts,), generator=g) + 0.5) / (40 * math.sqrt(inter))
    for name, given in (("a1_gscale", a1), ("a2_gscale", a2)):
        if given == "expert":
            values[name] = torch.rand((experts,), generator=g) * 400 + 100
        elif given is not None:
            values[name] = torch.tensor(given)
        if given is not None and scheme == "nvfp4":
            alphas = values["g1_alphas" if name == "a1_gscale" else "g2_alphas"]
            # In place: alphas hold 1 / gscale, and the intermediate keeps a size that activations react to.
            alphas.div_(values[name].reshape([-1] + [1] * (alphas.ndim - 1)))
    if bias:
        values["w13_bias"] = torch.randn((experts, rows), generator=g)
        values["w2_bias"] = torch.randn((experts, hidden), generator=g)
    alpha, beta, limit = resolve_constants(activation, *constants)
    values |= {
        "scheme": scheme, "hidden_states": x, "topk_ids": ids, "topk_weights": factors, "backend": "triton",
        "act_format": act_format, "activation": activation, "swiglu_alpha": alpha, "swiglu_beta": beta,
        "swiglu_limit": limit, "num_experts": experts + 2 * offset, "local_expert_offset": offset,
        "router_weight_on_input": False, "weight_policy": "exact", "out_dtype": out_dtype or dtype,
    }  # fmt: skip
    values |= fields
    placed: dict[str, Any] = {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in values.items()}
    return ExpertsCall(**placed)


def packed_input(call: ExpertsCall) -> ExpertsCall:
    """The same call with hidden states that come quantized; NVFP4 with its a1_gscale []."""
    x, act = call.hidden_states.cpu(), call.act_format
    if act == "nvfp4":
        codes, scale = nvfp4.quantize_activation(x, call.a1_gscale.cpu())
    elif act == "fp8" and SCHEMES[call.scheme].fp8_group:
        codes, scale = fp8.quantize_fp8_group(x)
    elif act in ("fp8", "int8"):
        codes, scale = (fp8.quantize_fp8 if act == "fp8" else int8.quantize_int8)(x)
        scale = scale[:, None]
    else:
        codes, scale = mx.quantize_mx(x, SCHEMES[act].element, "rceil")
    return call._replace(hidden_states=codes.to(DEVICE), hidden_states_scale=scale.to(DEVICE))


def empty_output(call: ExpertsCall) -> Tensor:
    """An output full of NaN: whatever the engine forgets to write shows."""
    shape = (call.topk_ids.shape[0], call.w2.shape[1])
    return torch.full(shape, math.nan, dtype=call.out_dtype, device=call.w2.device)


def error_over_bound(out: Tensor, call: ExpertsCall) -> float:
    """`relative_error` by the bound of products of e4m3 codes on fp8 tensor cores: below 1 where it holds.

    Infinite where the output is not finite."""
    values = call.topk_ids.numel() * SCHEMES[call.scheme].logical_k(call.w2.shape[2])
    error = relative_error(out, call) if torch.isfinite(out).all() else math.inf
    return error / fp8_sums_bound(values, call.out_dtype or call.hidden_states.dtype)


def relative_error(out: Tensor, call: ExpertsCall) -> float:
    """Relative L2 distance to the emulating oracle, computed in float64 and rounded once to the output dtype."""
    exact = experts_reference(call, dtype=torch.float64).to(call.out_dtype).double()
    return float((out.double() - exact).norm() / exact.norm())
