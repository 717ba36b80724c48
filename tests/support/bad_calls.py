"""Wrong calls of the ops, by table: one argument of a right call changed, and what the caller is told.

The expert ops share their checks (test_errors.py holds them to it), so what these demand stands here once, for the op
of one scheme; of the other schemes there is what they demand of their own arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from problems import Case
from samples import SAMPLES, monolithic_sample, packed_sample, routed_sample

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemas import FAMILIES, arguments
from torch_moe_ops.core.schemes import ZERO_POINT_DTYPES

NVFP4 = Case(act_format="nvfp4", input_scale="tensor", bias=True)
PLAIN = Case(scheme="none", hidden=40, inter=24, bias=True)

ONE_SCALE = (
    "a1_gscale must have shape () where hidden_states are packed: they were quantized before an expert was known"
)


class Wrong(NamedTuple):
    """value: in the place of the argument; a function is given what was there. base: a key of _base."""

    op: str
    base: str
    argument: str
    value: Any
    told: str

    def __str__(self) -> str:
        return f"{self.op}-{self.argument}-{self.told[:40]}"


def _rows(op: str, base: str, *rows: tuple[str, Any, str]) -> list[Wrong]:
    return [Wrong(op, base, *row) for row in rows]


def _shared() -> list[Wrong]:
    """What all expert ops demand."""
    return _rows(
        "nvfp4_moe_routed",
        "nvfp4",
        ("hidden_states", lambda t: t[0], "hidden_states must have shape [num_tokens, hidden_size], got (64,)"),
        ("hidden_states", lambda t: t.double(), "hidden_states must have one of the dtypes"),
        ("hidden_states", lambda t: t[:, :16], "hidden_states must have hidden_size 64 (rows of w2), got 16"),
        ("hidden_states", lambda t: t[:, :24], "hidden_size must be a positive multiple of 16, got 24"),
        ("hidden_states", lambda t: t[:, :0], "hidden_size must be a positive multiple of 16, got 0"),
        ("w13", lambda t: t.to(torch.int64), "w13 must have dtype"),
        ("w13", lambda t: t[:0], "w13 must have at least 3 dimensions and one expert"),
        ("w13", lambda t: t[:, :-1], "w13 must have shape"),
        ("w13", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "w13 must be contiguous"),
        ("w2", lambda t: t[0, 0], "w2 must have at least 3 dimensions"),
        ("w2", lambda t: t[:-1], "w2 must have shape"),
        ("w13_bias", lambda t: t.bfloat16(), "w13_bias must have dtype torch.float32, got torch.bfloat16"),
        ("w13_bias", lambda t: t[:, :-1], "w13_bias must have shape"),
        ("w2_bias", lambda t: t[:-1], "w2_bias must have shape"),
        ("backend", "nonsense", f"backend must be one of {list(BACKENDS)}, got 'nonsense'"),
        ("backend", "auto", f"backend must be one of {list(BACKENDS)}, got 'auto'"),
        ("activation", "nonsense", "activation must be one of"),
        ("act_format", "nonsense", "act_format must be one of"),
        ("weight_policy", "folded", "weight_policy must be one of ['exact']"),
        ("swiglu_alpha", 1.5, "swiglu_alpha must"),
        ("local_expert_offset", -1, "local_expert_offset must be at least 0, got -1"),
        ("num_experts", 3, "num_experts must be 0 or at least local_expert_offset + local experts = 4, got 3"),
        ("out_dtype", torch.int32, "out_dtype must be None or one of"),
    )


def _routed() -> list[Wrong]:
    """What the routed form of an expert op demands of the routing, and its `.out` of the output."""
    ids = "topk_ids must have dtype torch.int32 (fused_moe_routed also takes torch.int64), got torch.int64"
    weights = "topk_weights must have dtype torch.float32 (fused_moe_routed also takes other float dtypes), got"
    return [
        *_rows(
            "moe_routed",
            "plain",
            ("topk_ids", lambda t: t.long(), ids),
            ("topk_ids", lambda t: t[:-1], "topk_ids must have num_tokens = 5 rows like hidden_states, got (4, 2)"),
            ("topk_ids", lambda t: t[:, 0], "topk_ids must have shape [num_tokens, top_k]"),
            ("topk_ids", lambda t: t[:, :0], "topk_ids must have shape [num_tokens, top_k]"),
            ("topk_weights", lambda t: t.bfloat16(), weights),
            ("topk_weights", lambda t: t[:, :1], "topk_weights must have shape (5, 2) like topk_ids, got (5, 1)"),
            ("router_weight_on_input", True, "router_weight_on_input must be False unless top_k is 1, got 'top_k = 2'"),
        ),
        *_rows(
            "moe_routed.out",
            "plain",
            ("out", lambda t: t[:-1], "out must have shape"),
            ("out", lambda t: t.double(), "out must have dtype torch.bfloat16, got torch.float64"),
            ("out", lambda t: t.T.contiguous().T, "out must be contiguous"),
            ("topk_ids", lambda t: t.long(), ids),
        ),
    ]


def _monolithic() -> list[Wrong]:
    """What the monolithic form of an expert op demands of the routing."""
    offset = "num_experts must be 0 or at least local_expert_offset + local experts = 5, got 4"
    local = "num_experts must be 8, the columns of router_logits, where only 4 experts are local, got 0"
    rows = "router_logits must have num_tokens = 5 rows like hidden_states, got (4, 4)"
    return _rows(
        "moe",
        "plain",
        ("router_logits", lambda t: torch.zeros(5, 8), local),
        ("router_logits", lambda t: t[:-1], rows),
        ("router_logits", lambda t: t.long(), "router_logits must have"),
        ("num_experts", 3, "num_experts must be 0 or 4, the columns of router_logits, got 3"),
        ("local_expert_offset", 1, offset),
        ("routing_method", "nonsense", "routing_method must be one of"),
        ("top_k", 5, "top_k must be"),
        ("top_k", 0, "top_k must be"),
        ("routing_bias", torch.zeros(4), "routing_bias must"),
        ("backend", "nonsense", "backend must be one of"),
    )


def _packed() -> list[Wrong]:
    """What hidden states that were quantized before the call demand."""
    op, weighted = "nvfp4_moe_routed", "hidden_states must be unquantized where the router weight goes on the input"
    return [
        *_rows(op, "nvfp4", ("hidden_states_scale", torch.zeros(5, 4), "hidden_states must have dtype torch.uint8 (p")),
        *_rows(
            op,
            "packed",
            ("act_format", "none", "hidden_states_scale must be None for act_format 'none', got (5, 4)"),
            ("hidden_states_scale", None, "hidden_states must have one of the dtypes"),
            ("hidden_states_scale", lambda t: t[:, :-1], "hidden_states_scale must have shape (5, 4), got (5, 3)"),
            ("hidden_states_scale", lambda t: t.float(), "hidden_states_scale must have dtype torch.float8_e4m3fn"),
            ("a1_gscale", None, "a1_gscale must be given where hidden_states are packed"),
            ("a1_gscale", lambda t: t.expand(4).contiguous(), ONE_SCALE),
        ),
        *_rows(op, "packed1", ("router_weight_on_input", True, f"{weighted}, got torch.uint8")),
        *_rows("nvfp4_moe", "packed1", ("routing_method", "llama4", f"{weighted}, got torch.uint8")),
    ]


def _schemes() -> list[Wrong]:
    """What each scheme demands of its own arguments."""
    rows = _rows(
        "nvfp4_moe_routed",
        "nvfp4",
        ("w13", lambda t: t.to(torch.bfloat16), "w13 must have dtype torch.uint8, got torch.bfloat16"),
        ("w13_scale", lambda t: t.float(), "w13_scale must have dtype torch.float8_e4m3fn or torch.uint8, got torch.f"),
        ("w2_scale", lambda t: t[..., :-1], "w2_scale must have shape"),
        ("g1_alphas", lambda t: t.double(), "g1_alphas must have dtype torch.float32"),
        ("g1_alphas", lambda t: t[:-1], "g1_alphas must have shape (4,) or (4, 2), got (3,)"),
        ("g2_alphas", lambda t: t[0], "g2_alphas must have shape (4,), got ()"),
        ("a1_gscale", lambda t: t.reshape(1), "a1_gscale must have shape () or (4,), got (1,)"),
        ("a2_gscale", lambda t: t.double(), "a2_gscale must have dtype torch.float32"),
        ("act_format", "int8", "act_format must be one of ['nvfp4', 'none', 'fp8'], got 'int8'"),
    )
    rows += _rows(
        "moe_routed",
        "plain",
        ("hidden_states", lambda t: t.half(), "w13 must have dtype torch.float16 like hidden_states, got torch.bf"),
        ("w2", lambda t: t.half(), "w2 must have dtype torch.bfloat16, got torch.float16"),
        ("act_format", "fp8", "act_format must be one of ['none'], got 'fp8'"),
    )
    for family, (scheme, *others) in FAMILIES.items():
        if family in ("nvfp4", ""):
            continue
        acts = f"act_format must be one of {list(scheme.act_formats)}, got 'nvfp4'"
        own: list[tuple[str, Any, str]] = [
            ("w13", lambda t: t.to(torch.float64), "w13 must have dtype"),
            ("w2", lambda t: t[:, :-1], "w2 must have shape"),
            ("w13_scale", lambda t: t.to(torch.float64), "w13_scale must have dtype"),
            ("w2_scale", lambda t: t[:-1], "w2_scale must have shape"),
            ("w2_scale", None, "w2_scale"),
            ("act_format", "nvfp4", acts),
            ("hidden_states", lambda t: t[:, :-1], "hidden_size must be a positive multiple"),
        ]
        if scheme.has_zero_point:
            zeros = torch.zeros(4, 128, 2, dtype=torch.int32)
            own.append(("w13_zero_point", zeros, "w13_zero_point must have dtype"))
            groups = torch.zeros(4, 128, 3, dtype=ZERO_POINT_DTYPES[scheme.name])  # right for other scales
            own.append(
                ("w13_zero_point", groups, "w13_zero_point must have shape (4, 128, 1) like w13_scale, got (4, 1")
            )
        if scheme.static_acts and scheme.act_formats[0] not in scheme.static_acts:
            own.append(("a1_gscale", torch.ones(()), "a1_gscale must be None for act_format"))
        if others:
            element = ("element", "e1m4", "element must be one of ['e3m2', 'e2m3'], got 'e1m4'")
            own.append(element)
            rows += _rows(f"{family}_moe", family, element)
        rows += _rows(f"{family}_moe_routed", family, *own)
    return rows


def _others() -> list[Wrong]:
    """What the ops demand that run no experts."""
    x16, x40 = torch.zeros(3, 16), torch.zeros(3, 40)
    swizzled = (
        "swizzled must hold 3072 elements in its last dimension (rows=130, cols=9 padded to 128x4 tiles), got 2048"
    )
    rows: list[tuple[str, str, Any, str]] = [
        ("route", "router_logits", lambda t: t.long(), "router_logits must have"),
        ("route", "router_logits", lambda t: t[0], "router_logits must have"),
        ("route", "router_logits", lambda t: torch.zeros(2, 2049), "num_experts must"),
        ("route", "routing_method", "softmax", "routing_method must be one of"),
        ("route", "top_k", 33, "top_k must"),
        ("route", "routing_bias", torch.zeros(16), "routing_bias must"),
        ("route", "n_group", 3, "topk_group must be in [1, 3] with n_group=3, got 0"),
        ("route", "num_shared_experts", -1, "num_shared_experts must be in [0, 28] with top_k=4, got -1"),
        ("route", "num_shared_experts", 29, "num_shared_experts must be in [0, 28] with top_k=4, got 29"),
        ("route", "shared_expert_weights", x16, "shared_expert_weights must be None unless num_shared_experts is at"),
        ("grouped_linear", "x", lambda t: t[:, 1:], "x must have shape [rows, 96], got (10, 95)"),
        ("grouped_linear", "x", lambda t: t.double(), "x must have one of the dtypes"),
        ("grouped_linear", "offsets", lambda t: t[1:], "offsets must have shape (4,), got (3,)"),
        ("grouped_linear", "offsets", lambda t: t.long(), "offsets must have dtype torch.int32"),
        ("grouped_linear", "weight", lambda t: t.flatten(), "weight must have at least 3 dimensions"),
        ("grouped_linear", "weight_scale", None, "weight_scale must be a Tensor, got None"),
        ("grouped_linear", "weight_zero_point", x16, "weight_zero_point must be None for scheme 'nvfp4'"),
        ("grouped_linear", "weight_scale_2", torch.ones(3), "weight_scale_2 must have shape (4,) or (4, 1) or (4, 2)"),
        ("grouped_linear", "projection", "w1", "projection must be one of ['w13', 'w2'], got 'w1'"),
        ("grouped_linear", "scheme", "fp7", "scheme must be one of"),
        ("grouped_linear", "backend", "cuda_sm90_int4", "backend must have a layout of nvfp4 weights"),
        ("grouped_linear", "hidden_size", 40, "hidden_size must be a positive multiple of 16, got 40"),
        ("grouped_linear", "weight_policy", "loose", "weight_policy must be one of"),
        ("quantize_nvfp4", "x", lambda t: t.double(), "x must have one of the dtypes"),
        ("quantize_nvfp4", "x", lambda t: t[:, :24], "x must have K a positive multiple of 16, got 24"),
        ("quantize_nvfp4", "gscale", lambda t: t.double(), "gscale must have dtype torch.float32"),
        ("quantize_nvfp4", "gscale", torch.ones(4), "gscale must have shape () or (5,) (one per row), got (4,)"),
        ("dynamic_gscale_nvfp4", "x", lambda t: t[:, :8], "x must have K a positive multiple of 16, got 8"),
        ("quantize_mxfp4", "x", x40, "x must have K a positive multiple of 32, got 40"),
        ("quantize_mxfp8", "rule", "up", "rule must be one of ['floor', 'rceil', 'even'], got 'up'"),
        ("quantize_fp8", "group", -1, "group must be 0 (the whole row) or positive, got -1"),
        ("quantize_fp8", "gscale", torch.ones(2), "gscale must have shape () or (5,)"),
        ("quantize_int8", "x", x40.double(), "x must have one of the dtypes"),
        ("quantize_int8", "gscale", x40[0], "gscale must have shape () or (5,)"),
        ("swizzle_scale", "scale", x16, "scale must have a dtype of 1 or 2 bytes, got torch.float32"),
        ("swizzle_scale", "scale", lambda t: t[0, 0], "scale must have shape [..., rows, cols], got (6,)"),
        ("unswizzle_scale", "rows", -1, "rows must be at least 0, got -1"),
        ("unswizzle_scale", "cols", 9, swizzled),
        *_exchanged(),
        *_on_the_host(),
        *_of_hidden(),
    ]
    return [Wrong(op, "sample", *row) for op, *row in rows]


def _of_hidden() -> list[tuple[str, str, Any, str]]:
    """A router's product of 5 tokens, hidden_size 24, and 16 experts, of which 4 are chosen."""
    rows: list[tuple[str, Any, str]] = [
        ("hidden_states", None, "hidden_states must be a Tensor, got None"),
        ("hidden_states", lambda t: t[0], "hidden_states must have shape [num_tokens, hidden_size], got (24,)"),
        ("hidden_states", lambda t: t.double(), "hidden_states must have one of the dtypes"),
        ("hidden_states", lambda t: t[:, 1:], "router_weight must have shape [num_experts, 23] for such hidden_states"),
        ("router_weight", lambda t: t[0], "router_weight must have shape [num_experts, 24], got (24,)"),
        ("router_weight", lambda t: t.long(), "router_weight must have one of the dtypes"),
        ("router_weight", torch.zeros(2049, 24), "num_experts must be in [1, 2048], got 2049"),
        ("router_bias", torch.zeros(15), "router_bias must have shape (16,), got (15,)"),
        ("router_bias", torch.zeros(16).double(), "router_bias must have one of the dtypes"),
        ("routing_bias", torch.zeros(16), "routing_bias must be None for 'renormalize'"),
        ("routing_method", "softmax", "routing_method must be one of"),
        ("top_k", 17, "top_k must be in [1, 16], got 17"),
        ("logits_dtype", torch.float64, "logits_dtype must be None or one of"),
        ("num_shared_experts", 29, "num_shared_experts must be in [0, 28] with top_k=4, got 29"),
        ("shared_expert_weights", torch.zeros(5, 1), "shared_expert_weights must be None unless num_shared_experts is"),
    ]
    return [("route_hidden", *row) for row in rows]


