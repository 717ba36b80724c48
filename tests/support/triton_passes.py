"""Checked calls for passes of the Triton engine, of layers whose backend need not run here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from problems import Case, make_batch, make_raw
from triton_cases import DEVICE

import torch_moe_ops as moe
from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.activations import ACTIVATIONS
from torch_moe_ops.core.call import FIELDS, ExpertsCall
from torch_moe_ops.core.layout import Sizes
from torch_moe_ops.core.schemes import SCHEMES

LAYER = Case(experts=3, hidden=64, inter=96, tokens=9, top_k=2)
CONSTANTS = {"swigluoai": (1.702, 1.0, 1.5), "swiglustep": (1.0, 0.0, 0.75), "situ": (1.3, 0.8, float("inf"))}


INT4_SCALES = (  # dtype, zero points, values of K: a form of the layout of `cuda_sm90_int4` each
    (torch.bfloat16, True, 64),
    (torch.float16, False, 64),
    (torch.float16, True, 64),
    (torch.bfloat16, True, 32),
    (torch.float16, False, 32),
    (torch.float32, False, 64),
    (torch.float32, True, 64),
)


def with_int4_scales(raw: moe.RawWeights, dtype: torch.dtype, zero: bool, group: int) -> moe.RawWeights:
    """Codes of an int4 layer with other scales, a random one for each `group` values of K, and zero points."""
    g, changed = torch.Generator().manual_seed(1), dict[str, Any]()
    for name, k in (("w13", raw.hidden_size), ("w2", raw.intermediate_size)):
        shape = (*getattr(raw, name).shape[:2], k // group)
        changed[f"{name}_scale"] = (0.05 * torch.rand(shape, generator=g) + 0.01).to(dtype)
        if zero:
            changed[f"{name}_zero_point"] = torch.randint(0, 16, shape, generator=g).to(torch.uint8)
    return replace(raw, **changed)


def make_call(case: Case, backend: str, **fields: Any) -> tuple[ExpertsCall, Sizes]:
    """A checked call of a layer as a backend lays it out, which need not run here, on DEVICE."""
    raw = make_raw(case)
    x, ids, weights = make_batch(case)
    given = dict.fromkeys(FIELDS) | BACKENDS[backend].prepare(raw)
    alpha, beta, limit = CONSTANTS.get(case.activation, ACTIVATIONS[case.activation].constants)
    given |= {"scheme": case.scheme, "act_format": "none", "weight_policy": "exact", "activation": case.activation}
    given |= {"router_weight_on_input": False, "local_expert_offset": 0, "num_experts": 0, "out_dtype": case.dtype}
    given |= {"swiglu_alpha": alpha, "swiglu_beta": beta, "swiglu_limit": limit}
    given |= {"hidden_states": x, "topk_ids": ids, "topk_weights": weights}
    if raw.w13_scale_2 is not None:
        alphas = raw.w13_scale_2.squeeze(1) if raw.w13_scale_2.shape[1] == 1 else raw.w13_scale_2
        given |= {"g1_alphas": alphas, "g2_alphas": raw.w2_scale_2}
    given |= fields
    given = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    inter = BACKENDS[backend].layout.intermediate_size(SCHEMES[case.scheme], tuple(given["w2"].shape))
    return ExpertsCall(**given), Sizes(case.experts, case.hidden, inter, raw.is_gated, given["w13"].dtype)
