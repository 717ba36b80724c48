"""Every schema of `torch.ops.moeq`, defined once, on every machine.

Argument order, never varied: hidden states | routing | w13, its scales, its bias | w2 likewise |
activation scales | plain values. New arguments are appended with a default, so that an exported
graph stays valid. Kernels attach to these names from Python (`ops/`) and from C++ (`csrc/`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from torch_moe_ops.schemes import SCHEMES

LIB = torch.library.Library("moeq", "DEF")

_ROUTED = "Tensor hidden_states, Tensor? hidden_states_scale, Tensor topk_ids, Tensor topk_weights"
_ROUTER = "Tensor hidden_states, Tensor? hidden_states_scale, Tensor router_logits, Tensor? routing_bias"

# The weight arguments of each scheme.
_WEIGHTS = {
    "nvfp4": (
        "Tensor w13, Tensor w13_scale, Tensor g1_alphas, Tensor? w13_bias, "
        "Tensor w2, Tensor w2_scale, Tensor g2_alphas, Tensor? w2_bias, "
        "Tensor? a1_gscale, Tensor? a2_gscale"
    ),
    "none": "Tensor w13, Tensor? w13_bias, Tensor w2, Tensor? w2_bias",
}

_ACTIVATION = (
    'str activation="silu", float? swiglu_alpha=None, float? swiglu_beta=None, float? swiglu_limit=None, '
    "int num_experts=0, int local_expert_offset=0"
)
_TAIL = 'str weight_policy="exact", ScalarType? out_dtype=None'
_METHOD = (
    "int n_group=0, int topk_group=0, float routed_scaling_factor=1.0, bool? renormalize=None"
)


def _routed_arguments(scheme: str) -> str:
    act_format = SCHEMES[scheme].act_formats[0]
    return (
        f'{_ROUTED}, {_WEIGHTS[scheme]}, str backend, str act_format="{act_format}", {_ACTIVATION}, '
        f"bool router_weight_on_input=False, {_TAIL}"
    )


def _monolithic_arguments(scheme: str) -> str:
    act_format = SCHEMES[scheme].act_formats[0]
    return (
        f"{_ROUTER}, {_WEIGHTS[scheme]}, str backend, str routing_method, int top_k, "
        f'str act_format="{act_format}", {_ACTIVATION}, {_METHOD}, {_TAIL}'
    )


def _build() -> dict[str, str]:
    # `.out` returns its argument where torch can express that (Tag.out, 2.13), and nothing before.
    out_return = "Tensor(a!)" if hasattr(torch.Tag, "out") else "()"
    table = {
        "route": (
            "(Tensor router_logits, Tensor? routing_bias, str routing_method, int top_k, "
            f"{_METHOD}) -> (Tensor topk_ids, Tensor topk_weights)"
        ),
        "quantize_nvfp4": "(Tensor x, Tensor gscale) -> (Tensor codes, Tensor scale)",
        "dynamic_gscale_nvfp4": "(Tensor x) -> Tensor",
        "swizzle_scale": "(Tensor scale) -> Tensor",
        "unswizzle_scale": "(Tensor swizzled, int rows, int cols) -> Tensor",
    }
    for name, scheme in SCHEMES.items():
        table[f"{scheme.op_prefix}moe"] = f"({_monolithic_arguments(name)}) -> Tensor"
        table[f"{scheme.op_prefix}moe_routed"] = f"({_routed_arguments(name)}) -> Tensor"
        table[f"{scheme.op_prefix}moe_routed.out"] = f"({_routed_arguments(name)}, *, Tensor(a!) out) -> {out_return}"
    return table


SCHEMAS: dict[str, str] = _build()


def _define_all() -> None:
    for name, schema in SCHEMAS.items():
        tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,)
        if name.endswith(".out") and hasattr(torch.Tag, "out"):
            tags += (torch.Tag.out,)
        LIB.define(name + schema, tags=tags)


_define_all()


@lru_cache(maxsize=None)
def arguments(name: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names of an op's positional arguments, and a default for each (None where it has none)."""
    schema = torch._C.parse_schema(f"moeq::{name}{SCHEMAS[name]}")
    positional = [a for a in schema.arguments if not a.kwarg_only]
    return tuple(a.name for a in positional), tuple(a.default_value for a in positional)