def _layer_of_hidden() -> list[Wrong]:
    """A layer of 4 experts, hidden_size 96, intermediate_size 64, 5 tokens, with its router."""
    rows: list[tuple[str, Any, str]] = [
        ("hidden_states", None, "hidden_states must be a Tensor, got None"),
        ("hidden_states", lambda t: t[0], "hidden_states must have shape [num_tokens, hidden_size], got (96,)"),
        ("router_weight", lambda t: t[:, 1:], "router_weight must have shape [num_experts, 96] for such hidden_states"),
        ("router_weight", lambda t: t.long(), "router_weight must have one of the dtypes"),
        ("num_experts", 5, "num_experts must be 0 or 4, the rows of router_weight, got 5"),
        ("router_bias", torch.zeros(3), "router_bias must have shape (4,), got (3,)"),
        ("routing_bias", torch.zeros(4), "routing_bias must be None for 'renormalize'"),
        ("routing_method", "softmax", "routing_method must be one of"),
        ("top_k", 5, "top_k must be in [1, 4], got 5"),
        ("logits_dtype", torch.float64, "logits_dtype must be None or one of"),
        ("w13", None, "w13 must be a Tensor, got None"),
        ("w2", lambda t: t[:-1], "w2 must have shape"),
        ("scheme", "fp7", "scheme must be one of"),
        ("backend", "nonsense", "backend must be one of"),
        ("out_dtype", torch.float64, "out_dtype must be None or one of"),
    ]
    return [Wrong("moe_hidden", "sample", *row) for row in rows]


