"""Random routed calls for the Triton engine, and the distance of its result to the oracle."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.activations import resolve_constants
from torch_moe_ops.ops.call import ExpertsCall
from torch_moe_ops.reference import experts_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _nvfp4(experts: int, n: int, k: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes and scales with every kind of scale: zero, subnormal, the largest."""
    codes = torch.randint(0, 256, (experts, n, k // 2), generator=g, dtype=torch.uint8)
    scale = (torch.rand((experts, n, k // 16), generator=g) * 64).to(torch.float8_e4m3fn)
    flat = scale.view(torch.uint8).view(-1)
    special = torch.tensor([0, 1, 7, 8, 126], dtype=torch.uint8)
    flat[: 5 * (flat.numel() // 40) : 8][: special.numel()] = special[: flat[: 5 * (flat.numel() // 40) : 8].numel()]
    return codes, scale


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
    **fields: Any,
) -> ExpertsCall:
    """A call on DEVICE. a1, a2: None (dynamic), a number ([]), or "expert" ([E]). foreign: some ids are not local."""
    g = torch.Generator().manual_seed(seed)
    gated = not activation.endswith("_no_mul")
    rows = (2 if gated else 1) * inter
    offset = 3 if foreign else 0
    ids, weights = routing(tokens, top_k, experts + 2 * offset, g)
    if foreign and tokens:
        ids[0, 0], weights[0, 0] = -7, math.nan
        ids[-1] = experts + offset + torch.arange(top_k)
    values: dict[str, Any] = dict.fromkeys(ExpertsCall._fields)
    x = torch.randn((tokens, hidden), generator=g).to(dtype)
    if scheme == "nvfp4":
        values["w13"], values["w13_scale"] = _nvfp4(experts, rows, hidden, g)
        values["w2"], values["w2_scale"] = _nvfp4(experts, hidden, inter, g)
        halves = 2 if gated and per_half else 1
        alphas = (torch.rand((experts, halves), generator=g) + 0.5) / (40 * math.sqrt(hidden))
        values["g1_alphas"] = alphas if halves == 2 else alphas[:, 0].contiguous()
        values["g2_alphas"] = (torch.rand((experts,), generator=g) + 0.5) / (40 * math.sqrt(inter))
    else:
        values["w13"] = (torch.randn((experts, rows, hidden), generator=g) * hidden**-0.5).to(dtype)
        values["w2"] = (torch.randn((experts, hidden, inter), generator=g) * inter**-0.5).to(dtype)
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
        "scheme": scheme, "hidden_states": x, "topk_ids": ids, "topk_weights": weights, "backend": "triton",
        "act_format": act_format, "activation": activation, "swiglu_alpha": alpha, "swiglu_beta": beta,
        "swiglu_limit": limit, "num_experts": experts + 2 * offset, "local_expert_offset": offset,
        "router_weight_on_input": False, "weight_policy": "exact", "out_dtype": out_dtype or dtype,
    }  # fmt: skip
    values |= fields
    placed: dict[str, Any] = {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in values.items()}
    return ExpertsCall(**placed)


def empty_output(call: ExpertsCall) -> Tensor:
    """An output full of NaN: whatever the engine forgets to write shows."""
    shape = (call.topk_ids.shape[0], call.w2.shape[1])
    return torch.full(shape, math.nan, dtype=call.out_dtype, device=call.w2.device)


def relative_error(out: Tensor, call: ExpertsCall) -> float:
    """Relative L2 distance to the emulating oracle, computed in float64 and rounded once to the output dtype."""
    exact = experts_reference(call, dtype=torch.float64).to(call.out_dtype).double()
    return float((out.double() - exact).norm() / exact.norm())
