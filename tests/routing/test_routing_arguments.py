"""Which routing arguments are legal, what the others are told, and the enum of the field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from torch_moe_ops.core.routing_methods import (
    METHOD_NAMES,
    METHOD_TYPES,
    ROUTING_METHODS,
    RoutingMethodType,
    get_routing_method_type,
)
from torch_moe_ops.routing.options import Routing, check_route

Kind = RoutingMethodType
LEGAL: dict[str, Any] = {
    "router_logits": torch.zeros(2, 16),
    "routing_bias": torch.zeros(16),
    "routing_method": "deepseek_v3",
    "top_k": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "renormalize": False,
}
PLAIN: dict[str, Any] = {"router_logits": torch.zeros(2, 16), "routing_bias": None, "top_k": 1}
BIASED = "deepseek_v3, minimax2, deepseek_v4"
SCALED = "default, deepseek_v3, minimax2, deepseek_v4"
GROUPED = "default, renormalize, deepseek_v3, renormalize_naive"

# What is changed in LEGAL, and the error that it gives.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"routing_method": "softmax"}, f"routing_method must be one of {list(ROUTING_METHODS)}, got 'softmax'"),
    ({"top_k": 0}, "top_k must be in [1, 32], got 0"),
    ({"top_k": 40}, "top_k must be in [1, 32], got 40"),
    ({"top_k": 9}, "top_k must be at most 8, the experts in topk_group groups, got 9"),
    ({"top_k": 17, "n_group": 0, "topk_group": 0}, "top_k must be in [1, 16], got 17"),
    ({"n_group": -1}, "n_group must be at least 0, got -1"),
    ({"n_group": 3}, "n_group must divide num_experts (=16), got 3"),
    ({"n_group": 16}, "n_group must leave at least 2 experts per group, whose two best make its score, got 16"),
    ({"topk_group": 5}, "topk_group must be in [1, 4] with n_group=4, got 5"),
    ({"topk_group": 0}, "topk_group must be in [1, 4] with n_group=4, got 0"),
    ({"n_group": 0}, "topk_group must be in [0, 1] with n_group=0, got 2"),
    ({"routed_scaling_factor": math.inf}, "routed_scaling_factor must be finite, got inf"),
    ({"routed_scaling_factor": math.nan}, "routed_scaling_factor must be finite, got nan"),
    ({"routing_bias": torch.zeros(16).bfloat16()}, "routing_bias must have dtype torch.float32, got torch.bfloat16"),
    (
        {**PLAIN, "routing_method": "llama4", "top_k": 2, "n_group": 0, "topk_group": 0},
        "top_k must be 1 for 'llama4', got 2",
    ),
    (
        {"routing_method": "renormalize"},
        f"routing_bias must be None for 'renormalize' (an option of {BIASED}), got (16,)",
    ),
    (
        {**PLAIN, "routing_method": "topk"},
        f"n_group must be 0 or 1 for 'topk' (an option of {GROUPED}), got 4",
    ),
    (
        {**PLAIN, "routing_method": "renormalize"},
        f"routed_scaling_factor must be 1.0 for 'renormalize' (an option of {SCALED}), got 2.5",
    ),
    (
        {**PLAIN, "routing_method": "renormalize", "routed_scaling_factor": 1.0},
        "renormalize must be None or True for 'renormalize' (an option of default, deepseek_v3, renormalize_naive, "
        "sigmoid_renorm, minimax2, sigmoid, deepseek_v4), got False",
    ),
]
# Only an op sees logits.
WRONG_LOGITS: list[tuple[dict[str, Any], str]] = [
    (
        {"router_logits": torch.zeros(2, 16, dtype=torch.float64)},
        "router_logits must have dtype in ['torch.bfloat16', 'torch.float16', 'torch.float32'], got torch.float64",
    ),
    (
        {"router_logits": torch.zeros(16)},
        "router_logits must have shape [num_tokens, num_experts], got (16,)",
    ),
    ({"routing_bias": torch.zeros(15)}, "routing_bias must have shape [num_experts (=16)], got (15,)"),
    ({"router_logits": torch.zeros(2, 0), "routing_bias": None}, "num_experts must be in [1, 2048], got 0"),
    ({"router_logits": torch.zeros(2, 2050), "routing_bias": None}, "num_experts must be in [1, 2048], got 2050"),
]


@pytest.mark.parametrize(("change", "text"), WRONG + WRONG_LOGITS, ids=lambda v: v[:60] if isinstance(v, str) else "")
def test_the_op_refuses(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RuntimeError) as error:
        check_route("nvfp4_moe", **{**LEGAL, **change})
    assert str(error.value) == f"moeq::nvfp4_moe: {text}"


@pytest.mark.parametrize(("change", "text"), WRONG, ids=lambda v: v[:60] if isinstance(v, str) else "")
def test_routing_refuses_the_same_by_field(change: dict[str, Any], text: str) -> None:
    arguments = {**LEGAL, **change}
    del arguments["router_logits"]
    with pytest.raises(ValueError) as error:
        Routing(
            arguments.pop("routing_method"),
            arguments.pop("top_k"),
            bias=arguments.pop("routing_bias"),
            **arguments,
        )
    text = text.replace("routing_method", "method").replace("routing_bias", "bias")
    assert str(error.value) == f"Routing: {text}"


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 2.0), ("top_k", True), ("n_group", None), ("renormalize", 1), ("bias", [0.0]), ("topk_group", "1")],
)
def test_routing_refuses_wrong_types_by_field(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"Routing: {field} must be"):
        Routing(**{"method": "deepseek_v3", "top_k": 2, field: value})
    with pytest.raises(TypeError, match="Routing: routed_scaling_factor must be"):
        Routing("deepseek_v3", 2, routed_scaling_factor="2.5")  # type: ignore[arg-type]


def test_routing_fields_keep_their_order() -> None:
    bias = torch.zeros(16)
    routing = Routing("deepseek_v3", 4, 4, 2, 2.5, bias, False)
    assert dataclasses.astuple(routing)[:5] == ("deepseek_v3", 4, 4, 2, 2.5)
    assert routing.bias is bias and routing.renormalize is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        routing.top_k = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"Routing: bias must have shape \[num_experts\], got \(4, 4\)"):
        Routing("deepseek_v3", 4, bias=torch.zeros(4, 4))


def test_every_method_accepts_its_plain_form_and_what_it_does_anyway() -> None:
    always = ("renormalize", "renormalize_naive", "sigmoid_renorm", "deepseek_v3", "minimax2", "deepseek_v4")
    for method in ROUTING_METHODS:
        check_route("route", torch.zeros(0, 8), None, method, 1)
        for dtype in (torch.bfloat16, torch.float16):
            check_route("route", torch.zeros(3, 2048, dtype=dtype), None, method, 1, 1, 1, 1.0, method in always)
        Routing(method, 1, renormalize=method in always)
    check_route("route", **LEGAL)


def test_enum_numbers() -> None:
    shared = ["Default", "Renormalize", "DeepSeekV3", "Llama4", "RenormalizeNaive", "TopK"]
    assert [kind.name for kind in sorted(Kind) if kind < 100] == shared
    assert [RoutingMethodType[name].value for name in shared] == list(range(6))
    assert len(ROUTING_METHODS) == 11 and len(METHOD_NAMES) == 11
    assert all(METHOD_NAMES[METHOD_TYPES[name]] == name for name in ROUTING_METHODS)
    assert {kind for kind in Kind if kind not in METHOD_NAMES} == {Kind.Custom, Kind.Simulated, Kind.Unspecified}
    for kind, name in METHOD_NAMES.items():
        assert kind.name.lower() == name.replace("_", "")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        # scoring_func, top_k, renormalize, num_expert_group, has_e_score_bias
        (("sqrtsoftplus", 6, True, None, True), Kind.DeepseekV4),
        (("sqrtsoftplus", 6, True, 0, False), Kind.DeepseekV4),
        (("sqrtsoftplus", 6, False, None, True), Kind.Unspecified),
        (("sqrtsoftplus", 6, True, 4, True), Kind.Unspecified),
        (("sigmoid", 8, True, 8, True), Kind.DeepSeekV3),
        (("sigmoid", 8, True, 1, True), Kind.DeepSeekV3),
        (("sigmoid", 8, False, 8, True), Kind.Unspecified),
        (("sigmoid", 8, True, 0, True), Kind.MiniMax2),
        (("sigmoid", 8, True, None, True), Kind.MiniMax2),
        (("sigmoid", 8, False, None, True), Kind.Unspecified),
        (("softmax", 8, True, 8, True), Kind.Unspecified),
        (("softmax", 8, True, None, True), Kind.Unspecified),
        (("sigmoid", 1, False, None, False), Kind.Sigmoid),
        (("sigmoid", 1, True, None, False), Kind.SigmoidRenorm),
        (("sigmoid", 4, False, None, False), Kind.Sigmoid),
        (("sigmoid", 4, True, 1, False), Kind.SigmoidRenorm),
        (("sigmoid", 4, True, 4, False), Kind.Unspecified),
        (("softmax", 8, True, None, False), Kind.Renormalize),
        (("softmax", 8, True, 8, False), Kind.Renormalize),
        (("softmax", 8, False, None, False), Kind.Default),
        (("softmax", 8, False, 8, False), Kind.Default),
        (("tanh", 8, True, None, False), Kind.Unspecified),
    ],
)
def test_get_routing_method_type(arguments: tuple[Any, ...], kind: RoutingMethodType) -> None:
    assert get_routing_method_type(*arguments) is kind
    assert get_routing_method_type(*arguments, routed_scaling_factor=2.5) is kind


def test_llama4_only_where_the_weight_goes_on_the_input() -> None:
    assert get_routing_method_type("sigmoid", 1, False, None, False, weight_on_input=True) is Kind.Llama4
    assert get_routing_method_type("sigmoid", 1, True, None, False, weight_on_input=True) is Kind.SigmoidRenorm
    assert get_routing_method_type("sigmoid", 2, False, None, False, weight_on_input=True) is Kind.Sigmoid