def _lora() -> list[Wrong]:
    """What adapters demand, of a layer of 4 experts, hidden_size 96, intermediate_size 64, 5 tokens."""
    a13 = "lora_a13 must have shape [4, ranks, 96], ranks a positive multiple of the 1 adapters, got"
    rows: list[tuple[str, Any, str]] = [
        ("lora_a13", lambda t: t[0], f"{a13} (3, 96)"),
        ("lora_a13", lambda t: t[:, :, 1:], f"{a13} (4, 3, 95)"),
        ("lora_a13", lambda t: t[:, :0], f"{a13} (4, 0, 96)"),
        ("lora_a13", lambda t: t.double(), "lora_a13 must have one of the dtypes"),
        ("lora_a13", None, "lora_a13 must be given with lora_b13, got None"),
        ("lora_b13", None, "lora_b13 must be given with lora_a13, got None"),
        ("lora_b13", lambda t: t[:, 2:], "lora_b13 must have shape (4, 128, 3), got (4, 126, 3)"),
        ("lora_b13", lambda t: t[:, :, 1:], "lora_b13 must have shape (4, 128, 3), got (4, 128, 2)"),
        ("lora_a2", lambda t: t[:, :, 1:], "lora_a2 must have shape [4, ranks, 64], ranks a positive multiple"),
        ("lora_b2", lambda t: t[1:], "lora_b2 must have shape (4, 96, 3), got (3, 96, 3)"),
        ("lora_b2", lambda t: t.long(), "lora_b2 must have one of the dtypes"),
        ("lora_scaling", None, "lora_scaling must be a Tensor, got None"),
        ("lora_scaling", lambda t: t.double(), "lora_scaling must have dtype torch.float32, got torch.float64"),
        ("lora_scaling", lambda t: t[0], "lora_scaling must have shape [adapters], of at least one, got ()"),
        ("lora_scaling", torch.ones(3), "lora_ids must be given for 3 adapters, got None"),
        (
            "lora_ids",
            torch.zeros(4, dtype=torch.int32),
            "lora_ids must have shape (5,), a row for each token, got (4,)",
        ),
        ("lora_ids", torch.zeros(5, dtype=torch.int64), "lora_ids must have dtype torch.int32, got torch.int64"),
        ("hidden_states", lambda t: t[0], "hidden_states must have shape [num_tokens, hidden_size], got (96,)"),
        ("topk_ids", lambda t: t.long(), "topk_ids must have dtype torch.int32"),
        ("w2", lambda t: t[:-1], "w2 must have shape"),
        ("scheme", "fp7", "scheme must be one of"),
        ("backend", "nonsense", "backend must be one of"),
    ]
    return [Wrong("moe_routed_lora", "sample", *row) for row in rows]


