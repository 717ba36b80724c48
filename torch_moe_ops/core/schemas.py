"""Every schema of `torch.ops.moeq`, defined once, on every machine.

Argument order, never varied: hidden states | routing | w13, its scales, its bias | w2 likewise |
activation scales | plain values. New arguments are appended with a default, so that an exported
graph stays valid. Kernels attach to these names from Python (`ops/`) and from C++ (`csrc/`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from torch_moe_ops.core.schemes import SCHEMES, Scheme

LIB = torch.library.Library("moeq", "DEF")

_ROUTED = "Tensor hidden_states, Tensor? hidden_states_scale, Tensor topk_ids, Tensor topk_weights"
_ROUTER = "Tensor hidden_states, Tensor? hidden_states_scale, Tensor router_logits, Tensor? routing_bias"

_INPUT_SCALES = "Tensor? a1_gscale, Tensor? a2_gscale"


def _scaled(*, alphas: bool = False, zero_points: bool = False) -> str:
    """w13 and w2, each with its scales and its bias."""
    parts = []
    for name, gemm in (("w13", "1"), ("w2", "2")):
        parts += [f"Tensor {name}", f"Tensor {name}_scale"]
        parts += [f"Tensor? {name}_zero_point"] if zero_points else []
        parts += [f"Tensor g{gemm}_alphas"] if alphas else []
        parts += [f"Tensor? {name}_bias"]
    return ", ".join(parts)


def _weights(scheme: Scheme) -> str:
    """The weight arguments of an op, in the schema's order."""
    if scheme.scales is None:
        return "Tensor w13, Tensor? w13_bias, Tensor w2, Tensor? w2_bias"
    text = _scaled(alphas=scheme.has_scale_2, zero_points=scheme.has_zero_point)
    return f"{text}, {_INPUT_SCALES}" if scheme.static_acts else text


_ACTIVATION = (
    'str activation="silu", float? swiglu_alpha=None, float? swiglu_beta=None, float? swiglu_limit=None, '
    "int num_experts=0, int local_expert_offset=0"
)
_TAIL = 'str weight_policy="exact", ScalarType? out_dtype=None'
_EXCHANGE = "str transport, str group, int world_size, int max_tokens"
_METHOD = "int n_group=0, int topk_group=0, float routed_scaling_factor=1.0, bool? renormalize=None"


FAMILIES: dict[str, tuple[Scheme, ...]] = {}  # op family -> its schemes; mxfp6 has one per element
for _scheme in SCHEMES.values():
    FAMILIES[_scheme.family] = (*FAMILIES.get(_scheme.family, ()), _scheme)


def _format_arguments(family: str) -> str:
    """act_format, and the element of the weights where a family has several."""
    schemes = FAMILIES[family]
    element = f', str element="{schemes[0].element}"' if len(schemes) > 1 else ""
    return f'str act_format="{schemes[0].act_formats[0]}", {_ACTIVATION}{element}'


def _routed_arguments(family: str) -> str:
    return (
        f"{_ROUTED}, {_weights(FAMILIES[family][0])}, str backend, {_format_arguments(family)}, "
        f"bool router_weight_on_input=False, {_TAIL}"
    )


def _monolithic_arguments(family: str) -> str:
    return (
        f"{_ROUTER}, {_weights(FAMILIES[family][0])}, str backend, str routing_method, int top_k, "
        f"{_format_arguments(family)}, {_METHOD}, {_TAIL}"
    )


def _routed(family: str) -> str:
    return f"({_routed_arguments(family)}) -> Tensor"


def _routed_out(family: str) -> str:
    return f"({_routed_arguments(family)}, *, Tensor(a!) out) -> ()"


def _monolithic(family: str) -> str:
    return f"({_monolithic_arguments(family)}) -> Tensor"


# The weights of every scheme, by the names of ExpertsCall.
_ANY_WEIGHTS = (
    "Tensor w13, Tensor? w13_scale, Tensor? w13_zero_point, Tensor? g1_alphas, Tensor? w13_bias, "
    "Tensor w2, Tensor? w2_scale, Tensor? w2_zero_point, Tensor? g2_alphas, Tensor? w2_bias"
)
_ANY_OPTIONS = f"str backend, str scheme, str act_format, {_ACTIVATION}, bool router_weight_on_input=False, {_TAIL}"


