"""Bad input: for every op a table of (what is changed, the message). Nothing crashes, nothing is silent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_calls import NVFP4, ONE_SCALE, PLAIN
from problems import Case
from samples import SAMPLES, monolithic_sample, overload, packed_sample, routed_sample

from torch_moe_ops.backends import BACKENDS
from torch_moe_ops.core.schemas import FAMILIES, SCHEMAS, arguments

Change = tuple[str, Any]  # argument, new value or a function of the old one


def _expert_rows(prefix: str) -> list[tuple[str, str, Change, str]]:
    """(op, base, change, message) for the arguments that all expert ops share."""
    routed, mono = f"{prefix}moe_routed", f"{prefix}moe"
    base = "nvfp4" if prefix else "plain"
    hidden = 64 if prefix else 40
    rows = []
    for op in (routed, mono):
        rows += [
            (
                op,
                base,
                ("hidden_states", lambda t: t[0]),
                f"hidden_states must have shape [num_tokens, hidden_size], got ({hidden},)",
            ),
            (op, base, ("hidden_states", lambda t: t.double()), "hidden_states must have one of the dtypes"),
            (op, base, ("w13", lambda t: t.to(torch.int64)), "w13 must have dtype"),
            (op, base, ("w13", lambda t: t[:0]), "w13 must have at least 3 dimensions and one expert"),
            (op, base, ("w13", lambda t: t[:, :-1]), "w13 must have shape"),
            (
                op,
                base,
                ("hidden_states", lambda t: t[:, :16]),
                f"hidden_states must have hidden_size {hidden} (rows of w2), got 16",
            ),
            (op, base, ("w2", lambda t: t[0, 0]), "w2 must have at least 3 dimensions"),
            (op, base, ("w2", lambda t: t[:-1]), "w2 must have shape"),
            (
                op,
                base,
                ("w13_bias", lambda t: t.bfloat16()),
                "w13_bias must have dtype torch.float32, got torch.bfloat16",
            ),
            (op, base, ("w13_bias", lambda t: t[:, :-1]), "w13_bias must have shape"),
            (op, base, ("w2_bias", lambda t: t[:-1]), "w2_bias must have shape"),
            (op, base, ("w13", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)), "w13 must be contiguous"),
            (op, base, ("backend", "nonsense"), f"backend must be one of {list(BACKENDS)}, got 'nonsense'"),
            (op, base, ("backend", "auto"), f"backend must be one of {list(BACKENDS)}, got 'auto'"),
            (op, base, ("activation", "nonsense"), "activation must be one of"),
            (op, base, ("act_format", "nonsense"), "act_format must be one of"),
            (op, base, ("weight_policy", "folded"), "weight_policy must be one of ['exact']"),
            (op, base, ("swiglu_alpha", 1.5), "swiglu_alpha must"),
            (op, base, ("local_expert_offset", -1), "local_expert_offset must be at least 0, got -1"),
            (op, base, ("out_dtype", torch.int32), "out_dtype must be None or one of"),
        ]
    rows += [
        (
            routed,
            base,
            ("num_experts", 3),
            "num_experts must be 0 or at least local_expert_offset + local experts = 4, got 3",
        ),
        (
            routed,
            base,
            ("topk_ids", lambda t: t.long()),
            "topk_ids must have dtype torch.int32 (fused_moe_routed also takes torch.int64), got torch.int64",
        ),
        (
            routed,
            base,
            ("topk_ids", lambda t: t[:-1]),
            "topk_ids must have num_tokens = 5 rows like hidden_states, got (4, 2)",
        ),
        (routed, base, ("topk_ids", lambda t: t[:, 0]), "topk_ids must have shape [num_tokens, top_k]"),
        (routed, base, ("topk_ids", lambda t: t[:, :0]), "topk_ids must have shape [num_tokens, top_k]"),
        (
            routed,
            base,
            ("topk_weights", lambda t: t.bfloat16()),
            "topk_weights must have dtype torch.float32 (fused_moe_routed also takes other float dtypes), got",
        ),
        (
            routed,
            base,
            ("topk_weights", lambda t: t[:, :1]),
            "topk_weights must have shape (5, 2) like topk_ids, got (5, 1)",
        ),
        (
            routed,
            base,
            ("router_weight_on_input", True),
            "router_weight_on_input must be False unless top_k is 1, got 'top_k = 2'",
        ),
        (
            mono,
            base,
            ("router_logits", lambda t: torch.zeros(5, 8)),
            "num_experts must be 8, the columns of router_logits, where only 4 experts are local, got 0",
        ),
        (mono, base, ("num_experts", 3), "num_experts must be 0 or 4, the columns of router_logits, got 3"),
        (
            mono,
            base,
            ("router_logits", lambda t: t[:-1]),
            "router_logits must have num_tokens = 5 rows like hidden_states, got (4, 4)",
        ),
        (mono, base, ("router_logits", lambda t: t.long()), "router_logits must have"),
        (mono, base, ("routing_method", "nonsense"), "routing_method must be one of"),
        (mono, base, ("top_k", 5), "top_k must be"),
        (mono, base, ("top_k", 0), "top_k must be"),
        (mono, base, ("routing_bias", torch.zeros(4)), "routing_bias must"),
        (
            mono,
            base,
            ("local_expert_offset", 1),
            "num_experts must be 0 or at least local_expert_offset + local experts = 5, got 4",
        ),
    ]
    return rows


def _nvfp4_rows() -> list[tuple[str, str, Change, str]]:
    rows = []
    for op in ("nvfp4_moe_routed", "nvfp4_moe"):
        rows += [
            (
                op,
                "nvfp4",
                ("hidden_states", lambda t: t[:, :24]),
                "hidden_size must be a positive multiple of 16, got 24",
            ),
            (
                op,
                "nvfp4",
                ("hidden_states", lambda t: t[:, :0]),
                "hidden_size must be a positive multiple of 16, got 0",
            ),
            (
                op,
                "nvfp4",
                ("w13", lambda t: t.to(torch.bfloat16)),
                "w13 must have dtype torch.uint8, got torch.bfloat16",
            ),
            (
                op,
                "nvfp4",
                ("w13_scale", lambda t: t.float()),
                "w13_scale must have dtype torch.float8_e4m3fn or torch.uint8, got torch.float32",
            ),
            (op, "nvfp4", ("w2_scale", lambda t: t[..., :-1]), "w2_scale must have shape"),
            (op, "nvfp4", ("g1_alphas", lambda t: t.double()), "g1_alphas must have dtype torch.float32"),
            (op, "nvfp4", ("g1_alphas", lambda t: t[:-1]), "g1_alphas must have shape (4,) or (4, 2), got (3,)"),
            (op, "nvfp4", ("g2_alphas", lambda t: t[0]), "g2_alphas must have shape (4,), got ()"),
            (op, "nvfp4", ("a1_gscale", lambda t: t.reshape(1)), "a1_gscale must have shape () or (4,), got (1,)"),
            (op, "nvfp4", ("a2_gscale", lambda t: t.double()), "a2_gscale must have dtype torch.float32"),
            (
                op,
                "nvfp4",
                ("hidden_states_scale", torch.zeros(5, 4)),
                "hidden_states must have dtype torch.uint8 (packed",
            ),
            (op, "nvfp4", ("act_format", "int8"), "act_format must be one of ['nvfp4', 'none', 'fp8'], got 'int8'"),
        ]
    routed = "nvfp4_moe_routed"
    return [
        *rows,
        (
            routed,
            "packed",
            ("act_format", "none"),
            "hidden_states_scale must be None for act_format 'none', got (5, 4)",
        ),
        (routed, "packed", ("hidden_states_scale", None), "hidden_states must have one of the dtypes"),
        (
            routed,
            "packed",
            ("hidden_states_scale", lambda t: t[:, :-1]),
            "hidden_states_scale must have shape (5, 4), got (5, 3)",
        ),
        (
            routed,
            "packed",
            ("hidden_states_scale", lambda t: t.float()),
            "hidden_states_scale must have dtype torch.float8_e4m3fn",
        ),
        (
            routed,
            "packed1",
            ("router_weight_on_input", True),
            "hidden_states must be unquantized where the router weight goes on the input, got torch.uint8",
        ),
        (
            "nvfp4_moe",
            "packed1",
            ("routing_method", "llama4"),
            "hidden_states must be unquantized where the router weight goes on the input, got torch.uint8",
        ),
        (routed, "packed", ("a1_gscale", None), "a1_gscale must be given where hidden_states are packed"),
        (routed, "packed", ("a1_gscale", lambda t: t.expand(4).contiguous()), ONE_SCALE),
    ]


def _other_rows() -> list[tuple[str, str, Change, str]]:
    x16 = torch.zeros(3, 16)
    return [
        ("route", "route", ("router_logits", lambda t: t.long()), "router_logits must have"),
        ("route", "route", ("router_logits", lambda t: t[0]), "router_logits must have"),
        ("route", "route", ("router_logits", lambda t: torch.zeros(2, 2049)), "num_experts must"),
        ("route", "route", ("routing_method", "softmax"), "routing_method must be one of"),
        ("route", "route", ("top_k", 33), "top_k must"),
        ("route", "route", ("routing_bias", torch.zeros(16)), "routing_bias must"),
        ("route", "route", ("n_group", 3), "topk_group must be in [1, 3] with n_group=3, got 0"),
        ("quantize_nvfp4", "quantize_nvfp4", ("x", lambda t: t.double()), "x must have one of the dtypes"),
        (
            "quantize_nvfp4",
            "quantize_nvfp4",
            ("x", lambda t: t[:, :24]),
            "x must have K a positive multiple of 16, got 24",
        ),
        ("quantize_nvfp4", "quantize_nvfp4", ("gscale", lambda t: t.double()), "gscale must have dtype torch.float32"),
        (
            "quantize_nvfp4",
            "quantize_nvfp4",
            ("gscale", torch.ones(4)),
            "gscale must have shape () or (5,) (one per row), got (4,)",
        ),
        (
            "dynamic_gscale_nvfp4",
            "dynamic_gscale_nvfp4",
            ("x", lambda t: t[:, :8]),
            "x must have K a positive multiple of 16, got 8",
        ),
        (
            "swizzle_scale",
            "swizzle_scale",
            ("scale", x16),
            "scale must have a dtype of 1 or 2 bytes, got torch.float32",
        ),
        (
            "swizzle_scale",
            "swizzle_scale",
            ("scale", lambda t: t[0, 0]),
            "scale must have shape [..., rows, cols], got (6,)",
        ),
        ("unswizzle_scale", "unswizzle_scale", ("rows", -1), "rows must be at least 0, got -1"),
        (
            "unswizzle_scale",
            "unswizzle_scale",
            ("cols", 9),
            "swizzled must hold 3072 elements in its last dimension (rows=130, cols=9 padded to 128x4 tiles), got 2048",
        ),
    ]


def _scheme_rows() -> list[tuple[str, str, Change, str]]:
    """What each further scheme demands of its own arguments."""
    rows = []
    for family in FAMILIES:
        scheme = FAMILIES[family][0]
        if family in ("nvfp4", ""):
            continue
        for op in (f"{family}_moe_routed", f"{family}_moe", f"{family}_moe_routed.out"):
            rows += [
                (op, family, ("w13", lambda t: t.to(torch.float64)), "w13 must have dtype"),
                (op, family, ("w2", lambda t: t[:, :-1]), "w2 must have shape"),
                (op, family, ("w13_scale", lambda t: t.to(torch.float64)), "w13_scale must have dtype"),
                (op, family, ("w2_scale", lambda t: t[:-1]), "w2_scale must have shape"),
                (op, family, ("w2_scale", None), "w2_scale"),
                (op, family, ("w13_bias", lambda t: t.half()), "w13_bias must have dtype torch.float32"),
                (
                    op,
                    family,
                    ("act_format", "nvfp4"),
                    f"act_format must be one of {list(scheme.act_formats)}, got 'nvfp4'",
                ),
                (op, family, ("weight_policy", "packed"), "weight_policy must be one of ['exact']"),
                (op, family, ("backend", "nonsense"), "backend must be one of"),
                (op, family, ("hidden_states", lambda t: t[:, :-1]), "hidden_size must be a positive multiple"),
            ]
            if scheme.has_zero_point:
                zeros = torch.zeros(4, 128, 2, dtype=torch.int32)
                rows.append((op, family, ("w13_zero_point", zeros), "w13_zero_point must have dtype"))
            if scheme.static_acts and scheme.act_formats[0] not in scheme.static_acts:
                rows.append((op, family, ("a1_gscale", torch.ones(())), "a1_gscale must be None for act_format"))
            if len(FAMILIES[family]) > 1:
                rows.append((op, family, ("element", "e1m4"), "element must be one of ['e3m2', 'e2m3'], got 'e1m4'"))
    x = torch.zeros(3, 40)
    return [
        *rows,
        ("quantize_mxfp4", "quantize_mxfp4", ("x", x), "x must have K a positive multiple of 32, got 40"),
        (
            "quantize_mxfp8",
            "quantize_mxfp8",
            ("rule", "up"),
            "rule must be one of ['floor', 'rceil', 'even'], got 'up'",
        ),
        ("quantize_fp8", "quantize_fp8", ("group", -1), "group must be 0 (the whole row) or positive, got -1"),
        ("quantize_fp8", "quantize_fp8", ("gscale", torch.ones(2)), "gscale must have shape () or (5,)"),
        ("quantize_int8", "quantize_int8", ("x", x.double()), "x must have one of the dtypes"),
        ("quantize_int8", "quantize_int8", ("gscale", x[0]), "gscale must have shape () or (5,)"),
    ]


def _out_rows() -> list[tuple[str, str, Change, str]]:
    rows = []
    for prefix, base in (("nvfp4_", "nvfp4"), ("", "plain")):
        op = f"{prefix}moe_routed.out"
        rows += [
            (op, base, ("out", lambda t: t[:-1]), "out must have shape"),
            (op, base, ("out", lambda t: t.double()), "out must have dtype torch.bfloat16, got torch.float64"),
            (op, base, ("out", lambda t: t.T.contiguous().T), "out must be contiguous"),
            (
                op,
                base,
                ("topk_ids", lambda t: t.long()),
                "topk_ids must have dtype torch.int32 (fused_moe_routed also takes torch.int64), got torch.int64",
            ),
        ]
    return rows


ROWS = _expert_rows("nvfp4_") + _expert_rows("") + _nvfp4_rows() + _other_rows() + _out_rows() + _scheme_rows()


def _base(op: str, kind: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sample: Callable[[Case, str], Any] = routed_sample if "routed" in op else monolithic_sample
    if kind == "packed1":
        args, keywords = _packed_top_1(op)
    elif kind == "packed":
        args, keywords = packed_sample(Case(act_format="nvfp4", input_scale="tensor"), "reference")
    elif kind in ("nvfp4", "plain"):
        args, keywords = sample(NVFP4 if kind == "nvfp4" else PLAIN, "reference")
    elif kind in FAMILIES:
        scheme = FAMILIES[kind][0]
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


def _changed(op: str, kind: str, change: Change) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, keywords = _base(op, kind)
    names, _ = arguments(op)
    values = dict(zip(names, args, strict=False)) | keywords
    name, new = change
    assert name in names or name == "out", f"{op} has no argument {name}"
    values[name] = new(values[name]) if callable(new) else new
    out = {"out": values.pop("out")} if "out" in values else {}
    count = max(i for i, n in enumerate(names) if n in values) + 1
    defaults = arguments(op)[1]
    return tuple(values.get(n, d) for n, d in zip(names[:count], defaults, strict=False)), out


def _id(row: tuple[str, str, Change, str]) -> str:
    return f"{row[0]}-{row[2][0]}-{row[3][:40]}"


@pytest.mark.parametrize("row", ROWS, ids=_id)
def test_message(row: tuple[str, str, Change, str]) -> None:
    op, kind, change, text = row
    args, keywords = _changed(op, kind, change)
    with pytest.raises(RuntimeError) as caught:
        overload(op)(*args, **keywords)
    message = str(caught.value)
    assert message.startswith(f"moeq::{op.removesuffix('.out')}: "), message
    assert text in message, message


@pytest.mark.parametrize("row", ROWS, ids=_id)
def test_the_fake_gives_the_same_message(row: tuple[str, str, Change, str]) -> None:
    op, kind, change, text = row
    args, keywords = _changed(op, kind, change)
    mode = torch._subclasses.FakeTensorMode()
    fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    fake_keywords = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
    with mode, pytest.raises(RuntimeError) as caught:
        overload(op)(*fake, **fake_keywords)
    assert text in str(caught.value), str(caught.value)


def test_every_op_has_a_row() -> None:
    assert {row[0] for row in ROWS} == set(SCHEMAS)


def test_mixed_devices_name_the_argument() -> None:
    args, keywords = _base("nvfp4_moe_routed", "nvfp4")
    names, _ = arguments("nvfp4_moe_routed")
    for name in ("w13", "g1_alphas", "topk_ids"):
        values = list(args)
        values[names.index(name)] = values[names.index(name)].to("meta")
        with pytest.raises(RuntimeError):
            torch.ops.moeq.nvfp4_moe_routed(*values, **keywords)


@pytest.mark.parametrize("argument", ["hidden_states", "w13_bias", "topk_weights"])
def test_out_must_not_share_memory(argument: str) -> None:
    case = dataclasses.replace(PLAIN, dtype=torch.float32)
    args, keywords = routed_sample(case, "reference")
    names, _ = arguments("moe_routed")
    shared = torch.zeros(5 * 40 + 500)
    value = args[names.index(argument)]
    inside = shared[: value.numel()].view(value.shape).copy_(value)
    values = list(args)
    values[names.index(argument)] = inside
    out = shared[: 5 * 40].view(5, 40)
    with pytest.raises(RuntimeError, match="out must not share memory with an argument"):
        torch.ops.moeq.moe_routed.out(*values, **keywords, out=out)