def _on_the_host() -> list[tuple[str, str, Any, str]]:
    """A layer with experts on the host: hidden_size 64, 5 tokens, top_k 2."""
    op = "host_experts"
    return [
        (op, "hidden_states", lambda t: t[:, 1:], "hidden_states must have shape [num_tokens, 64], got (5, 63)"),
        (op, "hidden_states", lambda t: t.double(), "hidden_states must have one of the dtypes"),
        (op, "places", lambda t: t[0], "places must have shape [num_tokens, top_k] with top_k in 1 ... 32, got (2,)"),
        (op, "places", lambda t: t[1:], "places must have 5 rows like hidden_states, got (4, 2)"),
        (op, "places", lambda t: t.long(), "places must have one of the dtypes ['torch.int32'], got torch.int64"),
        (op, "topk_weights", lambda t: t[:, :1], "topk_weights must have shape (5, 2) like places, got (5, 1)"),
        (op, "topk_weights", lambda t: t.half(), "topk_weights must have one of the dtypes ['torch.float32']"),
        (op, "layer", "nobody", "layer must be the name of a HostExperts of this process, which still exists"),
        (op, "out_dtype", torch.int8, "out_dtype must be None or one of"),
    ]


def _exchanged() -> list[tuple[str, str, Any, str]]:
    """The ops of expert parallelism."""
    return [
        ("ep_place", "topk_ids", lambda t: t[0], "topk_ids must have shape [num_tokens, top_k] with top_k at least 1"),
        ("ep_place", "topk_ids", lambda t: t.short(), "topk_ids must have one of the dtypes"),
        ("ep_place", "first", lambda t: t[1:], "first, count and load must have an element for each expert"),
        ("ep_place", "slots", lambda t: t[:0], "slots must be a torch.int32 tensor of one dimension, not empty"),
        ("ep_place", "load", lambda t: t.repeat_interleave(2)[::2], "load must be contiguous"),
        ("ep_place", "rank", -1, "rank must be at least 0, got -1"),
        ("ep_dispatch", "hidden_states", lambda t: t.long(), "hidden_states must have one of the dtypes"),
        ("ep_dispatch", "hidden_states", lambda t: t[1:], "hidden_states must have 5 rows like topk_ids"),
        ("ep_dispatch", "topk_ids", lambda t: t.long(), "topk_ids must have one of the dtypes ['torch.int32']"),
        ("ep_dispatch", "topk_weights", lambda t: t[:, 1:], "topk_weights must have shape (5, 2) like topk_ids"),
        ("ep_dispatch", "transport", "mpi", "transport must be one of"),
        ("ep_dispatch", "max_tokens", 4, "topk_ids must have at most max_tokens = 4 rows"),
        ("ep_dispatch", "capacity", -1, "capacity must be at least 0, got -1"),
        ("ep_dispatch", "capacity", 3, "slots must have an element for each of 1 ranks"),
        ("ep_experts", "hidden_states", lambda t: t[0], "hidden_states must have shape [num_tokens, hidden_size]"),
        ("ep_experts", "topk_ids", lambda t: t.short(), "topk_ids must have dtype"),
        ("ep_experts", "first", lambda t: t[1:], "first, count and load must have an element for each expert"),
        ("ep_experts", "load", lambda t: t.int(), "load must be a torch.int64 tensor of one dimension"),
        ("ep_experts", "transport", "mpi", "transport must be one of"),
        ("ep_experts", "max_tokens", 4, "topk_ids must have at most max_tokens = 4 rows"),
        ("ep_experts", "slots_of_ranks", [2, 2], "slots_of_ranks must have an element for each of 1 ranks"),
        ("ep_experts", "partial_dtype", torch.float8_e4m3fn, "partial_dtype must be one of"),
        ("ep_experts", "scheme", "nvfp5", "scheme must be one of"),
        ("ep_combine", "partial_rows", lambda t: t[1:], "partial_rows must have 8 rows, 8 for each rank"),
        ("ep_combine", "partial_rows", lambda t: t.double(), "partial_rows must be [rows, hidden_size] of one of"),
        ("ep_combine", "positions", lambda t: t.new_zeros(3, 1), "positions must have 0 rows"),
        ("ep_combine", "num_tokens", 9, "num_tokens must be at most max_tokens = 8, got 9"),
        ("ep_combine", "num_tokens", -1, "num_tokens must be at least 0, got -1"),
        ("ep_combine", "out_dtype", torch.float64, "out_dtype must be one of"),
        (
            "ep_combine",
            "wire_dtype",
            torch.float8_e5m2,
            "wire_dtype must be None or one of ['torch.float8_e4m3fn'], got",
        ),
    ]