def _routed_backward() -> str:
    """Of every routed op: the gradient of its output, its arguments by the names of ExpertsCall, and what is wanted."""
    return (
        f"(Tensor grad_output, {_ROUTED}, {_ANY_WEIGHTS}, {_INPUT_SCALES}, {_ANY_OPTIONS}, "
        "bool[] wanted=[True, True, False, False]) -> "
        "(Tensor grad_hidden_states, Tensor grad_topk_weights, Tensor grad_w13_bias, Tensor grad_w2_bias)"
    )


# Every routed op with adapters beside its experts, by the names of ExpertsCall and LoraArguments.
_LORA = (
    "Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, "
    f"{_ANY_WEIGHTS}, {_INPUT_SCALES}, Tensor? lora_a13, Tensor? lora_b13, Tensor? lora_a2, Tensor? lora_b2, "
    f"Tensor lora_scaling, Tensor? lora_ids, {_ANY_OPTIONS}, bool lora_merged=False"
)
_LORA_GRADIENTS = ", ".join(
    f"Tensor grad_{name}"
    for name in ("hidden_states", "topk_weights", "w13_bias", "w2_bias", "lora_a13", "lora_b13", "lora_a2", "lora_b2")
)


# Every routed op with the tables of ep_place, and an exchange around it.
_EXCHANGED = (
    "Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor first, Tensor count, Tensor slots, "
    f"Tensor(a!) load, {_ANY_WEIGHTS}, {_INPUT_SCALES}, int rank, {_EXCHANGE}, int[] slots_of_ranks, "
    f"ScalarType partial_dtype, {_ANY_OPTIONS}"
)