WRONG = [*_shared(), *_routed(), *_monolithic(), *_packed(), *_schemes(), *_layer_of_hidden(), *_lora(), *_others()]


def right_call(op: str, base: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that the op takes. base: "nvfp4", "plain" or an op family: such weights; "packed": hidden states too,
    "packed1": with a top_k of 1; "sample": the first one of samples.py."""
    sample: Callable[[Case, str], Any] = routed_sample if "routed" in op else monolithic_sample
    if base == "packed1":
        args, keywords = _packed_top_1(op)
    elif base == "packed":
        args, keywords = packed_sample(Case(act_format="nvfp4", input_scale="tensor"), "reference")
    elif base in ("nvfp4", "plain"):
        args, keywords = sample(NVFP4 if base == "nvfp4" else PLAIN, "reference")
    elif base in FAMILIES:
        scheme = FAMILIES[base][0]
        case = Case(scheme=scheme.name, act_format=scheme.act_formats[0], hidden=96, inter=64, bias=True)
        args, keywords = sample(case, "reference")
    else:
        args, keywords = SAMPLES[op]("cpu")[0]
    keywords = dict(keywords)
    if op.endswith(".out"):
        keywords["out"] = torch.zeros_like(args[0])
    return args, keywords


def _packed_top_1(op: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    case = Case(act_format="nvfp4", input_scale="tensor", top_k=1)
    packed, keywords = packed_sample(case, "reference")
    if op == "nvfp4_moe":
        args, keywords = monolithic_sample(case, "reference")
        return (*packed[:2], *args[2:]), keywords
    return packed, keywords


def wrong_call(row: Wrong) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a row."""
    args, keywords = right_call(row.op, row.base)
    names, defaults = arguments(row.op)
    values = dict(zip(names, args, strict=False)) | keywords
    assert row.argument in names or row.argument == "out", f"{row.op} has no argument {row.argument}"
    values[row.argument] = row.value(values[row.argument]) if callable(row.value) else row.value
    out = {"out": values.pop("out")} if "out" in values else {}
    count = max(i for i, n in enumerate(names) if n in values) + 1
    return tuple(values.get(n, d) for n, d in zip(names[:count], defaults, strict=False)), out