# Bodies: ops/moe.py and ops/moe_routed.py of the experts, the other files of ops/ of the rest.
SCHEMAS: dict[str, str] = {
    "route": (
        "(Tensor router_logits, Tensor? routing_bias, str routing_method, int top_k, "
        f"{_METHOD}, int num_shared_experts=0, Tensor? shared_expert_weights=None) -> "
        "(Tensor topk_ids, Tensor topk_weights)"
    ),
    "route_hidden": (
        "(Tensor hidden_states, Tensor router_weight, Tensor? router_bias, Tensor? routing_bias, str routing_method, "
        f"int top_k, {_METHOD}, ScalarType? logits_dtype=None, int num_shared_experts=0, "
        "Tensor? shared_expert_weights=None) -> (Tensor topk_ids, Tensor topk_weights, Tensor router_logits)"
    ),
    "moe_hidden": (
        "(Tensor hidden_states, Tensor router_weight, Tensor? router_bias, Tensor? routing_bias, "
        f"{_ANY_WEIGHTS}, {_INPUT_SCALES}, str backend, str scheme, str act_format, str routing_method, int top_k, "
        f"{_ACTIVATION}, {_METHOD}, ScalarType? logits_dtype=None, {_TAIL}) -> "
        "(Tensor output, Tensor topk_ids, Tensor topk_weights, Tensor router_logits)"
    ),
    "quantize_nvfp4": "(Tensor x, Tensor gscale) -> (Tensor codes, Tensor scale)",
    "quantize_mxfp4": '(Tensor x, str rule="rceil") -> (Tensor codes, Tensor scale)',
    "quantize_mxfp8": '(Tensor x, str rule="rceil") -> (Tensor codes, Tensor scale)',
    "quantize_fp8": "(Tensor x, Tensor? gscale=None, int group=0) -> (Tensor codes, Tensor scale)",
    "quantize_int8": "(Tensor x, Tensor? gscale=None) -> (Tensor codes, Tensor scale)",
    "dynamic_gscale_nvfp4": "(Tensor x) -> Tensor",
    "swizzle_scale": "(Tensor scale) -> Tensor",
    "unswizzle_scale": "(Tensor swizzled, int rows, int cols) -> Tensor",
    "ep_place": (
        "(Tensor topk_ids, Tensor first, Tensor count, Tensor slots, Tensor(a!) load, int rank) -> Tensor places"
    ),
    "ep_dispatch": (
        f"(Tensor hidden_states, Tensor? hidden_states_scale, Tensor topk_ids, Tensor topk_weights, {_EXCHANGE}, "
        "int[] slots=[], int capacity=0) -> (Tensor hidden_states, Tensor hidden_states_scale, Tensor topk_ids, "
        "Tensor topk_weights, Tensor positions)"
    ),
    "ep_combine": (
        f"(Tensor partial_rows, Tensor positions, SymInt num_tokens, {_EXCHANGE}, ScalarType out_dtype, "
        'int[] slots=[], int capacity=0, str tp_group="", int tp_size=1, '
        "ScalarType? wire_dtype=None) -> Tensor"
    ),
    "ep_experts": f"({_EXCHANGED}) -> Tensor",
    "host_experts": (
        "(Tensor hidden_states, Tensor places, Tensor topk_weights, str layer, ScalarType? out_dtype=None) -> Tensor"
    ),
    "nvfp4_moe": _monolithic("nvfp4"),
    "nvfp4_moe_routed": _routed("nvfp4"),
    "nvfp4_moe_routed.out": _routed_out("nvfp4"),
    "mxfp4_moe": _monolithic("mxfp4"),
    "mxfp4_moe_routed": _routed("mxfp4"),
    "mxfp4_moe_routed.out": _routed_out("mxfp4"),
    "mxfp8_moe": _monolithic("mxfp8"),
    "mxfp8_moe_routed": _routed("mxfp8"),
    "mxfp8_moe_routed.out": _routed_out("mxfp8"),
    "mxfp6_moe": _monolithic("mxfp6"),
    "mxfp6_moe_routed": _routed("mxfp6"),
    "mxfp6_moe_routed.out": _routed_out("mxfp6"),
    "mxint4_moe": _monolithic("mxint4"),
    "mxint4_moe_routed": _routed("mxint4"),
    "mxint4_moe_routed.out": _routed_out("mxint4"),
    "int4_moe": _monolithic("int4"),
    "int4_moe_routed": _routed("int4"),
    "int4_moe_routed.out": _routed_out("int4"),
    "fp8_moe": _monolithic("fp8"),
    "fp8_moe_routed": _routed("fp8"),
    "fp8_moe_routed.out": _routed_out("fp8"),
    "fp8_block_moe": _monolithic("fp8_block"),
    "fp8_block_moe_routed": _routed("fp8_block"),
    "fp8_block_moe_routed.out": _routed_out("fp8_block"),
    "int8_moe": _monolithic("int8"),
    "int8_moe_routed": _routed("int8"),
    "int8_moe_routed.out": _routed_out("int8"),
    "moe_routed_backward": _routed_backward(),
    "moe_routed_lora": f"({_LORA}) -> Tensor",
    "moe_routed_lora_backward": f"(Tensor grad_output, {_LORA}, bool[] wanted=[]) -> ({_LORA_GRADIENTS})",
    "grouped_linear": (
        "(Tensor x, Tensor offsets, Tensor weight, Tensor? weight_scale, Tensor? weight_zero_point, "
        "Tensor? weight_scale_2, str backend, str scheme, str projection, int hidden_size, int intermediate_size, "
        'bool is_gated=True, bool transposed=False, str weight_policy="exact") -> Tensor'
    ),
    "moe": _monolithic(""),
    "moe_routed": _routed(""),
    "moe_routed.out": _routed_out(""),
}


def family_of(op: str) -> str:
    """The op family of an expert op: "nvfp4" of nvfp4_moe and nvfp4_moe_routed, "" of moe."""
    return op.removesuffix("_routed").removesuffix("moe").removesuffix("_")


def _define_all() -> None:
    # `.out` overloads carry no Tag.out: with it, Inductor of torch 2.13 puts the overload in place of the
    # functional op and passes the tensors first, which shifts every argument behind an absent one.
    for name, schema in SCHEMAS.items():
        LIB.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))


_define_all()


@cache
def arguments(name: str) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names of an op's positional arguments, and a default for each (None where it has none)."""
    schema = torch._C.parse_schema(f"moeq::{name}{SCHEMAS[name]}")
    positional = [a for a in schema.arguments if not a.kwarg_only]
    return tuple(a.name for a in positional), tuple(a.default_value for a in positional)
